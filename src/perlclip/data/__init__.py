"""Images and labels: from a folder, a manifest, or a known data set."""

from perlclip.data.folder import load_images, read_class_names, train_val
from perlclip.data.images import Preprocess, check_image, read_image
from perlclip.data.sets import DEFAULT_TEMPLATE, DataSet, ImageSet, ImageSource

__all__ = [
    "DEFAULT_TEMPLATE",
    "DataSet",
    "ImageSet",
    "ImageSource",
    "Preprocess",
    "check_image",
    "load_images",
    "read_class_names",
    "read_image",
    "train_val",
]
