"""A head: what an adapter adds to its method's text classifier, for the classes that were trained on.

    l_text = share l_adapted + (1 - share) l_zero-shot               share 0: nothing adapted
    l      = text l_text + scale (W f + b)                           for a list of classes trained on

W and b are ridge regression's (`regression.py`), f the features, made of the image's embeddings of the steps that it
took (`FEATURES`); for a method that answers at once they are its embedding. Among new classes the text classifier says
how probable the trained ones are together (plus an `offset` in log-odds), and the head only divides that among them.

Shapes: k stands for the steps 0..k, B images, C classes, E embedding width, F that of the features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.errors import PerlclipError, unknown_name


def _side_by_side(v_kBE: Tensor, steps: int) -> Tensor:
    """Every step's embedding; an image that has stopped keeps its last one."""
    taken = range(len(v_kBE))
    rows = [torch.cat([v_kBE[min(k, j)] for j in range(steps + 1)], -1) for k in taken]
    return torch.stack(rows) / sqrt(steps + 1)


# From the embeddings of steps 0..k, (k+1, B, E), what the head looks at after each of them: unit vectors, (k+1, B, F).
# The second argument is K, the most steps there are. PERL's first embedding is the frozen CLIP's.
FEATURES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "first": lambda v_kBE, steps: v_kBE[:1].expand_as(v_kBE),
    "last": lambda v_kBE, steps: v_kBE,
    "mean": lambda v_kBE, steps: F.normalize(v_kBE.cumsum(0), dim=-1),
    "all": _side_by_side,
}


def features(kind: str, v_kBE: Tensor, steps: int | None) -> Tensor:
    """Features after each step, (k+1, B, F)."""
    return FEATURES[kind](v_kBE.float(), steps or 0)


NUMBERS = ("text", "scale", "share", "offset")


@dataclass(frozen=True, kw_only=True)
class Head:
    """Ridge regression's solution in an order of classes, and how it is mixed with what the texts say.

    The weight is kept in what float16 can say, in which it is saved: saved and loaded it answers the same.
    """

    class_names: tuple[str, ...]
    weight_CE: Tensor = field(repr=False)
    bias_C: Tensor = field(repr=False)
    text: float = 1.0  # weight of the texts' logits in the sum
    scale: float = 1.0  # that of ridge regression's scores; 0: there is none, only a mixture with zero-shot
    share: float = 1.0  # of the adapted answer against zero-shot's
    offset: float = 0.0  # log-odds of trained classes against new ones, where a list has both
    strength: float = 1.0  # lambda
    features: str = "first"

    def __post_init__(self) -> None:
        if self.features not in FEATURES:
            raise unknown_name("features of a head", self.features, FEATURES)
        numbers = [getattr(self, name) for name in (*NUMBERS, "strength")]
        if (
            not all(type(n) in (int, float) and isfinite(n) for n in numbers)
            or min(self.text, self.scale) < 0
            or not 0 <= self.share <= 1
        ):
            raise PerlclipError(f"a head has finite numbers, weights of at least 0 and a share in 0..1, got {numbers}")
        if self.weight_CE.ndim != 2 or {len(self.weight_CE), len(self.bias_C)} != {len(self.class_names)}:
            raise PerlclipError(
                f"a head for {len(self.class_names)} classes has tensors of shape "
                f"{tuple(self.weight_CE.shape)} and {tuple(self.bias_C.shape)}"
            )
        if not (torch.isfinite(self.weight_CE).all() and torch.isfinite(self.bias_C).all()):
            raise PerlclipError("a head holds numbers that are not finite")

    @property
    def idle(self) -> bool:
        """Whether it changes nothing."""
        return self.scale == 0 and self.share == 1

    @property
    def numbers(self) -> int:
        """What it adds to a method's parameters."""
        return self.weight_CE.numel() + self.bias_C.numel() if self.scale else 0

    def as_json(self) -> dict[str, Any]:
        """What is no tensor, for an adapter's config."""
        words = {name: getattr(self, name) for name in (*NUMBERS, "strength", "features")}
        return {**words, "numbers": self.numbers}

    def tensors(self) -> dict[str, Tensor]:
        """For a file; the numbers are among them, so that a hash of the file covers them."""
        mixture = torch.tensor([getattr(self, name) for name in NUMBERS], dtype=torch.float64)
        learned = {"head.weight": self.weight_CE.half(), "head.bias": self.bias_C.float()} if self.scale else {}
        return {"head.mixture": mixture, **learned}

    @classmethod
    def read(cls, class_names: tuple[str, ...], width: int, data: Any, tensors: Mapping[str, Tensor]) -> "Head":
        """From what `as_json` and `tensors` gave, checked; `width` is that of embeddings."""
        if not isinstance(data, Mapping) or not {*NUMBERS, "strength", "features"} <= data.keys():
            raise PerlclipError("its head lacks some of its settings")
        mixture = tensors.get("head.mixture", torch.zeros(0)).tolist()
        if mixture != [data[name] for name in NUMBERS]:
            raise PerlclipError("the settings of its head are not those in its tensor file")
        weight_CE = tensors.get("head.weight", torch.zeros(len(class_names), width))
        bias_C = tensors.get("head.bias", torch.zeros(len(class_names)))
        if weight_CE.shape[-1] % width:
            raise PerlclipError(f"its head is for embeddings of width {weight_CE.shape[-1]}, not {width}")
        given = {name: data[name] for name in (*NUMBERS, "strength", "features")}
        return cls(class_names=class_names, weight_CE=weight_CE.float(), bias_C=bias_C.float(), **given)


def make_head(class_names: tuple[str, ...], solution: tuple[Tensor, Tensor], **numbers: Any) -> Head:
    """A head from ridge regression's solution, its weight rounded to what a file holds."""
    weight_CE, bias_C = solution
    return Head(class_names=class_names, weight_CE=weight_CE.half().float(), bias_C=bias_C.float(), **numbers)
