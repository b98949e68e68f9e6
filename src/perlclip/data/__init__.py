"""Images and labels: from a folder, a manifest, a known data set, or a suite of them."""

from perlclip.data.coop.catalog import Check, check_dataset, dataset_names, load_dataset, load_shots, shots_json
from perlclip.data.decoding import readable
from perlclip.data.folder import read_class_names, train_val
from perlclip.data.images import ON_ERROR, Unreadable, check_image, image_name, read_image, try_image
from perlclip.data.sets import PARTS, SPLITS, DataSet, ImageSet, ImageSource, few_shot_split, for_classes
from perlclip.data.sources import has_split, images_to_test, load_images, train_and_val
from perlclip.data.suites import SUITES, Suite, suite
from perlclip.data.surveys import Survey, survey
from perlclip.data.toybox import load_toybox, toybox_names
from perlclip.text.templates import DEFAULT_TEMPLATE

__all__ = [
    "DEFAULT_TEMPLATE", "ON_ERROR", "PARTS", "SPLITS", "SUITES", "Check", "DataSet", "ImageSet", "ImageSource", "Suite",
    "Survey", "Unreadable", "check_dataset", "check_image", "dataset_names", "few_shot_split", "for_classes",
    "has_split", "image_name", "images_to_test", "load_dataset", "load_images", "load_shots", "load_toybox",
    "read_class_names", "read_image", "readable", "shots_json", "suite", "survey", "toybox_names", "train_and_val",
    "train_val", "try_image",
]  # fmt: skip
