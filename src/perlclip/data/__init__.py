"""Images and labels: from a folder, a manifest, or a known data set."""

from perlclip.data.coop.catalog import check_dataset, dataset_names, load_dataset, load_shots, shots_json
from perlclip.data.folder import load_images, read_class_names, train_val
from perlclip.data.images import check_image, read_image
from perlclip.data.sets import DataSet, ImageSet, ImageSource, few_shot_split
from perlclip.text.templates import DEFAULT_TEMPLATE

__all__ = [
    "DEFAULT_TEMPLATE",
    "DataSet",
    "ImageSet",
    "ImageSource",
    "check_dataset",
    "check_image",
    "dataset_names",
    "few_shot_split",
    "load_dataset",
    "load_images",
    "load_shots",
    "read_class_names",
    "read_image",
    "shots_json",
    "train_val",
]
