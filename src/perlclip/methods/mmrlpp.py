"""MMRL++: MMRL with low-rank aligners and tokens that carry over (Guo and Gu, IJCV 2026).

    W_i = W + A_i B_i                            one matrix a tower, a residual of rank 4 for each block   `Aligner`
    P_r = CLIP's own projection + A B            of rank 64
    tokens before block i = beta R_i + (1 - beta) the last block's output at those rows          `MMRLpp.carry`

Branches, logits and loss are those of `representation.py`, as MMRL's. beta = 1 drops the last block's output as MMRL
does. beta and lambda were chosen for each data set by the authors; the defaults are ImageNet's. In their cross-data-set
evaluation a model trained with beta = 0.9 is run with another beta for each target; here it is the one of the training,
unless the setting is changed. In the text tower the tokens stand before the words, so they are the same for all classes
also when they carry over.
"""

from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor, nn

from perlclip.methods.recipe import TRAINED_ON, Rule, with_fast
from perlclip.methods.registry import register
from perlclip.methods.representation import ADAMW, RepresentationTokens, TokensConfig

RECIPES = with_fast(
    ADAMW,
    cross=replace(ADAMW, epochs=1, batch_size=32, warmup_epochs=0),
    few_shot=replace(ADAMW, lr=2e-3, epochs=100, batch_size=32),
)
_WEIGHT_BETA = {
    "imagenet": (0.2, 0.9), "caltech101": (3.0, 0.6), "oxford_pets": (0.01, 0.7), "stanford_cars": (6.0, 0.7),
    "oxford_flowers": (7.0, 0.4), "food101": (1.0, 0.1), "fgvc_aircraft": (2.0, 0.9), "sun397": (3.0, 0.5),
    "dtd": (7.0, 0.9), "eurosat": (0.01, 0.2), "ucf101": (3.0, 0.9),
}  # fmt: skip
RULES = (
    Rule(recipes=("original-cross",), settings={"weight": 0.1, "beta": 0.9}),
    *(
        Rule(recipes=TRAINED_ON, dataset=name, settings={"weight": weight, "beta": beta})
        for name, (weight, beta) in _WEIGHT_BETA.items()
    ),
    Rule(recipes=("original",), dataset="imagenet", changes={"epochs": 5, "batch_size": 32}),
    Rule(recipes=("original-few-shot",), dataset="imagenet", changes={"lr": 1e-3, "epochs": 5}),
)


@dataclass(frozen=True, kw_only=True)
class MMRLppConfig(TokensConfig):
    """MMRL++'s settings, with the authors' values."""

    weight: float = 0.2  # lambda
    beta: float = 0.9  # share of the block's own tokens
    rank: int = 4  # of the aligners' residuals
    head_rank: int = 64  # of the head's

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(beta=(0.0, 1.0), rank=(1, inf), head_rank=(1, inf))


class Aligner(nn.Module):
    """x (W + A_i B_i)ᵀ + b_i for each block i of one tower."""

    def __init__(self, dim: int, width: int, blocks: int, rank: int) -> None:
        super().__init__()
        linear = nn.Linear(dim, width)
        bound = rank**-0.5  # kaiming-uniform with a = sqrt(5), on a matrix of `rank` columns
        self.shared = nn.Parameter(linear.weight.detach())
        self.left = nn.Parameter(torch.empty(blocks, width, rank).uniform_(-bound, bound))
        self.right = nn.Parameter(torch.zeros(blocks, rank, dim))
        self.bias = nn.Parameter(linear.bias.detach().repeat(blocks, 1))

    def forward(self, x_KR: Tensor) -> list[Tensor]:
        """(K, dim) -> (K, D) for each block, the residuals never multiplied out."""
        residual_LKD = x_KR @ self.right.transpose(1, 2) @ self.left.transpose(1, 2)
        return list(x_KR @ self.shared.T + residual_LKD + self.bias[:, None])


@register(
    "mmrl++",
    summary="representation space, low-rank aligners and head",
    where="tokens in blocks 6–12 of both towers",
    venue="IJCV 2026",
    recipes=RECIPES,
    rules=RULES,
)
class MMRLpp(RepresentationTokens):
    """MMRL with fewer parameters and progressive composition."""

    config_class = MMRLppConfig
    config: MMRLppConfig

    def build(self) -> None:
        """The aligners and the head's residual."""
        config, vision = self.config, self.backbone.vision
        for side in ("vision", "text"):
            tower = getattr(self.backbone, side)
            self.add_module(side, Aligner(config.dim, tower.width, tower.depth - config.start, config.rank))
        bound = config.head_rank**-0.5
        self.rep_left = nn.Parameter(torch.empty(vision.width, config.head_rank).uniform_(-bound, bound))
        self.rep_right = nn.Parameter(torch.zeros(config.head_rank, self.backbone.embed_dim))

    def aligned(self, side: str) -> list[Tensor]:
        """R_i, (K, D) for each block from the first on."""
        tokens: list[Tensor] = getattr(self, side)(self.space)
        return tokens

    def head(self) -> Tensor:
        """CLIP's projection and its residual, (D, E)."""
        own = self.backbone.vision.head
        assert isinstance(own, nn.Linear)
        return own.weight.float().T + self.rep_left @ self.rep_right

    def carry(self, next_KD: Tensor, last_BKD: Tensor) -> Tensor:
        """beta of the block's own tokens, the rest from the last block."""
        return self.config.beta * next_KD + (1 - self.config.beta) * last_BKD
