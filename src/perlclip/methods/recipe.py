"""Training settings as data: optimiser, rate, epochs, batch, crop; each method's file has its own recipes.

Names: `fast`, one epoch; `original`, the authors' base-to-novel runs; `original-cross`, theirs on all classes of the
source, for transfer; `original-few-shot`, theirs on all classes of a target, 16 shots unless a rule names another
number; and for PERL our `strong`, with `extended`, which was the default before it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from perlclip.backbone.load import EMBEDDED
from perlclip.errors import PerlclipError, unknown_name

OPTIMIZERS = ("adamw", "adam", "sgd")
# Share of the full rate at a fraction of training. The cosine is stepped once per epoch, as Dassl does.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


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
    eps: float = 1e-8  # of Adam and AdamW
    average: tuple[float, float] | None = None  # mean and deviation, in epochs, of a Gaussian average of the weights
    # Of few images each is looked at more often, until that many batches are trained on, or that many epochs are over:
    # by a recipe's name, or as `find_recipe` gives it for a number of images.
    least_steps: int = 0
    most_epochs: int = 0

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise unknown_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", self.schedule, SCHEDULES)
        if self.epochs < 1 or self.batch_size < 1:
            raise PerlclipError(f"epochs and batch size must be at least 1, got {self.epochs} and {self.batch_size}")
        if min(self.least_steps, self.most_epochs) < 0:
            found = f"{self.least_steps} and {self.most_epochs}"
            raise PerlclipError(f"the least steps and the most epochs of few images must be at least 0, got {found}")
        if self.average is not None and not self.average[1] > 0:
            raise PerlclipError(f"the deviation of the average must be positive, got {self.average[1]}")
        if not 0 < self.lr <= 10:
            raise PerlclipError(f"learning rate must be positive and at most 10, got {self.lr}")

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for files; what version 0.1.0 did not have only where it says something."""
        return {key: value for key, value in asdict(self).items() if value or key not in ("least_steps", "most_epochs")}

    def trained_on(self, images: int) -> "Recipe":
        """What that comes to for so many images."""
        batches = math.ceil(images / self.batch_size)
        enough = min(self.most_epochs, math.ceil(self.least_steps / max(1, batches)))
        return replace(self, epochs=max(self.epochs, enough), least_steps=0, most_epochs=0)

    def rate(self, epoch: int) -> float:
        """Learning rate of epoch 0, 1, …; a warm-up at a constant rate does not use up the schedule's epochs."""
        warmup = self.warmup_epochs if self.warmup_epochs < self.epochs else 0  # all warm-up would train nothing
        if epoch < warmup:
            return self.warmup_lr
        return self.lr * SCHEDULES[self.schedule]((epoch - warmup) / self.epochs)

    def share(self, epoch: int) -> float:
        """Share of the weights after epoch 0, 1, … in the average; all shares together are 1."""
        assert self.average is not None
        mean, deviation = self.average
        exponents = [-0.5 * ((e + 1 - mean) / deviation) ** 2 for e in range(self.epochs)]
        density = [math.exp(exponent - max(exponents)) for exponent in exponents]
        return density[epoch] / sum(density)


# What the authors' codes inherit from Dassl, their common framework: decay on everything that is trained, a cosine
# stepped once per epoch, one epoch of warm-up at 1e-5 that does not use up the cosine, the last short batch dropped.
DASSL = Recipe(weight_decay=5e-4, schedule="cosine", warmup_epochs=1, drop_last=True)
DASSL_SGD = replace(DASSL, optimizer="sgd", lr=0.002, batch_size=32)


def with_fast(original: Recipe, **others: Recipe) -> dict[str, Recipe]:
    """The authors' recipes, `cross` and `few_shot` among the others, and before them the paper's protocol for everyone.

    That is one epoch of 16 shots with the method's own optimiser, rate and decay; batches of 4 for all, so that all
    take as many steps as PERL. No warm-up: an only epoch at 1e-5 would train nothing. (The paper may have kept it: its
    KgCoOp is below zero-shot CLIP on base classes, 66.4 against 69.3.)
    """
    fast = replace(
        original, epochs=1, batch_size=4, schedule="constant", warmup_epochs=0, drop_last=False, average=None
    )
    named = {f"original-{name.replace('_', '-')}": other for name, other in others.items()}
    return {"fast": fast, "original": original, **named}


TRAINED_ON = ("fast", "original", "original-few-shot")  # recipes for the data set itself, not for transfer from it


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What holds for some recipes, a data set or a backbone: other fields of the recipe, settings of the method."""

    recipes: tuple[str, ...] = ()  # none stands for all, and so below
    dataset: str = ""
    backbone: str = ""
    shots: tuple[int, int] | None = None  # the fewest and the most
    changes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


# The embedded backbones' pictures have 64 pixels, so a crop of 8 % would show two patches.
EVERYONE = [Rule(backbone=name, changes={"crop_scale": (0.5, 1.0)}) for name in EMBEDDED]


def apply_rules(
    recipe: Recipe, rules: Iterable[Rule], name: str, backbone: str, dataset: str, shots: int = 0, images: int = 0
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe as it is for a backbone, a data set, shots and images, and the settings it wants of the method."""
    settings: dict[str, Any] = {}
    for rule in (*EVERYONE, *rules):
        here = name in (rule.recipes or (name,)) and rule.dataset in ("", dataset) and rule.backbone in ("", backbone)
        if here and (rule.shots is None or rule.shots[0] <= shots <= rule.shots[1]):
            recipe = replace(recipe, **rule.changes)
            settings |= rule.settings
    return recipe.trained_on(images) if images else recipe, settings
