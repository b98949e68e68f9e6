"""A service for many adapters of one backbone: `perlclip serve`."""
