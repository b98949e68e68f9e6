"""Whether probabilities mean what they say: calibration error, Brier score, log-loss, and the bins of a diagram.

Shapes: B images, C classes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Images whose answers are about equally sure: how many, their mean confidence, and the share that is right."""

    images: int
    confidence: float
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """`ece` and `ece_equal_mass`, in percent: how far confidence and accuracy are apart, on average over the images.

    The first has bins of equal width, the second of equally many images. `brier` is the squared distance of all
    probabilities to the truth (0 to 2), `nll` the mean of -log of the true class's; `bins` are those of equal width.
    """

    ece: float
    ece_equal_mass: float
    brier: float
    nll: float
    confidence: float
    bins: tuple[Bin, ...]

    def numbers(self) -> dict[str, Any]:
        """Without the bins, for metrics."""
        return {key: value for key, value in vars(self).items() if key != "bins"}


def reliability(p_BC: Tensor, labels_B: Tensor) -> Reliability:
    """Of the probabilities of images whose classes are known."""
    p_BC = p_BC.double()
    top_B, answers_B = p_BC.max(-1)
    right_B = (answers_B == labels_B).double()
    order_B = top_B.argsort(stable=True)
    rank_B = torch.empty_like(order_B).scatter_(0, order_B, torch.arange(len(order_B)))
    wide_B = (top_B * BINS).long().clamp(max=BINS - 1)
    true_B = p_BC.gather(1, labels_B[:, None])[:, 0]
    squares = p_BC.square().sum(-1) - 2 * true_B + 1
    bins = [
        Bin(len(inside), top_B[inside].mean().item(), right_B[inside].mean().item())
        for k in range(BINS)
        if len(inside := (wide_B == k).nonzero()[:, 0])
    ]
    return Reliability(
        ece=_error(wide_B, top_B - right_B),
        ece_equal_mass=_error(rank_B * BINS // len(rank_B), top_B - right_B),
        brier=squares.mean().item(),
        nll=-true_B.clamp(min=1e-12).log().mean().item(),
        confidence=100 * top_B.mean().item(),
        bins=tuple(bins),
    )


def _error(bins_B: Tensor, gaps_B: Tensor) -> float:
    """Share of images x |confidence - accuracy|, summed over the bins, in percent."""
    return 100 * torch.zeros(BINS).double().scatter_add_(0, bins_B, gaps_B).abs().sum().item() / len(gaps_B)
