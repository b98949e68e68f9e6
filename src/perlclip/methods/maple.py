"""MaPLe: deep prompts in both towers, the visual ones made from the textual (Khattak et al., CVPR 2023).

    text    rows 1..n of "a photo of a {}." are P_0; before block k + 1 they are replaced by P_k, k = 1..J-1
    vision  n rows Q_k = W_k P_k + b_k behind the patches, replaced in the same way             `MaPLe.coupled`
    L       = CE(tau v Tᵀ, y)

P_0 starts as the first n words of "a photo of a" (what else the sentence says stays frozen: the released code's
behaviour; more than four words start at random), the deeper ones as N(0, 0.02); the deeper W_k start as copies of one
layer. Q_0 passes the vision tower's first norm, deeper prompts do not. The sentence is the same for every data set;
`template=""` takes the data set's instead, if it has n words before the name.
"""

from copy import deepcopy
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from perlclip.backbone import Backbone, cls_rows
from perlclip.backbone.tower import Tower
from perlclip.errors import PerlclipError
from perlclip.methods.base import ClassState, Config, Method, register
from perlclip.methods.coop import PHRASE, PromptState, learned_words
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE


@dataclass(frozen=True, kw_only=True)
class MaPLeConfig(Config):
    """MaPLe's settings, with the authors' base-to-novel values."""

    tokens: int = 2  # n
    depth: int = 9  # J, blocks that get prompts of their own
    template: str = DEFAULT_TEMPLATE  # the sentence; "" is the data set's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(tokens=(1, inf), depth=(1, inf))


@register("maple", summary="deep prompts, coupled by linear maps", where="blocks 1–9 of both towers", venue="CVPR 2023")
class MaPLe(Method):
    """A frozen CLIP with coupled deep prompts in both towers."""

    config_class = MaPLeConfig
    config: MaPLeConfig

    def __init__(self, backbone: Backbone, config: MaPLeConfig) -> None:
        super().__init__(backbone, config)
        text, vision, deeper = backbone.text.width, backbone.vision.width, config.depth - 1
        require_depth(self.name, backbone, config.depth)
        self.context = learned_words(backbone, config.tokens, PHRASE if config.tokens <= 4 else "")
        self.deep = nn.ParameterList(torch.randn(config.tokens, text) * 0.02 for _ in range(deeper))
        first, copied = nn.Linear(text, vision), nn.Linear(text, vision)
        self.couple = nn.ModuleList([first, *(deepcopy(copied) for _ in range(deeper))])

    def prepare(self, classes: Classes) -> PromptState:
        """The sentences as rows of the text tower."""
        return prompt_state(self.backbone, classes, self.config.template, self.config.tokens)

    def encode_text(self, state: ClassState) -> Tensor:
        """Prompted class embeddings, (C, E)."""
        assert isinstance(state, PromptState)
        return self.backbone.text.project(prompted_text(state, [self.context, *self.deep]))

    def encode_image(self, pixels: Tensor) -> Tensor:
        """Prompted image embeddings, (B, E)."""
        vision = self.backbone.vision
        return vision.project(prompted_image(vision, self.image_rows(pixels), self.coupled()))

    def coupled(self) -> list[Tensor]:
        """Q_k, the visual prompts of each block."""
        return [couple(rows_nD) for couple, rows_nD in zip(self.couple, [self.context, *self.deep], strict=True)]


def require_depth(name: str, backbone: Backbone, depth: int) -> None:
    """Prompts for more blocks than there are would be lost."""
    shallowest = min(backbone.vision.depth, backbone.text.depth)
    if depth > shallowest:
        raise PerlclipError(f"{name}: depth must be at most the tower's {shallowest} blocks, got {depth}")


def prompt_state(backbone: Backbone, classes: Classes, template: str, tokens: int) -> PromptState:
    """Sentences whose first words are learned; the class name must not be among those words."""
    sentence = template or classes.template
    try:
        backbone.word_rows(sentence.partition("{}")[0], tokens)
    except PerlclipError as error:
        raise PerlclipError(f"{tokens} words before the name are to be learned in {sentence!r}: {error}") from error
    return PromptState(classes=classes, text=backbone.shared_text(classes.prompts(sentence)))


def prompted_text(state: PromptState, prompts: list[Tensor]) -> Tensor:
    """The text tower with prompts[k] at rows 1..n of the input of block k + 1, read at EOS: (C, D)."""
    return state.text.put_words(prompts[0]).pool(
        before=lambda i, text: text.put(prompts[i]) if 0 < i < len(prompts) else text
    )


def prompted_image(vision: Tower, x_BND: Tensor, prompts: list[Tensor]) -> Tensor:
    """The vision tower with prompts[k] behind the patches at the input of block k + 1, read at CLS: (B, D)."""
    norm, N = vision.embed.norm, x_BND.shape[1]
    assert isinstance(norm, nn.Module)
    for i in range(vision.depth):
        if i < len(prompts):
            rows_nD = prompts[i].to(x_BND.dtype)
            rows_nD = rows_nD if i else norm(rows_nD)  # the first prompts pass the first norm
            x_BND = torch.cat([x_BND[:, :N], rows_nD.expand(len(x_BND), -1, -1)], 1)
        x_BND = vision.block(i, x_BND) if i < vision.depth - 1 else x_BND
    return vision.read(x_BND, cls_rows(x_BND))
