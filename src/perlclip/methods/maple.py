"""MaPLe: deep prompts in both towers, the visual ones made from the textual (Khattak et al., CVPR 2023).

    text    rows 1..n of "a photo of a {}." are P_0; before block k + 1 they are replaced by P_k, k = 1..J-1
    vision  n rows Q_k = W_k P_k + b_k behind the patches, replaced in the same way             `MaPLe.coupled`
    L       = CE(tau v Tᵀ, y)

P_0 starts as the first n words of "a photo of a" (what else the sentence says stays frozen: the released code's
behaviour; more than four start at random, and "of a" goes: they stand before the name alone), the deeper ones as N(0,
0.02); the deeper W_k start as copies of one layer. Q_0 passes the vision tower's first norm, deeper prompts do not. The
sentence is the same for every data set; `template=""` takes the data set's instead, if it has n words before the name.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from perlclip.backbone import Backbone, Images
from perlclip.methods.base import ClassState, Method
from perlclip.methods.parts import (
    PHRASE,
    WORDS,
    PromptState,
    learned_words,
    prompted_image,
    prompted_text,
    require_depth,
    sentences_with_room,
)
from perlclip.methods.recipe import DASSL_SGD, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.methods.settings import Config
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE

RECIPES = with_fast(
    replace(DASSL_SGD, lr=0.0035, epochs=5, batch_size=4), cross=replace(DASSL_SGD, lr=0.0026, epochs=2, batch_size=4)
)


@dataclass(frozen=True, kw_only=True)
class MaPLeConfig(Config):
    """MaPLe's settings, with the authors' base-to-novel values."""

    tokens: int = 2  # n
    depth: int = 9  # J, blocks that get prompts of their own
    template: str = DEFAULT_TEMPLATE  # the sentence; "" is the data set's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf), depth=(1, inf))


@register(
    "maple",
    summary="deep prompts, coupled by linear maps",
    where="blocks 1–9 of both towers",
    venue="CVPR 2023",
    recipes=RECIPES,
    rules=[Rule(recipes=("original-cross",), settings={"depth": 3})],
)
class MaPLe(Method):
    """A frozen CLIP with coupled deep prompts in both towers."""

    config_class = MaPLeConfig
    config: MaPLeConfig

    def __init__(self, backbone: Backbone, config: MaPLeConfig) -> None:
        super().__init__(backbone, config)
        text, vision, deeper = backbone.text.width, backbone.vision.width, config.depth - 1
        require_depth(self, config.depth)
        self.context = learned_words(backbone, config.tokens, PHRASE if config.tokens <= WORDS else "")
        self.deep = nn.ParameterList(torch.randn(config.tokens, text) * 0.02 for _ in range(deeper))
        first, copied = nn.Linear(text, vision), nn.Linear(text, vision)
        self.couple = nn.ModuleList([first, *(deepcopy(copied) for _ in range(deeper))])

    def prepare(self, classes: Classes) -> PromptState:
        """The sentences as rows of the text tower."""
        text = sentences_with_room(self.backbone, classes, self.config.template, self.config.tokens)
        return PromptState(classes=classes, text=text)

    def encode_text(self, state: ClassState) -> Tensor:
        """Prompted class embeddings, (C, E)."""
        assert isinstance(state, PromptState)
        return self.backbone.text.project(prompted_text(state.text, [self.context, *self.deep]))

    def encode_image(self, images: Images) -> Tensor:
        """Prompted image embeddings, (B, E)."""
        vision = self.backbone.vision
        return vision.project(prompted_image(vision, self.frozen(images).rows(), self.coupled()))

    def coupled(self) -> list[Tensor]:
        """Q_k, the visual prompts of each block."""
        return [couple(rows_nD) for couple, rows_nD in zip(self.couple, [self.context, *self.deep], strict=True)]
