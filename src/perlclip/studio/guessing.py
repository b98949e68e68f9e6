"""What is known about all images at one moment, from kept features, class texts and the labels so far: milliseconds.

It is `suggest` and `check` without looking at images again: ridge regression on the labels, mixed with the texts, says
what each image seems to be; the ones most worth a label come first; and each label is asked about without itself.

Shapes: N images, M labelled ones, C classes, E embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perlclip.adapters.folder import Adapter
from perlclip.heads.answering import Answering
from perlclip.heads.head import Head, make_head
from perlclip.labels.suggestions import UNSURE, learned, most_worth
from perlclip.labels.wrong import SUSPECT, doubts
from perlclip.methods.base import ClassState, Method
from perlclip.studio.project import Labels, Project

QUEUE = 16  # images suggested ahead
CANDIDATES = 1500  # that are weighed against each other; of more, a fixed sample
TO_CHECK = 8  # labels, before any of them is doubted


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Of every image the probabilities of the classes, as far as it has been looked at; what to label next."""

    labels: Labels = field(repr=False)
    have_N: Tensor
    p_NC: Tensor  # half precision
    queue: tuple[int, ...] = ()
    queued_at: int = -1  # labels there were when it was made
    accuracy: float | None = None  # in percent, on labels held out
    zero_shot: float | None = None
    held: int = 0
    quick: Adapter | None = None  # of all labels
    measured: Adapter | None = None  # of those that are not held out, whose accuracy this is
    round: int = 1  # of guesses, by which a page sees that they are new

    def top(self, place: int, count: int) -> list[tuple[int, float]]:
        """The most probable classes of an image, by their numbers."""
        if not self.have_N[place] or not self.p_NC.shape[1]:
            return []
        p, c = self.p_NC[place].float().topk(min(count, self.p_NC.shape[1]))
        return [(self.labels.numbers[column], value) for column, value in zip(c.tolist(), p.tolist(), strict=True)]


def head_of(method: Method, labels: Labels, v_ME: Tensor, zero_MC: Tensor, labels_M: Tensor) -> Adapter:
    """The quick adapter: ridge regression of kept features, and how much of the texts is in the answer."""
    ridge, choice = learned(v_ME, zero_MC, labels_M)
    head = make_head(
        labels.names, ridge.solution(choice.strength), strength=choice.strength, text=choice.text, scale=choice.scale,
        features="first",
    )  # fmt: skip
    training = {"images": len(labels_M), "head": choice.record()}
    return Adapter(
        method=method, class_names=labels.names, template=labels.template, head=None if head.idle else head,
        training=training,
    )  # fmt: skip


def guess(
    project: Project, labels: Labels, method: Method, state: ClassState, v_NE: Tensor, zero_NC: Tensor, have_N: Tensor,
    before: Guesses | None, head: Head | None = None,
) -> Guesses:  # fmt: skip
    """All guesses anew; `zero_NC` is what the texts alone say, `head` an adapter's to ask until there are labels."""
    given = labels.given()
    train, held = ([p for p in part if have_N[p]] for part in project.split(labels))
    known = train + held
    quick, measured, accuracy, zero_shot = None, None, None, None
    if known:
        place, labels_M = torch.tensor(known), torch.tensor([given[p] for p in known])
        quick = head_of(method, labels, v_NE[place], zero_NC[place], labels_M)
        head = quick.head
    if train and held:
        place, labels_M = torch.tensor(train), torch.tensor([given[p] for p in train])
        measured = head_of(method, labels, v_NE[place], zero_NC[place], labels_M)
        there, truth = torch.tensor(held), torch.tensor([given[p] for p in held])
        accuracy = _percent(_answers(method, state, measured.head, zero_NC[there], v_NE[there]), truth)
        zero_shot = _percent(zero_NC[there], truth)
    # Texts alone are far too sure of themselves.
    logits_NC = _answers(method, state, head, zero_NC, v_NE) if head else UNSURE * zero_NC
    p_NC = logits_NC.softmax(-1)
    queue, queued_at = _queue(labels, known, v_NE, p_NC, have_N, given, before)
    return Guesses(
        labels=labels, have_N=have_N.clone(), p_NC=p_NC.half(), queue=queue, queued_at=queued_at, accuracy=accuracy,
        zero_shot=zero_shot, held=len(held), quick=quick, measured=measured, round=before.round + 1 if before else 1,
    )  # fmt: skip


def _answers(method: Method, state: ClassState, head: Head | None, zero_NC: Tensor, v_NE: Tensor) -> Tensor:
    device = method.backbone.device
    with torch.no_grad():
        return Answering(method, state, head).finish(zero_NC[None].to(device), v_NE[None].to(device))[-1].cpu()


def _percent(logits_NC: Tensor, labels_N: Tensor) -> float:
    return 100 * (logits_NC.argmax(-1) == labels_N).double().mean().item()


def _queue(
    labels: Labels, known: Sequence[int], v_NE: Tensor, p_NC: Tensor, have_N: Tensor, given: dict[int, int],
    before: Guesses | None,
) -> tuple[tuple[int, ...], int]:  # fmt: skip
    """What to label next: what was left of the queue while it is long and fresh enough, else a new one."""
    left = tuple(p for p in before.queue if p not in labels.of) if before else ()
    fresh = before is not None and before.labels.names == labels.names and len(known) - before.queued_at < QUEUE // 4
    if before and fresh and len(left) >= QUEUE // 2:
        return left, before.queued_at
    free_N = have_N.clone()
    free_N[list(labels.of)] = False
    free = free_N.nonzero()[:, 0]
    if len(free) > CANDIDATES:  # the same ones while they are free
        order = torch.randperm(len(free_N), generator=torch.Generator().manual_seed(1))
        free = order[free_N[order]][:CANDIDATES].sort().values
    if not len(free):
        return (), len(known)
    labels_M = torch.tensor([given[p] for p in known], dtype=torch.long)
    taken = most_worth(v_NE[free], p_NC[free], QUEUE, v_NE[list(known)], labels_M)
    return tuple(int(free[i]) for i, _ in taken), len(known)


def doubtful(guesses: Guesses, v_NE: Tensor, zero_NC: Tensor) -> dict[str, Any]:
    """Labels that are probably wrong, worst first, and classes taken for each other, every label without itself."""
    labels, given = guesses.labels, guesses.labels.given()
    places = [p for p in sorted(given) if guesses.have_N[p]]
    if len(places) < TO_CHECK or len({given[p] for p in places}) < 2:
        return {"labels": len(places), "needed": TO_CHECK, "suspects": [], "confused": [], "right": None}
    place, labels_M = torch.tensor(places), torch.tensor([given[p] for p in places])
    found = doubts(v_NE[place], zero_NC[place], labels_M)
    order = [i for i in found.wrong_N.argsort(descending=True, stable=True).tolist() if found.wrong_N[i] > SUSPECT]
    answers = found.p_NC.argmax(1).tolist()
    pairs: dict[tuple[int, int], list[int]] = {}
    for p, label, answer in zip(places, labels_M.tolist(), answers, strict=True):
        if label != answer:
            pairs.setdefault((label, answer), []).append(p)
    numbers = labels.numbers
    return {
        "labels": len(places),
        "needed": TO_CHECK,
        "right": 100 * (torch.tensor(answers) == labels_M).double().mean().item(),
        "suspects": [
            {
                "place": places[i],
                "label": numbers[int(labels_M[i])],
                "likely": numbers[int(found.likely_N[i])],
                "wrong": round(float(found.wrong_N[i]), 3),
            }
            for i in order[:200]
        ],
        "confused": [
            {"label": numbers[a], "answer": numbers[b], "places": where}
            for (a, b), where in sorted(pairs.items(), key=lambda item: -len(item[1]))[:50]
        ],
    }
