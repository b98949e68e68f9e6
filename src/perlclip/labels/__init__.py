"""Labels before they are trained on: which are wrong, which images are there twice, which to label next."""
