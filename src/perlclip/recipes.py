"""Training settings as data: optimiser, rate, epochs, batch, crop, with where each number comes from.

A recipe is chosen by method and name, `recipe("perl", "fast")`, and can be changed field by field with
`dataclasses.replace`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from perlclip.errors import PerlclipError, unknown_name


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train."""

    optimizer: str = "adamw"
    lr: float = 1e-4
    weight_decay: float = 0.01
    epochs: int = 1
    batch_size: int = 4
    schedule: str = "constant"
    warmup_epochs: int = 0
    warmup_lr: float = 1e-5
    crop_scale: tuple[float, float] = (0.08, 1.0)
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", self.schedule, SCHEDULES)
        if self.epochs < 1 or self.batch_size < 1:
            raise PerlclipError(f"epochs and batch size must be at least 1, got {self.epochs} and {self.batch_size}")
        if not 0 < self.lr <= 10:
            raise PerlclipError(f"learning rate must be positive and at most 10, got {self.lr}")

    def rate(self, epoch: int) -> float:
        """Learning rate of epoch 0, 1, …; a warm-up at a constant rate does not use up the schedule's epochs."""
        if epoch < self.warmup_epochs:
            return self.warmup_lr
        return self.lr * SCHEDULES[self.schedule]((epoch - self.warmup_epochs) / self.epochs)

    def build_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimiser, at the rate of the first epoch."""
        return OPTIMIZERS[self.optimizer](parameters, lr=self.rate(0), weight_decay=self.weight_decay)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
}

# Share of the full rate at a fraction of training. The cosine is stepped once per epoch, as Dassl does.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}

RECIPES: dict[str, dict[str, Recipe]] = {
    "perl": {
        # The paper, appendix A: AdamW, 1e-4, batch 4, one epoch of 16 shots. It names no decay or schedule.
        "fast": Recipe(),
        # Ours: on the real ViT-B/16, one epoch at 1e-4 hardly moves the vision side; this does, and keeps lambda = 1.
        "extended": Recipe(lr=1e-3, epochs=5),
    },
}

# What the embedded backbone needs otherwise. Its pictures have 64 pixels, so a crop of 8 % would show two patches; its
# towers are six times narrower than ViT-B/16's, and the rate for its few weights is higher. Chosen among eight settings
# by mean accuracy on the validation shots of the ten toybox targets, seed 1 (docs/toybox.md).
TINY_CHANGES: dict[str, dict[str, Any]] = {
    "fast": {"crop_scale": (0.5, 1.0)},
    "extended": {"crop_scale": (0.5, 1.0), "lr": 3e-3},
}


def recipe(method: str, name: str, backbone: str = "") -> Recipe:
    """The recipe of that name for a method, on a backbone."""
    known = RECIPES.get(method)
    if known is None:
        raise PerlclipError(f"method {method!r} has nothing to train")
    if name not in known:
        raise unknown_name(f"recipe of method {method!r}:", name, known)
    return replace(known[name], **(TINY_CHANGES.get(name, {}) if backbone == "tiny" else {}))
