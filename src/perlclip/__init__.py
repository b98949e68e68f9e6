"""perlclip: adapt a frozen CLIP from a handful of images.

The public names are imported on first use, so that `import perlclip` and `perlclip --help` stay instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Adapter": "adapter",
    "Backbone": "backbone",
    "Calibration": "calibration",
    "Classifier": "classifier",
    "DataSet": "data",
    "Evaluation": "evaluation",
    "ImageSet": "data",
    "PerlclipError": "errors",
    "Policy": "adaptive",
    "Prediction": "classifier",
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "calibrate": "calibration",
    "create_method": "methods",
    "dataset_names": "data",
    "evaluate": "evaluation",
    "fit": "train",
    "list_methods": "methods",
    "load_adapter": "adapter",
    "load_backbone": "backbone",
    "load_dataset": "data",
    "load_images": "data",
    "save_adapter": "adapter",
    "train_val": "data",
}
__all__ = [
    "RECIPES",
    "Adapter",
    "Backbone",
    "Calibration",
    "Classifier",
    "DataSet",
    "Evaluation",
    "ImageSet",
    "PerlclipError",
    "Policy",
    "Prediction",
    "Recipe",
    "__version__",
    "calibrate",
    "create_method",
    "dataset_names",
    "evaluate",
    "fit",
    "list_methods",
    "load_adapter",
    "load_backbone",
    "load_dataset",
    "load_images",
    "save_adapter",
    "train_val",
]

if TYPE_CHECKING:
    from perlclip.adapter import Adapter, load_adapter, save_adapter
    from perlclip.adaptive import Policy
    from perlclip.backbone import Backbone, load_backbone
    from perlclip.calibration import Calibration, calibrate
    from perlclip.classifier import Classifier, Prediction
    from perlclip.data import DataSet, ImageSet, dataset_names, load_dataset, load_images, train_val
    from perlclip.errors import PerlclipError
    from perlclip.evaluation import Evaluation, evaluate
    from perlclip.methods import create_method, list_methods
    from perlclip.recipes import RECIPES, Recipe
    from perlclip.train import fit


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'perlclip' has no attribute {name!r}")
    value = getattr(import_module(f"perlclip.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
