"""The studio: label images in a browser while a model is refitted behind, and take an adapter home."""
