"""`evaluate`: accuracy of a method on labelled images, class by class and, for PERL, step by step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as copy_with
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perlclip.adapters.folder import Adapter
from perlclip.backbone.accel.cuda_graphs import SMALL, Compiled, is_on
from perlclip.data.decoding import check_on_error
from perlclip.data.images import Unreadable, image_name
from perlclip.data.loading import Lost
from perlclip.data.sets import ImageSet, ImageSource
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.inference.cache import EvalCache, SetCache
from perlclip.inference.judging import Judge
from perlclip.inference.row_files import row_file
from perlclip.methods.base import ClassState, Method
from perlclip.progress import progress_bar
from perlclip.text.classes import are_novel
from perlclip.thinking.limits import Budget, check_limits
from perlclip.thinking.policy import Plan, Steps, make_plan
from perlclip.thinking.thresholds import Thresholds
from perlclip.trust.conformal import KINDS, enough
from perlclip.trust.record import Trust
from perlclip.trust.rejection import RATE
from perlclip.trust.reliability import Reliability, reliability

COVERAGE = 0.9  # of the sets that are looked at
ANSWERS: dict[str, type] = {
    "image": str, "label": str, "answer": str, "correct": bool, "probability": float, "label_probability": float,
}  # fmt: skip


@dataclass(frozen=True)
class ClassScore:
    """How a class was answered, in percent; None where no image was answered so, or none is of the class."""

    name: str
    support: int  # images of the class
    answered: int  # images that were given its name
    precision: float | None
    recall: float | None
    f1: float | None


@dataclass(frozen=True)
class Confused:
    """Images of one class that were taken for another: how many, and what share of the class in percent."""

    label: str
    answer: str
    images: int
    share: float


@dataclass(frozen=True)
class Covered:
    """What sets of labels with a `COVERAGE` of 90 % came to: how many hold the label, in percent, and their size."""

    coverage: float
    size: float


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Top-1 accuracy in percent over all images, with what stands behind it.

    If a number of steps was asked for, there is one row of answers, and `steps_B` says what each image took.
    `reliability` says whether probabilities mean what they say, `uncalibrated` the same without the `temperature`, by
    which logits were divided. `images` are those of the set; `places_B` says which of them the tensors are about, all
    but those `skipped`. `without_head` is the same of the texts alone, where a head had its say. `sets` has the
    coverage of both kinds of label sets, for the whole list of classes that they were calibrated on; `rejected_B` says
    which images are taken for none of the classes, if that was asked for.
    """

    accuracy: float
    class_accuracy: dict[str, float]
    step_accuracy: list[float]
    total: int
    predictions_KB: Tensor = field(repr=False)
    probabilities_BC: Tensor = field(repr=False)
    labels_B: Tensor = field(repr=False)
    steps_B: Tensor | None = field(default=None, repr=False)
    class_names: tuple[str, ...] = field(repr=False)
    images: Sequence[ImageSource] = field(repr=False)
    places_B: Tensor = field(repr=False)
    temperature: float = 1.0
    uncalibrated: Reliability | None = field(default=None, repr=False)
    skipped: tuple[Unreadable, ...] = ()
    without_head: "Evaluation | None" = field(default=None, repr=False)
    sets: dict[str, Covered] = field(default_factory=dict, repr=False)
    rejected_B: Tensor | None = field(default=None, repr=False)

    @property
    def rejected(self) -> float | None:
        """The share of images that is taken for none of the classes, in percent."""
        return None if self.rejected_B is None else _percent(self.rejected_B)

    @property
    def mean_steps(self) -> float | None:
        """Refinement steps that an image took."""
        return None if self.steps_B is None else self.steps_B.double().mean().item()

    @cached_property
    def reliability(self) -> Reliability:
        """Calibration error, Brier score and log-loss of the probabilities."""
        return reliability(self.probabilities_BC, self.labels_B)

    @property
    def confusion(self) -> Tensor:
        """How many images of each class (row) were given each class (column): (C, C)."""
        C = len(self.class_names)
        return torch.bincount(self.labels_B * C + self.predictions_KB[-1], minlength=C * C).view(C, C)

    def most_confused(self, n: int = 10) -> list[Confused]:
        """The pairs of classes most often taken one for the other, with most images first."""
        confusion_CC = self.confusion
        support_C = confusion_CC.sum(1)
        wrong_CC = confusion_CC.clone().fill_diagonal_(0)
        pairs = sorted(wrong_CC.nonzero().tolist(), key=lambda pair: -int(wrong_CC[tuple(pair)]))
        names = labelled(self.class_names)
        return [
            Confused(names[i], names[j], count := int(wrong_CC[i, j]), 100 * count / int(support_C[i]))
            for i, j in pairs[:n]
        ]

    def per_class(self) -> list[ClassScore]:
        """Precision, recall and F1 of every class, in the order of the labels."""
        confusion_CC = self.confusion
        counts = (confusion_CC.diagonal(), confusion_CC.sum(1), confusion_CC.sum(0))
        rows = zip(labelled(self.class_names), *(count_C.tolist() for count_C in counts), strict=True)
        return [
            ClassScore(
                name=name,
                support=support,
                answered=answered,
                precision=_share(right, answered),
                recall=_share(right, support),
                f1=_share(2 * right, support + answered),
            )
            for name, right, support, answered in rows
        ]

    def answers(self) -> Iterator[dict[str, Any]]:
        """A row for each image: what it is, its label, what was answered and how probable both were."""
        names, rows = labelled(self.class_names), zip(self.labels_B, self.predictions_KB[-1], strict=True)
        for b, (label, answer) in enumerate((int(label), int(answer)) for label, answer in rows):
            yield {
                "image": self.image_name(b),
                "label": names[label],
                "answer": names[answer],
                "correct": label == answer,
                "probability": float(self.probabilities_BC[b, answer]),
                "label_probability": float(self.probabilities_BC[b, label]),
                **({} if self.steps_B is None else {"steps": int(self.steps_B[b])}),
            }

    def save_predictions(self, path: str | Path) -> Path:
        """Write `answers()` to a CSV, JSON-lines or parquet file, by its ending."""
        steps: dict[str, type] = {} if self.steps_B is None else {"steps": int}
        with row_file(path, ANSWERS | steps) as write:
            for row in self.answers():
                write(row)
        return Path(path)

    def image_name(self, b: int) -> str:
        """The path of the b-th image that was answered, or where it stands in the set."""
        place = int(self.places_B[b])
        image = self.images[place]
        nameless = type(image) is bytes or isinstance(image, Image.Image | np.ndarray)
        return f"image {place}" if nameless else image_name(image)

    def metrics(self) -> dict[str, Any]:
        """The numbers, without the tensors."""
        thought = {} if self.mean_steps is None else {"mean_steps": self.mean_steps}
        return {
            "accuracy": self.accuracy,
            "step_accuracy": self.step_accuracy,
            "class_accuracy": self.class_accuracy,
            "images": self.total,
            **thought,
            "reliability": self.reliability.numbers(),
            **({"uncalibrated": self.uncalibrated.numbers()} if self.uncalibrated else {}),
            **({"sets": {kind: vars(found) for kind, found in self.sets.items()}} if self.sets else {}),
            **({} if self.rejected is None else {"rejected": self.rejected}),
        }


@torch.inference_mode()
def evaluate(
    trained: Method | Adapter,
    test_set: ImageSet,
    *,
    novel: bool | None = None,
    steps: Steps = None,
    max_mean_steps: float | None = None,
    thresholds: Thresholds | None = None,
    head: bool = True,
    reject: bool = False,
    reject_rate: float = RATE,
    batch_size: int = 64,
    workers: int = 0,
    compile: str = "auto",
    state: ClassState | None = None,
    cache: SetCache | None = None,
    on_error: str = "stop",
    progress: bool = True,
) -> Evaluation:
    """Classify every image among the set's own classes; the class texts are encoded once.

    `novel=True` says that these are not the classes trained on, which MMRL and MMRL++ answer differently; an adapter,
    such as `fit` gives, knows it by itself. PERL takes all K steps, or `steps` of them, or with `steps="adaptive"` as
    many as the `thresholds`, or else the adapter's, have each image take; `max_mean_steps` bounds their mean.
    `head=False` leaves out the adapter's head. With `reject=True` it says which images `predict` would reject.

    `compile="auto"` replays small batches as CUDA graphs where there is CUDA. `state` is that of the set's classes, if
    the method has been asked for it already. A `cache` of the set, used again for other methods and seeds, spares what
    their tests have in common and changes no number. With `on_error="skip"` an image that cannot be read is left out
    and listed in `skipped`; the cache is not used then.
    """
    if not len(test_set):
        raise PerlclipError("the test set has no images")
    check_on_error(on_error)
    method = trained
    if isinstance(trained, Adapter):
        method, thresholds = trained.method, thresholds or trained.thresholds
        novel = are_novel(test_set.class_names, trained.class_names) if novel is None else novel
    assert isinstance(method, Method)
    plan = _plan(method, steps, thresholds, max_mean_steps)
    backbone = method.backbone
    lost: Lost | None = {} if on_error == "skip" else None
    cache = cache if cache and lost is None else EvalCache(limit=0).of(test_set.name)
    if state is None:
        state = cache.class_state(method, test_set.classes, novel=bool(novel))
        state.replay = is_on(compile, backbone.device)
    elif state.classes not in (test_set.classes, test_set.classes.plain()):
        raise PerlclipError("the class state is not that of the test set's classes")
    elif novel not in (None, state.novel):
        state = copy_with(state, novel=novel)
    answering = Answering(method, state, trained.head if head and isinstance(trained, Adapter) else None)
    known, trust = (trained.class_names, trained.trust) if isinstance(trained, Adapter) else ((), None)
    new = isinstance(trained, Adapter) and are_novel(test_set.class_names, known)
    judge = Judge(method, test_set.class_names, state.classes, known, trust, head=head) if reject else None
    form = judge.wanted(reject=True, reject_rate=reject_rate) if judge else None
    given = _Collected(trust.calibration.of(novel=new, head=head) if trust else 1.0)
    texts = _Collected(trust.calibration.of(novel=new, head=False) if trust else 1.0)  # from the same look
    look = Compiled(lambda pixels: list(answering.both(pixels)), backbone.device, compile, after=3)
    look.on &= batch_size <= SMALL and cache.cache.limit == 0 and not judge  # a graph cannot take what is kept
    stages = answering.stages(compile if cache.cache.limit == 0 else "off") if plan is not None else None
    with progress_bar("evaluate", len(test_set), show=progress) as bar:
        for images in cache.batches(test_set, method, batch_size, workers, lost):
            if not len(images):
                continue
            if plan is not None and stages is not None:
                answer = plan.answer(images, stages)
                given.add(answer.logits_BC[None], answer.steps_B)
            else:
                logits_KBC, texts_KBC = look(images.pixels) if look.on else answering.both(images)
                given.add(logits_KBC)
                if answering.head:
                    texts.add(texts_KBC)
            if judge and form:
                given.rejected += judge.verdicts(given.probabilities[-1], backbone.encode_image(images), form)[0]
            bar(len(images))
    lost = lost or {}
    if not given.predictions:
        raise PerlclipError(f"none of the {len(test_set)} images can be read, the first because {lost[0].reason}")
    without = texts.evaluation(test_set, lost) if texts.predictions else None
    found = given.evaluation(test_set, lost, without)
    whole = isinstance(trained, Adapter) and not new and len(test_set.class_names) == len(trained.class_names)
    return copy_with(found, sets=_covered(trust, found)) if trust and head and whole else found


def _covered(trust: Trust, found: Evaluation) -> dict[str, Covered]:
    """Of both kinds of sets; nothing where too few images were held out."""
    if not enough(1 - COVERAGE, trust.images):
        return {}
    within = {kind: trust.sets.of_images(found.probabilities_BC, kind, COVERAGE) for kind in KINDS}
    hits = {kind: within_BC.gather(1, found.labels_B[:, None]) for kind, within_BC in within.items()}
    return {kind: Covered(_percent(hits[kind]), within[kind].sum(1).double().mean().item()) for kind in KINDS}


class _Collected:
    """Answers, batch by batch; only at the end is the card waited for."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.predictions: list[Tensor] = []
        self.probabilities: list[Tensor] = []
        self.plain: list[Tensor] = []  # before calibration
        self.taken: list[Tensor] = []
        self.finite: list[Tensor] = []
        self.rejected: list[bool | None] = []

    def add(self, logits_KBC: Tensor, steps_B: Tensor | None = None) -> None:
        self.finite.append(torch.isfinite(logits_KBC).all())
        self.predictions.append(logits_KBC.argmax(-1))
        self.probabilities.append((logits_KBC[-1] / self.temperature).softmax(-1))
        if self.temperature != 1:
            self.plain.append(logits_KBC[-1].softmax(-1))
        if steps_B is not None:
            self.taken.append(steps_B)

    def evaluation(self, test_set: ImageSet, lost: Lost, without_head: Evaluation | None = None) -> Evaluation:
        """Beside the labels."""
        if not torch.stack(self.finite).all():
            raise PerlclipError("the method's answers are not finite numbers; its weights are unusable")
        places = [i for i in range(len(test_set)) if i not in lost]
        labels_B = torch.as_tensor([int(test_set.labels[i]) for i in places])
        predictions_KB = torch.cat(self.predictions, 1).cpu()
        correct_KB = predictions_KB == labels_B
        return Evaluation(
            accuracy=_percent(correct_KB[-1]),
            class_accuracy={
                name: _percent(correct_KB[-1][labels_B == c])
                for c, name in enumerate(labelled(test_set.class_names))
                if (labels_B == c).any()
            },
            step_accuracy=[_percent(correct_B) for correct_B in correct_KB],
            total=len(labels_B),
            predictions_KB=predictions_KB,
            probabilities_BC=torch.cat(self.probabilities).cpu(),
            labels_B=labels_B,
            steps_B=torch.cat(self.taken).cpu() if self.taken else None,
            class_names=test_set.class_names,
            images=test_set.images,
            places_B=torch.as_tensor(places),
            temperature=self.temperature,
            uncalibrated=reliability(torch.cat(self.plain).cpu(), labels_B) if self.plain else None,
            skipped=tuple(lost[i] for i in sorted(lost)),
            without_head=without_head,
            rejected_B=torch.tensor(self.rejected) if self.rejected else None,
        )


def _plan(method: Method, steps: Steps, thresholds: Thresholds | None, max_mean_steps: float | None) -> Plan | None:
    """None is all steps, every one of them looked at."""
    check_limits(max_mean_steps, None)
    if steps is None and max_mean_steps is None:
        return None
    limits = [] if max_mean_steps is None else [Budget(max_mean_steps)]
    return make_plan(method, steps, thresholds.within(max_mean_steps) if thresholds else None, limits)


def labelled(names: Sequence[str]) -> list[str]:
    """Class names that tell the classes apart: one that is there twice has its label beside it."""
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} (label {c})" for c, name in enumerate(names)]


def _share(part: int, whole: int) -> float | None:
    return 100 * part / whole if whole else None


def _percent(correct: Tensor) -> float:
    return 100.0 * correct.double().mean().item()
