"""MMRL++: MMRL with low-rank aligners and tokens that carry over (Guo and Gu, IJCV 2026).

    W_i = W + A_i B_i                            one matrix a tower, a residual of rank 4 for each block   `Aligner`
    P_r = CLIP's own projection + A B            of rank 64
    tokens before block i = beta R_i + (1 - beta) the last block's output at those rows          `MMRLpp.carry`

The rest is MMRL's, its losses and its two branches too. beta = 1 drops the last block's output as MMRL does. beta and
lambda were chosen for each data set by the authors (`recipes.py`); the defaults are ImageNet's. In their cross-data-set
evaluation a model trained with beta = 0.9 is run with another beta for each target; here it is the one of the training,
unless the setting is changed. In the text tower the tokens stand before the words, so they are the same for all classes
also when they carry over.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from perlclip.methods.base import register
from perlclip.methods.mmrl import MMRL, MMRLConfig


@dataclass(frozen=True, kw_only=True)
class MMRLppConfig(MMRLConfig):
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
)
class MMRLpp(MMRL):
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
        return self.backbone.vision.head.weight.float().T + self.rep_left @ self.rep_right

    def carry(self, next_KD: Tensor, last_BKD: Tensor) -> Tensor:
        """beta of the block's own tokens, the rest from the last block."""
        return self.config.beta * next_KD + (1 - self.config.beta) * last_BKD
