"""`calibrate`: the thresholds of adaptive thinking, set on the training shots alone.

The training images are looked at in the test view and in a few random views that training has not seen, all K steps of
each. Of a grid of policies the cheapest is chosen whose answers agree with step K's on a given share of the views; and
for every mean number of steps the one that agrees most, so that a budget finds its policy.

Shapes: K stands for the steps 0..K, V views, C classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perlclip.data.loading import eval_batches, on_device, train_batches
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.methods.base import Method
from perlclip.progress import progress_bar
from perlclip.thinking.policy import NEVER, Policy, image_steps, image_trajectory, require_steps, settled_steps

AGREEMENT = 0.995  # with step K, on the views; docs/adaptive.md says how it was chosen
VIEWS = 2  # random ones, beside the test view
IMAGES = 1000  # at most, spread over the set
CROP = (0.5, 1.0)  # of the random views, by area
QUANTILES = 16  # of a threshold's grid
SPACING = 0.25  # of the frontier, in mean steps


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
class Calibration:
    """The policy chosen for an adapter, and the best one for each mean number of steps, from 0 up."""

    chosen: Point
    frontier: tuple[Point, ...]
    views: int

    @property
    def policy(self) -> Policy:
        """What `steps="adaptive"` means."""
        return self.chosen.policy

    def within(self, max_mean_steps: float | None) -> Policy:
        """The policy that agrees most with step K at no more than so many steps in the mean of the views."""
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
    def from_json(cls, data: Any) -> "Calibration":
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


@torch.inference_mode()
def calibrate(
    method: Method,
    train_set: ImageSet,
    *,
    agreement: float = AGREEMENT,
    views: int = VIEWS,
    seed: int = 1,
    batch_size: int = 64,
    workers: int = 0,
    progress: bool = True,
) -> Calibration:
    """Set the thresholds of a trained PERL for `steps="adaptive"`, from its training images."""
    if not len(train_set):
        raise PerlclipError("the training set has no images")
    if not 0 <= agreement <= 1 or views < 0:
        raise PerlclipError(f"agreement is a share between 0 and 1 and views a count, got {agreement} and {views}")
    method = require_steps(method)
    if not image_steps(method):
        raise PerlclipError("the images of this adapter take no refinement steps: there is nothing to calibrate")
    total = min(len(train_set), IMAGES)
    train_set = train_set.select(i * len(train_set) // total for i in range(total))
    state = method.class_state(train_set.classes)
    trajectories = []
    with progress_bar("calibrate", total * (1 + views), show=progress) as bar:
        for pixels in training_views(method, train_set, views, seed, batch_size, workers):
            trajectories.append(image_trajectory(method, pixels, state).cpu())
            bar(len(pixels))
    return choose(torch.cat(trajectories, 1), agreement)


def training_views(
    method: Method, images: ImageSet, views: int, seed: int, batch_size: int, workers: int = 0
) -> Iterator[Tensor]:
    """Batches of pixels: every image in the test view, then in each of the random ones."""
    backbone = method.backbone
    order = [list(range(i, min(i + batch_size, len(images)))) for i in range(0, len(images), batch_size)]
    passes = [eval_batches(images, backbone.preprocess, batch_size, workers)]
    for view in range(views):
        # An epoch of its own: training counts from 0.
        epoch = -1 - view
        passes.append(train_batches(images, backbone.preprocess, CROP, order, seed=seed, epoch=epoch, workers=workers))
    for batches in passes:
        for pixels, _ in on_device(batches, backbone.device):
            yield pixels


def choose(logits_KVC: Tensor, agreement: float = AGREEMENT) -> Calibration:
    """The thresholds for these trajectories."""
    answers_KV = logits_KVC.argmax(-1)
    points = []
    settled_KV = settled_steps(logits_KVC)
    for policy in _grid(settled_KV):
        steps_V = policy.stops(settled_KV)
        same_V = answers_KV.gather(0, steps_V[None])[0] == answers_KV[-1]
        points.append(Point(steps_V.double().mean().item(), same_V.double().mean().item(), policy))
    points.sort(key=lambda point: (point.mean_steps, -point.agreement))
    frontier: list[Point] = []
    for i in range(int((len(logits_KVC) - 1) / SPACING) + 1):
        best = max((point for point in points if point.mean_steps <= i * SPACING), key=lambda point: point.agreement)
        if best not in frontier:
            frontier.append(best)
    chosen = next(point for point in points if point.agreement >= agreement)
    return Calibration(chosen=chosen, frontier=tuple(frontier), views=logits_KVC.shape[1])


def _grid(settled_KV: Tensor) -> Iterator[Policy]:
    """Policies at quantiles of what they look at, from one that never thinks to one that never stops."""
    for first in (0.0, *_quantiles(settled_KV[0]), NEVER):
        for lead in (*_quantiles(settled_KV[1:]), NEVER):
            yield Policy(first, lead)


def _quantiles(values: Tensor) -> list[float]:
    shares = torch.linspace(0, 1, QUANTILES, dtype=torch.double, device=values.device)
    return [round(value, 3) for value in torch.quantile(values.double().flatten(), shares).tolist()]
