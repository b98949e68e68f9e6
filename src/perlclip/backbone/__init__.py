"""The frozen CLIP: loading, tokens, pixels, and the two towers opened between their blocks."""

from perlclip.backbone.clip import Backbone, Tokens, load_backbone
from perlclip.backbone.tower import Refinement, Tower

__all__ = ["Backbone", "Refinement", "Tokens", "Tower", "load_backbone"]
