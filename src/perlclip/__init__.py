"""perlclip: adapt a frozen CLIP from a handful of images.

The public names are imported on first use, so that `import perlclip` and `perlclip --help` stay instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Adapter": "adapters.folder",
    "Backbone": "backbone",
    "Calibration": "thinking.thresholds",
    "Classifier": "inference.classifier",
    "DataSet": "data",
    "Evaluation": "inference.evaluation",
    "ImageSet": "data",
    "PerlclipError": "errors",
    "Policy": "thinking.policy",
    "Prediction": "inference.classifier",
    "RECIPES": "methods.recipes",
    "Recipe": "methods.recipes",
    "calibrate": "thinking.thresholds",
    "create_method": "methods",
    "dataset_names": "data",
    "evaluate": "inference.evaluation",
    "fit": "training.loop",
    "list_methods": "methods",
    "load_adapter": "adapters.folder",
    "load_backbone": "backbone",
    "load_dataset": "data",
    "load_images": "data",
    "save_adapter": "adapters.folder",
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
    from perlclip.adapters.folder import Adapter, load_adapter, save_adapter
    from perlclip.backbone import Backbone, load_backbone
    from perlclip.data import DataSet, ImageSet, dataset_names, load_dataset, load_images, train_val
    from perlclip.errors import PerlclipError
    from perlclip.inference.classifier import Classifier, Prediction
    from perlclip.inference.evaluation import Evaluation, evaluate
    from perlclip.methods import create_method, list_methods
    from perlclip.methods.recipes import RECIPES, Recipe
    from perlclip.thinking.policy import Policy
    from perlclip.thinking.thresholds import Calibration, calibrate
    from perlclip.training.loop import fit


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'perlclip' has no attribute {name!r}")
    value = getattr(import_module(f"perlclip.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
