"""The frozen CLIP: loading, tokens, pixels, and the two towers opened between their blocks."""

from perlclip.backbone.clip import Backbone, Tokens, cls_rows, load_backbone
from perlclip.backbone.shared_text import SharedText
from perlclip.backbone.tower import Refinement, Tower

__all__ = ["Backbone", "Refinement", "SharedText", "Tokens", "Tower", "cls_rows", "load_backbone"]
