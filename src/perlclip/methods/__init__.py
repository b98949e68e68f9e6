"""Ways to adapt a frozen CLIP, one file each, under the contract of `base.py`."""

# The order is the one in which `list_methods` names them.
from perlclip.methods import zero_shot, perl, coop, cocoop, kgcoop, maple, promptsrc, provp, tcp, mma, mmrl, mmrlpp  # noqa: F401 (isort: skip)
from perlclip.methods.base import ClassState, Config, Method, create_method, list_methods, method_class

__all__ = ["ClassState", "Config", "Method", "create_method", "list_methods", "method_class"]
