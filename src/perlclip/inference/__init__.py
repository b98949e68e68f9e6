"""Using what was trained: labels for images, accuracy of labelled ones."""
