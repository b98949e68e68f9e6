"""Temperatures: by what logits are divided, so that answers are as sure as they are right. No answer changes.

A temperature is fitted on images that the answer has not seen: the mean confidence is to be the share of right answers.
That is better founded on a few dozen images than the log-loss, which a single image that is very sure and wrong decides
(docs/trust.md has both).

Shapes: N images, C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any

from torch import Tensor

from perlclip.errors import PerlclipError

LOWEST, HIGHEST = 0.05, 20.0


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


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Temperatures of the adapter's answers to the classes trained on, and of its texts' alone.

    Lists with new classes are answered by the texts, and get the texts' temperature: the rule that measured best.
    """

    temperature: float
    texts: float

    def __post_init__(self) -> None:
        for value in (self.temperature, self.texts):
            if type(value) not in (int, float) or not isfinite(value) or not LOWEST / 2 <= value <= HIGHEST * 2:
                raise PerlclipError(f"a temperature is a number between {LOWEST} and {HIGHEST:g}, got {value!r}")

    def of(self, *, novel: bool, head: bool) -> float:
        """For a list of classes with or without new ones, answered with the head or without it."""
        return self.temperature if head and not novel else self.texts

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Any) -> "Calibration":
        """Checked."""
        if not isinstance(data, Mapping) or set(data) != {"temperature", "texts"}:
            raise PerlclipError("a calibration is a temperature and that of the texts")
        return cls(**data)
