"""A recipe's optimiser."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from perlclip.methods.recipe import Recipe

_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}


def build_optimizer(recipe: Recipe, parameters: Iterable[Tensor], *, fused: bool = False) -> Optimizer:
    """The optimiser, at the rate of the first epoch; `fused`: one kernel a step, for parameters on CUDA."""
    extra: dict[str, Any] = {} if recipe.optimizer == "sgd" else {"eps": recipe.eps}
    extra |= {"fused": True} if fused else {}
    return _OPTIMIZERS[recipe.optimizer](parameters, lr=recipe.rate(0), weight_decay=recipe.weight_decay, **extra)
