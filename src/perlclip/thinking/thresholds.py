"""The thresholds of adaptive thinking as data: what an adapter carries, checked when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perlclip.errors import PerlclipError
from perlclip.thinking.policy import NEVER, Policy


@dataclass(frozen=True)
class Point:
    """A policy, and what it did on the views: mean steps, and the share of answers that are step K's."""

    mean_steps: float
    agreement: float
    policy: Policy

    def numbers(self) -> list[float]:
        """As a list for JSON."""
        return [round(self.mean_steps, 4), round(self.agreement, 4), *vars(self.policy).values()]


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The policy chosen for an adapter, and the best one for each mean number of steps, from 0 up."""

    chosen: Point
    frontier: tuple[Point, ...]
    views: int

    @property
    def policy(self) -> Policy:
        """What `steps="adaptive"` means."""
        return self.chosen.policy

    def within(self, max_mean_steps: float | None) -> Policy:
        """The policy that agrees most with step K at no more than so many steps, on average over the views."""
        if max_mean_steps is None:
            return self.policy
        affordable = [point for point in self.frontier if point.mean_steps <= max_mean_steps]
        return max(affordable, key=lambda point: point.agreement, default=self.frontier[0]).policy

    def as_json(self) -> dict[str, Any]:
        """Plain data for an adapter's config."""
        return {
            "views": self.views,
            "chosen": self.chosen.numbers(),
            "frontier": [point.numbers() for point in self.frontier],
        }

    @classmethod
    def from_json(cls, data: Any) -> "Thresholds":
        """Checked: thresholds that are not numbers would be found out only by wrong answers."""
        if not isinstance(data, Mapping) or not isinstance(data.get("frontier"), list):
            raise PerlclipError("adaptive thinking needs a chosen policy and a frontier")
        frontier = tuple(_point(numbers) for numbers in data["frontier"])
        if not frontier or frontier[0].mean_steps != 0:
            raise PerlclipError("the frontier of adaptive thinking must begin with a mean of 0 steps")
        if not isinstance(data.get("views"), int):
            raise PerlclipError(f"the views of adaptive thinking must be counted, got {data.get('views')!r}")
        return cls(chosen=_point(data.get("chosen")), frontier=frontier, views=data["views"])


def _point(numbers: Any) -> Point:
    whole = isinstance(numbers, list) and len(numbers) == 4
    if not whole or not all(type(n) in (int, float) and abs(n) <= NEVER for n in numbers):
        raise PerlclipError(f"a policy of adaptive thinking is four finite numbers, got {numbers!r}")
    mean_steps, agreement, first, lead = numbers
    if mean_steps < 0 or not 0 <= agreement <= 1:
        raise PerlclipError(f"a policy of adaptive thinking has a number out of range: {numbers!r}")
    return Point(mean_steps, agreement, Policy(first, lead))
