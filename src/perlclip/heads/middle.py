"""What the middle of the image tower says about the classes trained on, added to a head's scores.

CLIP's last blocks keep of an image what a caption would say. How a surface looks, or a field from above, is still
there half way up, in the frozen sequence that PERL's thoughts are put before, and a few shots are enough to read it:
Gaussians round the classes' means (`discriminant.py`) of what `FrozenImages.middle` gives. No text says anything there,
so that it is only for classes that were trained on, and for whether an image is of one of them at all; and it is free,
as these rows are computed anyway.

Shapes: C classes, F features (of CLS, where there is one, and of the patches).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perlclip.backbone import Tower
from perlclip.errors import PerlclipError

NAMES = "head.middle.weight", "head.middle.bias", "head.middle.numbers"
MOST = 1e6  # times as much


@dataclass(frozen=True)
class Middle:
    """A linear classifier of the rows after `depth` blocks; its weight is what float16 can say, as it is saved so."""

    depth: int
    weight_CF: Tensor = field(repr=False)
    bias_C: Tensor = field(repr=False)
    among: float = 0.0  # times as much, in how probable the trained classes are together beside new ones
    beside: float = 1.0  # how much of the rest of the sum was left beside it
    offset: float = 0.0  # log-odds of trained classes against new ones, for those who do not read it

    def __post_init__(self) -> None:
        if not (torch.isfinite(self.weight_CF).all() and torch.isfinite(self.bias_C).all()):
            raise PerlclipError("the middle of a head holds numbers that are not finite")

    @classmethod
    def of(cls, depth: int, solution: tuple[Tensor, Tensor], scale: float, **numbers: float) -> "Middle":
        """From a solution for the features, and its scale in the sum."""
        # Of classes whose shots are all but copies, numbers can be larger than a file's.
        scale *= min(1.0, torch.finfo(torch.float16).max / (scale * solution[0].abs().max().item() or 1.0))
        weight_CF, bias_C = (scale * each for each in solution)
        return cls(depth, weight_CF.half().float(), bias_C.float(), **numbers)

    @property
    def numbers(self) -> int:
        """What it adds to a head's."""
        return self.weight_CF.numel() + self.bias_C.numel()

    def as_json(self) -> dict[str, Any]:
        """What is no tensor, for an adapter's config."""
        numbers = {"depth": self.depth, "among": self.among, "beside": self.beside, "offset": self.offset}
        return {**numbers, "features": self.weight_CF.shape[1]}

    def tensors(self) -> dict[str, Tensor]:
        """For a file."""
        numbers = torch.tensor([self.depth, self.among, self.beside, self.offset], dtype=torch.float64)
        made = self.weight_CF.half(), self.bias_C.float(), numbers
        return dict(zip(NAMES, made, strict=True))

    @classmethod
    def read(cls, classes: int, data: Any, tensors: Mapping[str, Tensor]) -> "Middle | None":
        """From what `as_json` and `tensors` gave, checked; None where a head has nothing of the kind."""
        found = [tensors.get(name) for name in NAMES]
        if data is None and not any(each is not None for each in found):
            return None
        weight_CF, bias_C, numbers = found
        if weight_CF is None or bias_C is None or numbers is None:
            raise PerlclipError("the middle of its head lacks some of its tensors")
        if weight_CF.ndim != 2 or len(weight_CF) != classes or bias_C.shape != (classes,) or numbers.shape != (4,):
            shapes = [tuple(each.shape) for each in (weight_CF, bias_C, numbers)]
            raise PerlclipError(f"the middle of a head for {classes} classes has tensors of shape {shapes}")
        depth, *more = numbers.tolist()
        among, beside, offset = more
        if not float(depth).is_integer() or not 0 <= among <= MOST or not 0 < beside <= 1 or not abs(offset) <= MOST:
            raise PerlclipError(f"the middle of its head has numbers that cannot be: {numbers.tolist()}")
        middle = cls(int(depth), weight_CF.float(), bias_C.float(), *more)
        if data != middle.as_json():
            raise PerlclipError("the settings of its head are not those in its tensor file")
        return middle

    def require(self, tower: Tower) -> None:
        """That the tower has such features there."""
        if not 0 <= self.depth < tower.depth or self.weight_CF.shape[1] != tower.middle_width:
            raise PerlclipError(
                f"its head reads {self.weight_CF.shape[1]} numbers after block {self.depth}; the image tower has "
                f"{tower.middle_width}, and {tower.depth} blocks"
            )
