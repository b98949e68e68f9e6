"""Tables and figures from runs, beside the numbers of the paper."""
