"""Images that belong to no class: neither the other images nor the class names vouch for them.

Two numbers of each image: the largest score of any class by ridge regression on the other images, and the cosine to
the nearest class text. Each is set against what is usual in the set, in robust standard deviations, and the sum of both
counts. Distance to the nearest images would not do: strangers come in groups, and are like each other.

Shapes: N images.
"""

import torch
from torch import Tensor

FAR = 3.0  # standard deviations, of both together
MOST = 0.02  # of the images, the strangest of them: a set of several kinds of images has a long tail


def strangeness(vouched_N: Tensor, nearest_N: Tensor) -> Tensor:
    """How far both are below the usual together, (N,)."""
    return _below(vouched_N) + _below(nearest_N)


def outliers(strange_N: Tensor) -> list[int]:
    """The strangest images, if there are any that are strange, strangest first."""
    most = max(1, int(MOST * len(strange_N)))
    return [i for i in strange_N.argsort(descending=True, stable=True)[:most].tolist() if strange_N[i] > FAR]


def _below(values_N: Tensor) -> Tensor:
    below_N = values_N.double().median() - values_N.double()
    spread = 1.4826 * below_N.abs().median()
    # One number alone does not make a stranger, nor does the other one save it.
    return (below_N / spread.clamp(min=1e-6)).clamp(-3, 6) if spread > 0 else torch.zeros_like(below_N)
