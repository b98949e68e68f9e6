"""`set_thresholds`: the thresholds of adaptive thinking, set on the training shots alone.

The training images are looked at in the test view and in a few random views that training has not seen, all K steps of
each. Of a grid of policies the cheapest is chosen whose answers agree with step K's on a given share of the views; and
for every mean number of steps the one that agrees most, so that a budget finds its policy.

Shapes: K stands for the steps 0..K, V views, C classes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from perlclip.adapters.folder import Adapter
from perlclip.data.loading import fixed_views, random_views
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.methods.base import ClassState, Method
from perlclip.progress import progress_bar
from perlclip.thinking.policy import NEVER, Policy, require_steps, settled_steps
from perlclip.thinking.thresholds import Point, Thresholds
from perlclip.training.shots import Seen

AGREEMENT = 0.995  # with step K, on the views; docs/adaptive.md says how it was chosen
VIEWS = 1  # random ones, beside the test view
IMAGES = 1000  # at most, spread over the set
CROP = (0.5, 1.0)  # of the random views, by area
QUANTILES = 16  # of a threshold's grid
SPACING = 0.25  # of the frontier, in mean steps


@torch.inference_mode()
def set_thresholds(
    trained: Method | Adapter,
    train_set: ImageSet,
    *,
    state: ClassState | None = None,
    seen: Seen | None = None,
    agreement: float = AGREEMENT,
    views: int = VIEWS,
    seed: int = 1,
    batch_size: int = 64,
    workers: int = 0,
    progress: bool = True,
) -> Thresholds:
    """Set the thresholds of a trained PERL for `steps="adaptive"`, from its training images.

    `state` is that of the images' classes, and `seen` what the method has said about them in the test view, if it was
    asked already.
    """
    if not len(train_set):
        raise PerlclipError("the training set has no images")
    if not 0 <= agreement <= 1 or views < 0:
        raise PerlclipError(f"agreement is a share between 0 and 1 and views a count, got {agreement} and {views}")
    method = require_steps(trained.method if isinstance(trained, Adapter) else trained)
    if not method.image_steps:
        raise PerlclipError("the images of this adapter take no refinement steps: there are no thresholds to set")
    total = min(len(train_set), IMAGES)
    places = [i * len(train_set) // total for i in range(total)]
    train_set = train_set.select(places)
    state = state or method.class_state(train_set.classes)
    answering = Answering(method, state, trained.head if isinstance(trained, Adapter) else None)
    trajectories = []
    if seen is not None:
        for part in torch.split(torch.tensor(places), batch_size):
            v_KBE, m_BF = seen.of(part, method.backbone.device)
            more_BC = None if m_BF is None else answering.from_middle(m_BF)
            trajectories.append(answering.image_trajectory(v_KBE, more_BC).cpu())
    known = total if seen is not None else 0
    with progress_bar("thresholds", total * (1 + views) - known, show=progress) as bar:
        looks = training_views(method, train_set, views, seed, batch_size, workers, first=seen is None)
        for pixels in looks:
            images = method.frozen(pixels)
            more_BC = answering.middle(images)
            trajectories.append(answering.image_trajectory(method.encode_image_steps(images), more_BC).cpu())
            bar(len(pixels))
    return choose(torch.cat(trajectories, 1), agreement)


def training_views(
    method: Method, images: ImageSet, views: int, seed: int, batch_size: int, workers: int = 0, *, first: bool = True
) -> Iterator[Tensor]:
    """Batches of pixels: every image in the test view, unless it is known already, then in each of the random ones."""
    backbone = method.backbone
    whole = images if first else images.select([])
    for pixels, _ in fixed_views(whole, backbone.preprocess, batch_size, backbone.device, workers):
        yield pixels
    batches = [list(range(i, min(i + batch_size, len(images)))) for i in range(0, len(images), batch_size)]
    order = [(-1 - view, batch) for view in range(views) for batch in batches]  # epochs of their own: training has 0, …
    loaded = random_views(images, backbone.preprocess, CROP, order, backbone.device, seed=seed, workers=workers)
    for pixels, _ in loaded:
        yield pixels


def choose(logits_KVC: Tensor, agreement: float = AGREEMENT) -> Thresholds:
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
    return Thresholds(chosen=chosen, frontier=tuple(frontier), views=logits_KVC.shape[1])


def _grid(settled_KV: Tensor) -> Iterator[Policy]:
    """Policies at quantiles of what they look at, from one that never thinks to one that never stops."""
    for first in (0.0, *_quantiles(settled_KV[0]), NEVER):
        for lead in (*_quantiles(settled_KV[1:]), NEVER):
            yield Policy(first, lead)


def _quantiles(values: Tensor) -> list[float]:
    shares = torch.linspace(0, 1, QUANTILES, dtype=torch.double, device=values.device)
    return [round(value, 3) for value in torch.quantile(values.double().flatten(), shares).tolist()]
