"""Ways to adapt a frozen CLIP, one file each, under the contract of `base.py`."""

# The order is the one in which `list_methods` names them.
from perlclip.methods import zero_shot, ridge, gaussian  # noqa: F401 (isort: skip)
from perlclip.methods import perl, coop, cocoop, kgcoop, maple, promptsrc, provp, tcp, mma, mmrl, mmrlpp  # noqa: F401 (isort: skip)
from perlclip.methods.base import ClassState, Method
from perlclip.methods.recipe import Recipe, Rule, with_fast
from perlclip.methods.registry import create_method, list_methods, load_plugin, method_class, register
from perlclip.methods.settings import Config

__all__ = [
    "ClassState",
    "Config",
    "Method",
    "Recipe",
    "Rule",
    "create_method",
    "list_methods",
    "load_plugin",
    "method_class",
    "register",
    "with_fast",
]
