"""MMA: bottleneck adapters beside the upper blocks, their middles shared by both towers (Yang et al., CVPR 2024).

    a(x)   = W_up ReLU(W_shared ReLU(W_down LN1(x)))          LN1: the block's own, frozen       `Bottleneck.forward`
    out(x) = block(x) + s a(x),   s = 0.001                   blocks 5..12
    L      = CE(tau v Tᵀ, y)

The gradient is part of the method: on the way back it is multiplied by 1/s where it enters the adapter and by s where
it leaves it, so that the weights learn as if s were 1 while the blocks below get the true gradient. With plain SGD that
is a learning rate of 1/s for the adapters, weight decay not multiplied.

All weights start kaiming-normal (fan-out), biases 0. The sentence is the same for every data set; `template=""` takes
the data set's instead. For the cross-data-set runs the paper adapts blocks 9..12: `start=8`.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, cast

import torch
from torch import Tensor, nn

from perlclip.backbone import Backbone, Images, SharedText, Tower, cls_rows
from perlclip.methods.base import ClassState, Method
from perlclip.methods.parts import PromptState, require_start
from perlclip.methods.recipe import DASSL_SGD, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.methods.settings import Config
from perlclip.text.classes import Classes
from perlclip.text.templates import DEFAULT_TEMPLATE

_SGD = replace(DASSL_SGD, lr=0.0015, epochs=5, batch_size=16, warmup_epochs=0)
# For transfer one epoch by the paper; batch and rate are not published, these are the base-to-novel run's on ImageNet.
RECIPES = with_fast(_SGD, cross=replace(_SGD, epochs=1, batch_size=128))
RULES = (
    Rule(recipes=("original-cross",), settings={"start": 8}),
    Rule(recipes=("original",), dataset="imagenet", changes={"batch_size": 128}),
)


@dataclass(frozen=True, kw_only=True)
class MMAConfig(Config):
    """MMA's settings, with the authors' base-to-novel values."""

    rank: int = 32  # width of the bottleneck
    start: int = 4  # first adapted block, from 0
    scale: float = 0.001  # s
    template: str = DEFAULT_TEMPLATE  # the sentence; "" is the data set's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(rank=(1, inf), start=(0, inf), scale=(1e-6, inf))


class ScaleGradient(torch.autograd.Function):
    """Identity, with the gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """x itself."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient times the factor."""
        return gradients[0] * ctx.factor, None


class Bottleneck(nn.Module):
    """The adapters of one block index: a down and an up map for each tower that has the block, one middle for both."""

    def __init__(self, widths: dict[str, int], rank: int) -> None:
        super().__init__()
        for side, width in widths.items():
            self.add_module(f"{side}_down", nn.Linear(width, rank))
            self.add_module(f"{side}_up", nn.Linear(rank, width))
        self.shared = nn.Linear(rank, rank)
        for linear in self.children():
            assert isinstance(linear, nn.Linear)
            nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(linear.bias)

    def forward(self, side: str, y_BND: Tensor, scale: float) -> Tensor:
        """s a, from the rows after the block's first norm."""
        down, up = getattr(self, f"{side}_down"), getattr(self, f"{side}_up")
        y_BND = ScaleGradient.apply(y_BND.to(down.weight.dtype), scale)  # type: ignore[no-untyped-call]
        a_BND = up(self.shared(down(y_BND).relu()).relu())
        return scale * cast(Tensor, ScaleGradient.apply(a_BND, 1 / scale))  # type: ignore[no-untyped-call]


@register(
    "mma",
    summary="bottleneck adapters, middles shared",
    where="beside blocks 5–12 of both towers",
    venue="CVPR 2024",
    recipes=RECIPES,
    rules=RULES,
)
class MMA(Method):
    """A frozen CLIP with adapters beside its upper blocks."""

    config_class = MMAConfig
    config: MMAConfig

    def __init__(self, backbone: Backbone, config: MMAConfig) -> None:
        super().__init__(backbone, config)
        towers = {"text": backbone.text, "vision": backbone.vision}
        require_start(self, "start", config.start, *towers.values())
        self.adapters = nn.ModuleDict(
            {
                str(i): Bottleneck({side: t.width for side, t in towers.items() if i < t.depth}, config.rank)
                for i in range(config.start, max(tower.depth for tower in towers.values()))
            }
        )

    def prepare(self, classes: Classes) -> PromptState:
        """The sentences after the frozen blocks."""
        text = self.backbone.shared_text(classes.prompts(self.config.template))
        return PromptState(classes=classes, text=text.run(0, self.config.start))

    def encode_text(self, state: ClassState) -> Tensor:
        """Adapted class embeddings, (C, E)."""
        assert isinstance(state, PromptState)
        tower, text = self.backbone.text, state.text
        for i in range(self.config.start, tower.depth - 1):
            text = self._beside(i, text, text.block(i))
        return tower.project(text.read(partial(self._adapt, "text", tower.depth - 1)))

    def encode_image(self, images: Images) -> Tensor:
        """Adapted image embeddings, (B, E)."""
        vision, start = self.backbone.vision, self.config.start
        x_BND = self.frozen(images).rows(start)
        for i in range(start, vision.depth - 1):
            x_BND = vision.block(i, x_BND) + self._adapt("vision", i, x_BND)
        last = partial(self._adapt, "vision", vision.depth - 1)
        return vision.project(vision.read(x_BND, cls_rows(x_BND), beside=last))

    def _beside(self, i: int, before: SharedText, after: SharedText) -> SharedText:
        return replace(
            after,
            prefix_1PD=after.prefix_1PD + self._adapt("text", i, before.prefix_1PD),
            own_CMD=after.own_CMD + self._adapt("text", i, before.own_CMD),
        )

    def _adapt(self, side: str, i: int, x_BND: Tensor) -> Tensor:
        tower: Tower = getattr(self.backbone, side)
        norm1 = cast(nn.LayerNorm, tower.blocks[i].norm1)
        out: Tensor = self.adapters[str(i)](side, norm1(x_BND), self.config.scale)
        return out.to(x_BND.dtype)
