"""A head: what an adapter adds to its method's text classifier, for classes that were trained on and for new ones.

    l_text = share l_adapted + (1 - share) l_zero-shot               share 0: nothing trained; its center: `centered`
    l      = text l_text + scale (W f + b) + (M m + c)               for a list of classes trained on

W and b come from the classes' Gaussians (`discriminant.py`), or are ridge regression's (`regression.py`); f are the
features, made of the image's embeddings of the steps that it took (`FEATURES`); for a method that answers at once they
are its embedding. M and c are the same of what the image tower's middle says, m, where there is that (`middle.py`). Of
new classes Gaussians say something, too (`unseen.py`), ridge regression does not. In a list that has both, the rule for
that says how probable the trained classes are together, and the line above only divides that among them; without
Gaussians, the texts say it.

Shapes: k stands for the steps 0..k, B images, C classes, E embedding width, F that of the features.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.errors import PerlclipError, unknown_name
from perlclip.heads.discriminant import Gaussians
from perlclip.heads.middle import Middle
from perlclip.heads.unseen import UNSEEN, Unseen
from perlclip.methods.base import Method


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


def sees_frozen(method: Method, kind: str) -> bool:
    """Whether these features are the frozen CLIP's embeddings, whatever was trained."""
    return kind == "first" and (method.image_steps is not None or type(method).encode_image is Method.encode_image)


SMALLEST, LARGEST = 1e-20, 1e6  # variance of an embedding's number that a file may have
NUMBERS = ("text", "scale", "share", "offset")


@dataclass(frozen=True, kw_only=True)
class Head:
    """A linear classifier in an order of classes, how it is mixed with what the texts say, and what is known beyond.

    Learned numbers are kept in what float16 can say, in which they are saved: saved and loaded it answers the same.
    """

    class_names: tuple[str, ...]
    weight_CE: Tensor = field(repr=False)
    bias_C: Tensor = field(repr=False)
    text: float = 1.0  # weight of the texts' logits in the sum
    scale: float = 1.0  # that of the classifier's scores; 0: there is none, only a mixture with zero-shot
    share: float = 1.0  # of the adapted answer against zero-shot's
    centered: bool = False  # whether images are centered for zero-shot's, too, as they are for the method's
    offset: float = 0.0  # log-odds of trained classes against new ones, where a list has both and `unseen` says nothing
    strength: float = 1.0  # of the pull towards the simplest solution
    features: str = "first"
    gaussians: Gaussians | None = field(default=None, repr=False)  # that weight and bias are of
    unseen: Unseen | None = None
    middle: Middle | None = None

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
        return self.scale == 0 and self.share == 1 and self.unseen is None and self.middle is None

    @property
    def numbers(self) -> int:
        """What it adds to a method's parameters."""
        kept, more = self.gaussians, self.middle.numbers if self.middle else 0
        if kept is not None and (self.scale or self.unseen):
            return kept.means_CE.numel() + kept.center_E.numel() + kept.directions_RE.numel() + more
        return (self.weight_CE.numel() + self.bias_C.numel() if self.scale else 0) + more

    def texts_alone(self) -> "Head":
        """The mixture with zero-shot's answer, and nothing else."""
        return replace(self, scale=0.0, unseen=None, middle=None)

    def without_middle(self) -> "Head":
        """What it says to those who have frozen embeddings alone, with the numbers that were chosen for that."""
        unseen = self.unseen and replace(self.unseen, gained=())
        if self.middle is None:
            return replace(self, unseen=unseen)
        beside, unseen = self.middle.beside, unseen and replace(unseen, offset=self.middle.offset)
        return replace(self, text=self.text / beside, scale=self.scale / beside, unseen=unseen, middle=None)

    def as_json(self) -> dict[str, Any]:
        """What is no tensor, for an adapter's config."""
        words = {name: getattr(self, name) for name in (*NUMBERS, "strength", "features")}
        words |= {"centered": True} if self.centered else {}
        unseen = {"unseen": self.unseen.as_json()} if self.unseen else {}
        middle = {"middle": self.middle.as_json()} if self.middle else {}
        return {**words, **unseen, **middle, "numbers": self.numbers}

    def tensors(self) -> dict[str, Tensor]:
        """For a file; the numbers are among them, so that a hash of the file covers them."""
        numbers = [*(getattr(self, name) for name in NUMBERS), *[1.0] * self.centered]  # none in files of before
        mixture = {"head.mixture": torch.tensor(numbers, dtype=torch.float64)}
        mixture |= self.middle.tensors() if self.middle else {}
        if not (self.scale or self.unseen):
            return mixture
        if self.gaussians is None:
            return mixture | {"head.weight": self.weight_CE.half(), "head.bias": self.bias_C.float()}
        unseen = self.unseen.numbers() if self.unseen else []
        return mixture | {
            "head.means": self.gaussians.means_CE.half(),
            "head.center": self.gaussians.center_E.float(),
            "head.directions": self.gaussians.directions_RE.half(),
            "head.spread": torch.tensor(
                [self.gaussians.spread, self.gaussians.rest, self.strength, *unseen], dtype=torch.float64
            ),
        }

    @classmethod
    def read(cls, class_names: tuple[str, ...], width: int, data: Any, tensors: Mapping[str, Tensor]) -> "Head":
        """From what `as_json` and `tensors` gave, checked; `width` is that of embeddings."""
        if not isinstance(data, Mapping) or not {*NUMBERS, "strength", "features"} <= data.keys():
            raise PerlclipError("its head lacks some of its settings")
        mixture = tensors.get("head.mixture", torch.zeros(0)).tolist()
        centered = data.get("centered", False)
        if type(centered) is not bool or mixture != [*(data[name] for name in NUMBERS), *[1.0] * centered]:
            raise PerlclipError("the settings of its head are not those in its tensor file")
        if not isinstance(data["features"], str):
            raise PerlclipError(f"the features of its head are no word: {data['features']!r}")
        middle = Middle.read(len(class_names), data.get("middle"), tensors)
        if "head.means" in tensors:
            return replace(_read_gaussians(class_names, width, data, tensors), middle=middle, centered=centered)
        given: dict[str, Any] = {"middle": middle, "centered": centered} | {
            name: data[name] for name in (*NUMBERS, "strength", "features")
        }
        weight_CE = tensors.get("head.weight", torch.zeros(len(class_names), width))
        bias_C = tensors.get("head.bias", torch.zeros(len(class_names)))
        if middle and "head.weight" not in tensors and data["features"] == "all":
            raise PerlclipError("its head reads features that it has no weights for")
        if weight_CE.ndim != 2 or bias_C.ndim != 1:
            raise PerlclipError(f"its head has tensors of {weight_CE.ndim} and {bias_C.ndim} dimensions")
        if weight_CE.shape[-1] % width:
            raise PerlclipError(f"its head is for embeddings of width {weight_CE.shape[-1]}, not {width}")
        return cls(class_names=class_names, weight_CE=weight_CE.float(), bias_C=bias_C.float(), **given)


def make_head(class_names: tuple[str, ...], found: tuple[Tensor, Tensor] | Gaussians, **numbers: Any) -> Head:
    """A head from ridge regression's solution, rounded to what a file holds, or from Gaussians that are it already."""
    if isinstance(found, tuple):
        weight_CE, bias_C = found
        return Head(class_names=class_names, weight_CE=weight_CE.half().float(), bias_C=bias_C.float(), **numbers)
    weight_CE, bias_C = (each.float() for each in found.solution(numbers["strength"]))
    return Head(class_names=class_names, weight_CE=weight_CE, bias_C=bias_C, gaussians=found, **numbers)


def _read_gaussians(
    class_names: tuple[str, ...], width: int, data: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Head:
    names = "means", "center", "directions", "spread"
    parts = [tensors.get(f"head.{name}", torch.zeros(0)).double() for name in names]
    means_CE, center_E, directions_RE, numbers = parts
    if (
        means_CE.shape != (len(class_names), width) or center_E.shape != (width,) or numbers.ndim != 1
        or directions_RE.ndim != 2 or directions_RE.shape[1] != width or len(directions_RE) > width
        or not (len(numbers) == 3 or len(numbers) >= 3 + UNSEEN)
    ):  # fmt: skip
        shapes = [tuple(part.shape) for part in parts]
        raise PerlclipError(f"a head for {len(class_names)} classes has tensors of shape {shapes}")
    if not all(torch.isfinite(part).all() for part in parts) or not directions_RE.any(-1).all():
        raise PerlclipError("a head holds numbers that are not finite, or directions that lead nowhere")
    spread, rest, strength, *more = numbers.tolist()
    unseen = Unseen.read(more) if more else None
    if strength != data["strength"] or data.get("unseen") != (unseen and unseen.as_json()) or data["features"] == "all":
        raise PerlclipError("the settings of its head are not those in its tensor file")
    if not (SMALLEST <= spread <= LARGEST and 0 <= rest <= LARGEST):
        raise PerlclipError(f"a head has variances between {SMALLEST:g} and {LARGEST:g}, got {spread} and {rest}")
    kept = Gaussians(means_CE, center_E, directions_RE, spread, rest)
    given = {name: data[name] for name in (*NUMBERS, "strength", "features")}
    return make_head(class_names, kept, unseen=unseen, **given)
