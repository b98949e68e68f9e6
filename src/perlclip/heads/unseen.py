"""Classes that a head was not trained on: where their images should be, from their texts and the trained classes.

CLIP embeds images and texts in one space, but not in one place: all images of a kind, those of a satellite, say, lie
off their texts by much the same. So a new class's mean is guessed by how its text differs from the trained classes'
average text, laid off from the centre of their images. What their means have beyond what their own texts say is handed
on to new classes, by how much their texts have in common (kriging):

    m = g t̃ + k (K + I / handed)⁻¹ (M - g T̃)        t̃ = t - mean T,  g = gain <M, T̃> / <T̃, T̃>

M and T are the trained classes' means, from their centre, and texts; K and k are the texts' products T̃ T̃ᵀ and t̃ T̃ᵀ,
divided by the mean of K's diagonal. Round its mean a new class is the same Gaussian as the others (`discriminant.py`).

In a list that has both kinds, what is said of either together is said with the texts as they were trained, where they
were. Training makes trained classes likelier in any image; so the log-odds that it has added to them on average, in
images that are of one, are taken off again (`gained`, by the steps that an image takes): then it says better which
images are of one, and not that more of them are.

Shapes: C trained classes, X new ones, E embedding width.
"""

from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from perlclip.errors import PerlclipError
from perlclip.heads.discriminant import Gaussians, between

MOST = 1e6  # that a number of a rule is; what is chosen is far below


@dataclass(frozen=True, kw_only=True)
class NewClasses:
    """Logits of a list with new classes are text l_text + scale r, with r the scores round these means."""

    text: float = 1.0
    scale: float = 0.0
    strength: float = 0.5
    gain: float = 1.0
    handed: float = 0.0

    def __post_init__(self) -> None:
        numbers = astuple(self)
        if not all(0 <= n <= MOST for n in numbers):
            raise PerlclipError(f"a head's rule for new classes has numbers from 0 to {MOST:g}, got {numbers}")
        between(self.strength)


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """How a head speaks about new classes: in a list of their own, and in one that has trained classes as well."""

    alone: NewClasses
    among: NewClasses
    offset: float = 0.0  # log-odds of the trained classes against the new ones, in a list that has both
    gained: tuple[float, ...] = ()  # what training has added after 0, 1, … steps; none: `among` has frozen texts

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.gained)
        if not all(abs(number) <= MOST for number in numbers):
            raise PerlclipError(
                f"the offset of a head and what training added are numbers up to {MOST:g}, got {numbers}"
            )

    def as_json(self) -> dict[str, Any]:
        """As plain data; versions of before do not know `gained`."""
        gained = {"gained": list(self.gained)} if self.gained else {}
        return {"alone": asdict(self.alone), "among": asdict(self.among), "offset": self.offset, **gained}

    def numbers(self) -> list[float]:
        """For a file."""
        return [*astuple(self.alone), *astuple(self.among), self.offset, *self.gained]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "Unseen":
        """From what `numbers` gave, `UNSEEN` of them or more."""
        parts = numbers[: len(NAMES)], numbers[len(NAMES) : 2 * len(NAMES)]
        alone, among = (NewClasses(**dict(zip(NAMES, part, strict=True))) for part in parts)
        return cls(alone=alone, among=among, offset=numbers[UNSEEN - 1], gained=tuple(numbers[UNSEEN:]))


NAMES = tuple(field.name for field in fields(NewClasses))
UNSEEN = 2 * len(NAMES) + 1


def means_of(gaussians: Gaussians, t_CE: Tensor, t_XE: Tensor, rule: NewClasses) -> Tensor:
    """Where images of classes with texts `t_XE` should be, from the centre, (X, E); `t_CE` are the trained ones'."""
    there_C = gaussians.means_CE.any(-1)  # a class without a shot says nothing
    m_CE, t_CE, t_XE = gaussians.means_CE[there_C], t_CE[there_C].double(), t_XE.double()
    middle_E = t_CE.mean(0)
    t_CE, t_XE = t_CE - middle_E, t_XE - middle_E
    length = t_CE.square().sum()
    if not length > 0:  # one trained class has no differences to learn from
        return torch.zeros_like(t_XE)
    g = rule.gain * ((m_CE * t_CE).sum() / length).clamp(min=0)
    if not rule.handed:
        return g * t_XE
    k_CC, k_XC = (rows @ t_CE.T * (len(t_CE) / length) for rows in (t_CE, t_XE))
    beyond_CE = torch.linalg.solve(k_CC + torch.eye(len(t_CE)).double() / rule.handed, m_CE - g * t_CE)
    means_XE: Tensor = g * t_XE + k_XC @ beyond_CE
    return means_XE
