"""Ways to adapt a frozen CLIP, one file each, under the contract of `base.py`."""

from perlclip.methods import perl, zero_shot
from perlclip.methods.base import ClassState, Config, Method, create_method, list_methods, method_class

__all__ = ["ClassState", "Config", "Method", "create_method", "list_methods", "method_class", "perl", "zero_shot"]
