"""What a user may act on: calibrated probabilities, "none of these", sets of labels with a guarantee. Plain data."""
