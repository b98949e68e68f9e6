"""perlclip: adapt a frozen CLIP from a handful of images.

The public names are imported on first use, so that `import perlclip` and `perlclip --help` stay instant.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Adapter": "adapters.folder",
    "Backbone": "backbone",
    "Classifier": "inference.classifier",
    "DataSet": "data",
    "Evaluation": "inference.evaluation",
    "FitResult": "training.loop",
    "ImageSet": "data",
    "LabelCheck": "labels.checking",
    "PerlclipError": "errors",
    "Prediction": "inference.judging",
    "Recipe": "methods",
    "Thresholds": "thinking.thresholds",
    "Trust": "trust.record",
    "check": "labels.checking",
    "create_method": "methods",
    "dataset_names": "data",
    "evaluate": "inference.evaluation",
    "find_recipe": "methods.registry",
    "fit": "training.loop",
    "list_methods": "methods",
    "load_adapter": "adapters.folder",
    "load_backbone": "backbone",
    "load_dataset": "data",
    "load_images": "data",
    "load_plugin": "methods",
    "method_class": "methods",
    "pull_adapter": "adapters.folder",
    "push_adapter": "adapters.folder",
    "save_adapter": "adapters.folder",
    "set_thresholds": "training.choose_thresholds",
    "suggest": "labels.suggestions",
    "train_val": "data",
}
_PACKAGES = (
    "adapters", "analysis", "backbone", "batch", "bench", "data", "export", "inference", "labels", "methods",
    "reference", "report", "text", "thinking", "training", "trust", "viz",
)  # fmt: skip
__all__ = [
    "Adapter",
    "Backbone",
    "Classifier",
    "DataSet",
    "Evaluation",
    "FitResult",
    "ImageSet",
    "LabelCheck",
    "PerlclipError",
    "Prediction",
    "Recipe",
    "Thresholds",
    "Trust",
    "__version__",
    "check",
    "create_method",
    "dataset_names",
    "evaluate",
    "find_recipe",
    "fit",
    "list_methods",
    "load_adapter",
    "load_backbone",
    "load_dataset",
    "load_images",
    "load_plugin",
    "method_class",
    "pull_adapter",
    "push_adapter",
    "save_adapter",
    "set_thresholds",
    "suggest",
    "train_val",
]

if TYPE_CHECKING:
    from perlclip.adapters.folder import Adapter, load_adapter, pull_adapter, push_adapter, save_adapter
    from perlclip.backbone import Backbone, load_backbone
    from perlclip.data import DataSet, ImageSet, dataset_names, load_dataset, load_images, train_val
    from perlclip.errors import PerlclipError
    from perlclip.inference.classifier import Classifier
    from perlclip.inference.evaluation import Evaluation, evaluate
    from perlclip.inference.judging import Prediction
    from perlclip.labels.checking import LabelCheck, check
    from perlclip.labels.suggestions import suggest
    from perlclip.methods import Recipe, create_method, list_methods, load_plugin, method_class
    from perlclip.methods.registry import find_recipe
    from perlclip.thinking.thresholds import Thresholds
    from perlclip.training.choose_thresholds import set_thresholds
    from perlclip.training.loop import FitResult, fit
    from perlclip.trust.record import Trust


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"perlclip.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'perlclip' has no attribute {name!r}")
    value = getattr(import_module(f"perlclip.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
