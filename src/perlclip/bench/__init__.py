"""Benchmarks: which runs there are, how one is done, where it is kept."""
