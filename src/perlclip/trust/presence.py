"""Several labels for an image: is a class there, whatever the others are?

    p_c = sigmoid(slope s_c + offset)          the class is there where p_c >= threshold

s_c is the class's score before any softmax: scale times cosine, and what the head adds. So p_c does not depend on which
other classes are on the list. Slope and offset are logistic regression's on images held out, each of which has its own
class and none of the others; there are many more pairs of the second kind, so that both kinds count equally: p = 1/2
says that the score is as likely of a class that is there as of one that is not. The threshold is the one with the best
F1 on these pairs. A model that was trained with a sigmoid has a slope of 1 and an offset, its bias, of its own, and a
threshold of 1/2: they serve where nothing was held out.

Shapes: N images, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from perlclip.errors import PerlclipError

ITERATIONS = 50
RIDGE = 1e-6  # on both numbers, so that a step is always there
STEEPEST, FLATTEST = 100.0, 1e-3


@dataclass(frozen=True, kw_only=True)
class Sigmoid:
    """From scores to probabilities, and from these to yes and no."""

    slope: float
    offset: float
    threshold: float = 0.5

    def __post_init__(self) -> None:
        numbers = list(vars(self).values())
        fine = all(type(number) in (int, float) and isfinite(number) for number in numbers)
        if not fine or not 0 < self.slope <= STEEPEST or not 0 <= self.threshold <= 1:
            raise PerlclipError(f"a sigmoid has a slope above 0, an offset and a threshold in 0..1, got {numbers}")

    def probabilities(self, scores_BC: Tensor) -> Tensor:
        """(B, C), each of its own."""
        return (self.slope * scores_BC.double() + self.offset).sigmoid().float()

    @classmethod
    def fit(cls, scores_NC: Tensor, labels_N: Tensor) -> "Sigmoid":
        """Logistic regression by Newton's method, both kinds of pairs weighing the same."""
        there_NC = torch.zeros_like(scores_NC, dtype=torch.bool)
        there_NC[torch.arange(len(labels_N)), labels_N] = True
        s, there = scores_NC.double().flatten(), there_NC.flatten()
        yes, no = int(there.sum()), int((~there).sum())
        if not yes or not no:
            return cls(slope=1.0, offset=-float(s.mean()) if len(s) else 0.0)
        weight = torch.where(there, 0.5 / yes, 0.5 / no)
        target = torch.where(there, (yes + 1) / (yes + 2), 1 / (no + 2))  # Platt's: a few images are not certain
        centre, spread = (weight * s).sum(), s.std(correction=0).clamp(min=1e-6)
        x = torch.stack([(s - centre) / spread, torch.ones_like(s)], 1)
        w = torch.zeros(2, dtype=torch.float64)
        for _ in range(ITERATIONS):
            p = (x @ w).sigmoid()
            gradient = x.T @ (weight * (p - target)) + RIDGE * w
            curvature = (x * (weight * p * (1 - p))[:, None]).T @ x + RIDGE * torch.eye(2, dtype=torch.float64)
            step = torch.linalg.solve(curvature, gradient)
            w = w - step * min(1.0, 2.0 / float(step.norm() + 1e-12))
        slope = min(max(float(w[0] / spread), FLATTEST), STEEPEST)
        offset = float(w[1]) - slope * float(centre)
        found = cls(slope=round(slope, 6), offset=round(offset, 6))
        return cls(
            slope=found.slope, offset=found.offset, threshold=_best_threshold(found.probabilities(scores_NC), there_NC)
        )


def _best_threshold(p_NC: Tensor, there_NC: Tensor) -> float:
    """The middle of the gap below which F1 over all pairs is best, of those equally good the highest."""
    p, order = p_NC.flatten().double().sort(descending=True)
    right = there_NC.flatten()[order].cumsum(0).double()
    said = torch.arange(1, len(p) + 1, dtype=torch.float64)
    f1 = 2 * right / (said + there_NC.sum())
    after = torch.cat([p[1:], p.new_zeros(1)])
    f1 = torch.where(p > after, f1, -1.0)  # equal ones go together
    best = int(f1.argmax())
    return round(float((p[best] + after[best]) / 2), 6)


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The sigmoid of the adapter's answers to classes trained on, and that of its texts alone, for all others."""

    answers: Sigmoid
    texts: Sigmoid

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {name: list(vars(part).values()) for name, part in vars(self).items()}

    @classmethod
    def from_json(cls, data: Any) -> "Presence":
        """Checked."""
        if not isinstance(data, Mapping) or set(data) != {"answers", "texts"}:
            raise PerlclipError("what it knows of several labels needs the numbers of its answers and of its texts")
        if not all(isinstance(part, list) and len(part) == 3 for part in data.values()):
            raise PerlclipError("a sigmoid is a slope, an offset and a threshold")
        names = ("slope", "offset", "threshold")
        return cls(**{key: Sigmoid(**dict(zip(names, part, strict=True))) for key, part in data.items()})
