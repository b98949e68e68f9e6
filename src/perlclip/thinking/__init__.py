"""When an image may stop thinking."""
