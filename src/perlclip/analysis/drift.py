"""How far predictions move from step 0, for images whose answer changed and those whose did not.

Shapes: K stands for the steps 0..K, B images.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perlclip.analysis.trajectories import Trajectories
from perlclip.viz.dynamics import QUANTILES

# First answer -> final answer: (name, right at step 0, right at step K).
TRANSITIONS = (
    ("correct→correct", True, True),
    ("wrong→correct", False, True),
    ("correct→wrong", True, False),
    ("wrong→wrong", False, False),
)


@dataclass(frozen=True)
class Drift:
    """KL(p_0 ‖ p_k) of the images of one transition: how many, the mean and quantiles at each step."""

    transition: str
    count: int
    mean: list[float]
    quantiles: list[list[float]]  # a list of QUANTILES for each step; nothing where there is no image


def transition(first: bool, last: bool) -> str:
    """By whether the first and the final answer are right."""
    return next(name for name, *right in TRANSITIONS if right == [first, last])


def transitions(found: Trajectories) -> dict[str, Tensor]:
    """Positions of the images of each transition."""
    first_B, last_B = found.correct_KB[0], found.correct_KB[-1]
    return {name: torch.nonzero((first_B == a) & (last_B == b))[:, 0] for name, a, b in TRANSITIONS}


def drift(found: Trajectories) -> list[Drift]:
    """A row for each transition, also for those that did not happen."""
    rows = []
    for name, images in transitions(found).items():
        values_KB = found.drift_KB[:, images].numpy()
        if not len(images):
            rows.append(Drift(name, 0, [], []))
            continue
        quantiles = np.quantile(values_KB, QUANTILES, axis=1).T
        rows.append(Drift(name, len(images), values_KB.mean(1).tolist(), quantiles.tolist()))
    return rows
