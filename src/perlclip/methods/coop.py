"""CoOp: the words around the class name are learned vectors (Zhou et al., Learning to Prompt, IJCV 2022).

    t_c = text tower([SOS] V1 … VM [name of c] . [EOS])         the same V for all classes      `CoOp.encode_text`
    L   = CE(tau v Tᵀ, y)

V starts as the token embeddings of "a photo of a" (M = 4, the authors' base-to-novel setting) or, with `init=""`, as
normal numbers of deviation 0.02 (their few-shot setting, M = 16). The name stands at the end; class-specific contexts
and the other positions of the name are left out, because they cannot be used on classes that were not trained on or
were not used in the comparisons.

The data set's template is not used: CoOp's sentence is its own. The image tower is frozen.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from perlclip.backbone import Backbone, SharedText
from perlclip.methods.base import ClassState, Config, Method, register
from perlclip.text.classes import Classes

PHRASE = "a photo of a"


@dataclass(frozen=True, kw_only=True)
class CoOpConfig(Config):
    """CoOp's settings, with the values of its authors' base-to-novel runs."""

    tokens: int = 4  # M, learned vectors
    init: str = PHRASE  # the words whose first M tokens they start as; "" for random

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf))


def learned_words(backbone: Backbone, count: int, phrase: str) -> nn.Parameter:
    """Vectors in the place of words: the phrase's first `count` tokens, or N(0, 0.02) without a phrase."""
    rows_nD = backbone.word_rows(phrase, count) if phrase else torch.randn(count, backbone.text.width) * 0.02
    return nn.Parameter(rows_nD.clone())


@dataclass(kw_only=True)
class PromptState(ClassState):
    """The class names as rows of the text tower, with room for the learned words."""

    text: SharedText


@register("coop", summary="M context vectors", where="words 1–4 of the text", venue="IJCV 2022")
class CoOp(Method):
    """A frozen CLIP with learned words before the class name."""

    config_class = CoOpConfig
    config: CoOpConfig

    def __init__(self, backbone: Backbone, config: CoOpConfig) -> None:
        super().__init__(backbone, config)
        self.context = learned_words(backbone, config.tokens, config.init)

    def prepare(self, classes: Classes) -> PromptState:
        """The names behind M free positions."""
        return PromptState(
            classes=classes, text=self.backbone.shared_text(classes.prompts("{}."), free=self.config.tokens)
        )

    def encode_text(self, state: ClassState) -> Tensor:
        """The learned sentence of each class, (C, E)."""
        assert isinstance(state, PromptState)
        return self.backbone.text.project(state.text.put_words(self.context).pool())

    def encode_image(self, pixels: Tensor) -> Tensor:
        """CLIP's image embedding."""
        return self.frozen_image(pixels)

    def sentence(self, template: str) -> str:
        """The learned words and the name, whatever the template."""
        return "V " * self.config.tokens + "{}."
