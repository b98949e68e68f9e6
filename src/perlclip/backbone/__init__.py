"""The frozen backbone: loading, tokens, pixels, and the two towers opened between their blocks."""

from perlclip.backbone.accel.fused import can_think, think
from perlclip.backbone.base import Backbone
from perlclip.backbone.frozen import FrozenImages, Images, cls_rows
from perlclip.backbone.lens import LENSES, PLAIN, Lens
from perlclip.backbone.load import load_backbone
from perlclip.backbone.preprocess import Preprocess
from perlclip.backbone.shared_text import SharedText
from perlclip.backbone.text_graphs import TextGraphs
from perlclip.backbone.tokens import Tokens
from perlclip.backbone.tower import Refinement, Tower

__all__ = [
    "LENSES",
    "PLAIN",
    "Backbone",
    "FrozenImages",
    "Images",
    "Lens",
    "Preprocess",
    "Refinement",
    "SharedText",
    "TextGraphs",
    "Tokens",
    "Tower",
    "can_think",
    "cls_rows",
    "load_backbone",
    "think",
]
