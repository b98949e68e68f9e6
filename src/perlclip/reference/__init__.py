"""Every method without a shortcut, over `transformers`' own layers."""
