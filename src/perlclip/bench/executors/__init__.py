"""Where runs are done."""
