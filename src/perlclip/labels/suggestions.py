"""`suggest`: which images to label next.

One after the other, the image i is taken for which this is largest:

    u_i r_i  Σ_j u_j cov(i, j)² / (cov(i, i) + lambda)

cov is what ridge regression on frozen features cannot know from the images that are labelled or taken before; so the
sum is what a label of i would tell about all others, above all about those that need it. It is small for what is like a
labelled image, and for what is like no other. u = 1 - probability of the most probable class: how likely the answer is
to be wrong. r is the mean of 1 / (1 + labels of the class) over the classes that the image may be of; one that is taken
counts for what it is taken for. So the first few are spread over pool and classes, what follows is uncertain and rare,
and near-duplicates are not taken twice. Nothing is drawn at random: the same images give the same suggestions.

Shapes: N images, M labelled ones, C classes, E embedding width, L strengths.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.adapters.folder import Adapter
from perlclip.data.images import ImageSource, Unreadable, content_hash, file_size, image_name
from perlclip.data.sets import ImageSet, for_classes
from perlclip.errors import PerlclipError
from perlclip.heads.regression import Ridge
from perlclip.labels.looking import Looks, look
from perlclip.methods.base import Method
from perlclip.text.templates import DEFAULT_TEMPLATE
from perlclip.training.choose_head import FIXED, Choice, Said, choose

NOISE = 0.3  # lambda of the variance, for unit vectors
UNSURE = 0.25  # share of CLIP's own scale, at which it is sure of much that is wrong
COLUMNS: dict[str, type] = {
    "rank": int, "image": str, "answer": str, "probability": float, "margin": float, "new": float,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """An image worth a label: what it is taken for so far, by what margin, and how new it is (1: like no other)."""

    rank: int
    image: ImageSource = field(repr=False)
    answer: str
    probability: float
    margin: float
    new: float

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        return {name: image_name(self.image) if name == "image" else getattr(self, name) for name in COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """What to label next, best first, of so many `images`; `known` have a label already, `skipped` cannot be read."""

    chosen: tuple[Suggestion, ...]
    images: int
    known: int = 0
    skipped: tuple[Unreadable, ...] = ()


def suggest(
    trained: Method | Adapter,
    images: Sequence[ImageSource],
    *,
    count: int = 20,
    class_names: Sequence[str] | None = None,
    template: str | None = None,
    labelled: ImageSet | None = None,
    batch_size: int = 64,
    workers: int = 0,
    on_error: str = "stop",
    progress: bool = True,
) -> Suggestions:
    """The `count` of the images that are most worth a label, each looked at once.

    `trained` is what `fit` or `load_adapter` gave, or a method with `class_names`, `zero-shot` if there is nothing yet.
    `labelled` are the images that have a label: they are not suggested again, nor is what is like them, and where
    nothing is trained, answers are learned from them (ridge regression, mixed with the texts).
    """
    if count < 1:
        raise PerlclipError(f"count must be at least 1, got {count}")
    if isinstance(trained, Adapter):
        class_names = trained.class_names if class_names is None else class_names
        template = trained.template if template is None else template
    if class_names is None:
        raise PerlclipError("a method alone needs class_names; what fit returned has them")
    pool = ImageSet(
        images=list(images), labels=[0] * len(images), class_names=tuple(class_names),
        template=DEFAULT_TEMPLATE if template is None else template,
    )  # fmt: skip
    how: dict[str, Any] = dict(batch_size=batch_size, workers=workers, progress=progress)
    known: Looks | None = None
    left = list(range(len(pool)))
    labels_M = torch.zeros(0, dtype=torch.long)
    if labelled is not None and len(labelled):
        labelled = for_classes(labelled, pool.class_names)
        left = _not_among(labelled.images, pool.images)
        known = look(trained, labelled, **how)
        labels_M = torch.as_tensor([int(label) for label in labelled.labels])
    if not left:
        raise PerlclipError("all of the images have a label already")
    seen = look(trained, pool.select(left), on_error=on_error, head=True, **how)
    adapted = isinstance(trained, Adapter)
    logits_NC = seen.texts_NC if adapted else answers(seen, known, labels_M)
    p_NC = logits_NC.double().softmax(-1)
    before_ME = known.frozen_NE if known else seen.frozen_NE[:0]
    taken = most_worth(seen.frozen_NE, p_NC, count, before_ME, labels_M)
    top_N2 = p_NC.topk(min(2, p_NC.shape[1])).values
    chosen = [
        Suggestion(
            rank=rank, image=pool.images[left[seen.places[i]]], answer=pool.class_names[int(p_NC[i].argmax())],
            probability=float(top_N2[i, 0]), margin=float(top_N2[i, 0] - top_N2[i, 1:].sum()), new=new,
        )
        for rank, (i, new) in enumerate(taken, start=1)
    ]  # fmt: skip
    return Suggestions(chosen=tuple(chosen), images=len(seen), known=len(pool) - len(left), skipped=seen.lost)


def _not_among(known: Sequence[ImageSource], images: Sequence[ImageSource]) -> list[int]:
    """Places of images that are not known; only files of the same size are read for it."""
    sizes, contents = {file_size(image) for image in known}, {content_hash(image) for image in known}
    found = []
    for i, image in enumerate(images):
        with suppress(PerlclipError):  # what cannot be read is for `look` to say
            if file_size(image) in sizes and content_hash(image) in contents:
                continue
        found.append(i)
    return found


def answers(seen: Looks, known: Looks | None, labels_M: Tensor) -> Tensor:
    """Logits of images from the class texts and, where some are labelled, ridge regression on those, (N, C)."""
    if known is None:
        return UNSURE * seen.texts_NC
    ridge, choice = learned(known.features_NF, known.texts_NC, labels_M)
    weight_CE, bias_C = ridge.solution(choice.strength)
    scores_NC = (seen.features_NF.double() @ weight_CE.T + bias_C).float()
    return choice.text * seen.texts_NC + choice.scale * scores_NC


def learned(features_MF: Tensor, texts_MC: Tensor, labels_M: Tensor) -> tuple[Ridge, Choice]:
    """Ridge regression of labelled images, and how it is mixed with the texts: `choose_head` for frozen features."""
    ridge = Ridge.of(features_MF, labels_M, texts_MC.shape[1])
    if torch.bincount(labels_M).max() == 1:
        return ridge, FIXED[Ridge]
    scores_LMC = ridge.left_out(Ridge.STRENGTHS, torch.arange(len(labels_M)))
    held = Said(labels_N=labels_M, zero_NC=texts_MC, adapted_NC=texts_MC, scores_LNC=scores_LMC)
    return ridge, choose(held, (1.0,), "each left out")


def most_worth(
    frozen_NE: Tensor, p_NC: Tensor, count: int, before_ME: Tensor, labels_M: Tensor
) -> list[tuple[int, float]]:
    """Images to label, best first, each with the share of its variance that was left when it was taken.

    With labelled images X, cov(x, y) = xᵀ P y, P = lambda (XᵀX + lambda)⁻¹; one more of them changes P by rank one, and
    so what was computed with P: each image taken costs N E operations.
    """
    center_E = F.normalize(frozen_NE, dim=-1).double().mean(0)
    x_NE, before_ME = (F.normalize(v, dim=-1).double() - center_E for v in (frozen_NE, before_ME))
    ridge_EE = before_ME.T @ before_ME + NOISE * torch.eye(x_NE.shape[1], dtype=torch.float64)
    p_EE = NOISE * torch.linalg.inv(ridge_EE)
    p_NC = p_NC.double()
    unsure_N = 1 - p_NC.amax(-1)
    labels_C = torch.bincount(labels_M, minlength=p_NC.shape[1]).double()
    needed_EE = x_NE.T @ (unsure_N[:, None] * x_NE)
    free_N, found = torch.ones(len(x_NE), dtype=torch.bool), []
    turned_NE = x_NE @ p_EE
    variance_N, told_N = (turned_NE * x_NE).sum(-1), (turned_NE @ needed_EE * turned_NE).sum(-1)
    for _ in range(min(count, len(x_NE))):
        rare_N = (p_NC / (1 + labels_C)).sum(-1)
        worth_N = unsure_N * rare_N * told_N / (variance_N + NOISE)
        i = int(worth_N.masked_fill(~free_N, -1).argmax())
        found.append((i, float(variance_N[i] / x_NE[i].square().sum().clamp(min=1e-12))))
        free_N[i] = False
        labels_C[int(p_NC[i].argmax())] += 1
        cov_N, gain_E = turned_NE @ x_NE[i], turned_NE[i] / (variance_N[i] + NOISE)
        seen_E = needed_EE @ gain_E
        told_N = told_N - 2 * cov_N * (turned_NE @ seen_E) + cov_N.square() * (gain_E @ seen_E)
        variance_N = variance_N - cov_N.square() / (variance_N[i] + NOISE)
        turned_NE = turned_NE - torch.outer(cov_N, gain_E)
    return found
