"""Sets of labels that hold the true one as often as was asked for: split conformal prediction.

Images that were held out are scored by how little their true class fits (`KINDS`). With n of them, and the
ceil((n+1) coverage)-th smallest of their scores as the bound, a fresh image's true class scores within the bound with a
probability of at least the coverage, whatever the classifier: all of the classes that do are the image's set. The
most probable class is always in it.

    lac      1 - p                          the smallest sets on average; hard images may get few labels
    raps     mass of the classes before it + PENALTY for each rank beyond FREE      sets that grow with doubt

Shapes: B images, C classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, floor, isfinite
from typing import Any

import torch
from torch import Tensor

from perlclip.errors import PerlclipError, unknown_name

KIND = "lac"
PENALTY, FREE = 0.02, 5  # docs/trust.md says how they were chosen
SLACK = 1e-6  # scores are kept to six digits


def _lac(p_BC: Tensor) -> Tensor:
    return 1 - p_BC


def _raps(p_BC: Tensor) -> Tensor:
    sorted_BC, order_BC = p_BC.sort(dim=-1, descending=True, stable=True)
    rank_C = torch.arange(p_BC.shape[-1], device=p_BC.device)
    before_BC = sorted_BC.cumsum(-1) - sorted_BC + PENALTY * (rank_C + 1 - FREE).clamp(min=0)
    return torch.empty_like(before_BC).scatter_(-1, order_BC, before_BC)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {"lac": _lac, "raps": _raps}


def enough(share: float, images: int) -> bool:
    """Whether so many images are enough for a bound that is exceeded at most at this rate."""
    return floor(round((images + 1) * share, 9)) > 0


def exceeding(share: float, images: int, asked: str) -> int:
    """How many of so many held-out scores may lie beyond a bound that fresh ones exceed at most at this rate.

    Refused where there are too few of them for any bound; `asked` is what the user has asked for.
    """
    beyond = floor(round((images + 1) * share, 9))
    if not beyond:
        needed = ceil(round(1 / share, 9)) - 1
        raise PerlclipError(
            f"{asked} needs {needed} images held out, and there are {images}: take more shots, or give others with "
            "`perlclip calibrate ADAPTER DATA` (in Python Classifier.calibrate)"
        )
    return beyond


def check_share(what: str, share: object) -> float:
    """A share that can be asked for."""
    if not isinstance(share, int | float) or not 0 < share < 1:
        raise PerlclipError(f"{what} is a share between 0 and 1, got {share!r}")
    return float(share)


@dataclass(frozen=True)
class LabelSets:
    """Scores of the true classes of images held out, in ascending order, for each kind."""

    scores: Mapping[str, tuple[float, ...]]

    @classmethod
    def of(cls, p_NC: Tensor, labels_N: Tensor) -> "LabelSets":
        """From calibrated probabilities of images that were held out."""
        found = {kind: score(p_NC.double()).gather(1, labels_N[:, None])[:, 0] for kind, score in KINDS.items()}
        return cls({kind: tuple(round(s, 6) for s in sorted(scores_N.tolist())) for kind, scores_N in found.items()})

    def bound(self, kind: str, coverage: float) -> float:
        """What a class may score to be in the set; refused where too few images were held out."""
        if kind not in KINDS:
            raise unknown_name("kind of label sets", kind, KINDS)
        missed = round(1 - check_share("coverage", coverage), 9)
        return self.scores[kind][-exceeding(missed, len(self.scores[kind]), f"coverage={coverage:g}")] + SLACK

    def of_images(self, p_BC: Tensor, kind: str, coverage: float) -> Tensor:
        """Which classes are in each image's set, (B, C)."""
        bound = self.bound(kind, coverage)
        within_BC = KINDS[kind](p_BC) <= bound
        return within_BC.scatter(-1, p_BC.argmax(-1, keepdim=True), torch.ones_like(within_BC))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {kind: list(scores) for kind, scores in self.scores.items()}

    @classmethod
    def from_json(cls, data: Any, images: int) -> "LabelSets":
        """Checked."""
        if not isinstance(data, Mapping) or set(data) != set(KINDS):
            raise PerlclipError(f"label sets need the scores of {' and '.join(KINDS)}")
        return cls({kind: ascending(data[kind], images) for kind in KINDS})


def ascending(numbers: Any, images: int) -> tuple[float, ...]:
    """A number for each image held out, in order."""
    whole = isinstance(numbers, list) and len(numbers) == images
    if not whole or not all(type(n) in (int, float) and isfinite(n) for n in numbers) or sorted(numbers) != numbers:
        raise PerlclipError(f"the scores of {images} images held out are that many finite numbers in ascending order")
    return tuple(numbers)
