"""Temperatures: by what logits are divided, so that answers are as sure as they are right. No answer changes.

A temperature is fitted on images that the answer has not seen: the mean confidence is to be the share of right answers.
That is better founded on a few dozen images than the log-loss, which a single image that is very sure and wrong decides
(docs/trust.md has both).

Whether a temperature carries over to classes that nobody has labelled is asked of those that somebody has: it is fitted
on half of the trained classes, and the other half says which power of it serves them best, from 0, which leaves CLIP's
own scale, to 1. Many such halves decide on what new classes get.

Shapes: N images, C classes.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

import torch
from torch import Tensor

from perlclip.errors import PerlclipError

LOWEST, HIGHEST = 0.05, 20.0
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
HALVINGS = 10


def fit_temperature(logits_NC: Tensor, labels_N: Tensor) -> float:
    """The temperature at which these answers are as sure as they are right, within bounds; 1 of no images."""
    count = len(labels_N)
    if not count or logits_NC.shape[1] < 2:
        return 1.0
    logits_NC = logits_NC.double()
    right = int((logits_NC.argmax(-1) == labels_N).sum())
    wanted = (right + 0.5) / (count + 1)  # that all of a few images are right does not make it certain
    low, high = log(LOWEST), log(HIGHEST)
    for _ in range(40):  # confidence falls as the temperature rises
        middle = (low + high) / 2
        surer = (logits_NC / exp(middle)).softmax(-1).amax(-1).mean().item() > wanted
        low, high = (middle, high) if surer else (low, middle)
    return round(exp((low + high) / 2), 4)


def carried_temperature(texts_NC: Tensor, labels_N: Tensor) -> float:
    """What new classes get of the texts' temperature, by halves of the trained ones; 1 where these are fewer than 4."""
    classes = texts_NC.shape[1]
    if classes < 4:
        return 1.0
    rng, brier = random.Random(0), dict.fromkeys(POWERS, 0.0)
    for _ in range(HALVINGS):
        order = rng.sample(range(classes), classes)
        halves = [_among(sorted(part), texts_NC, labels_N) for part in (order[: classes // 2], order[classes // 2 :])]
        for (ours_nc, own_n), (theirs_nc, other_n) in (halves, reversed(halves)):
            if not len(own_n) or not len(other_n):
                continue
            temperature = fit_temperature(ours_nc, own_n)
            for power in POWERS:
                p_nc = (theirs_nc.double() / temperature**power).softmax(-1)
                brier[power] += (p_nc.square().sum(-1) - 2 * p_nc.gather(1, other_n[:, None])[:, 0]).mean().item()
    best = min(POWERS, key=lambda power: brier[power])
    return round(float(fit_temperature(texts_NC, labels_N) ** best), 4)


def _among(classes: list[int], texts_NC: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Images of some of the classes, asked for these alone."""
    some = torch.tensor(classes)
    of_them_N = torch.isin(labels_N, some)
    return texts_NC[of_them_N][:, some], torch.searchsorted(some, labels_N[of_them_N])


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures of the adapter's answers to the classes trained on, of its texts' alone, and of lists with new ones.

    A list with new classes is answered by the texts, or by a rule of the head's that is as sure as it should be.
    """

    temperature: float
    texts: float
    novel: float
    ruled: bool = False  # whether the head has such a rule

    def __post_init__(self) -> None:
        if type(self.ruled) is not bool:
            raise PerlclipError(f"whether a head has a rule for new classes is true or false, got {self.ruled!r}")
        for value in (self.temperature, self.texts, self.novel):
            if type(value) not in (int, float) or not isfinite(value) or not LOWEST / 2 <= value <= HIGHEST * 2:
                raise PerlclipError(f"a temperature is a number between {LOWEST} and {HIGHEST:g}, got {value!r}")

    def of(self, *, novel: bool, head: bool) -> float:
        """For a list of classes with or without new ones, answered with the head or without it."""
        if novel:
            return 1.0 if head and self.ruled else self.novel
        return self.temperature if head else self.texts

    def as_json(self) -> dict[str, Any]:
        """Plain data; earlier versions know nothing of rules."""
        return {key: value for key, value in vars(self).items() if key != "ruled" or value}

    @classmethod
    def from_json(cls, data: Any) -> "Calibration":
        """Checked."""
        if not isinstance(data, Mapping) or set(data) - {"ruled"} != {"temperature", "texts", "novel"}:
            raise PerlclipError("a calibration is a temperature, that of the texts and that of new classes")
        return cls(**data)
