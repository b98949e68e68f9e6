"""The adapter folder and its card."""
