"""What a classifier's probabilities say: a label, a set of labels, several labels, or none of the classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite

import torch
from torch import Tensor

from perlclip.errors import PerlclipError
from perlclip.methods.base import Method
from perlclip.text.classes import Classes, are_novel, class_keys
from perlclip.trust.conformal import KIND
from perlclip.trust.presence import Sigmoid
from perlclip.trust.record import NONE, OTHER_CLASSES, Trust, require_trust
from perlclip.trust.rejection import RATE, FarWords, text_score

NOT_A_NUMBER = "an answer is not a number: the adapter's weights are unusable in the backbone's dtype"


@dataclass(frozen=True)
class Prediction:
    """The most probable label, its probability, and the best few of them, best first.

    `steps` are the refinement steps that the image took; None for methods that take none. `rejected` says whether it is
    none of the classes, and `labels` are its set, most probable first, where these were asked for. Where several labels
    were asked for, probabilities are each class's own, and `labels` are the classes that are there, perhaps none.
    """

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]
    steps: int | None = None
    rejected: bool | None = None
    labels: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        top = ", ".join(f"{label} {p:.4f}" for label, p in self.top)
        asked = "" if self.rejected is None else f", rejected={self.rejected}"
        asked += "" if self.labels is None else f", labels={self.labels}"
        return f"Prediction({self.label!r}, {self.probability:.4f}, top=[{top}], steps={self.steps}{asked})"

    def _repr_html_(self) -> str:
        """For notebooks: the labels with bars."""
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(label)}</td><td>{100 * p:.1f} %</td>"
            f"<td><meter value='{p:.4f}' max='1'></meter></td></tr>"
            for label, p in self.top
        )
        said = [] if self.steps is None else [f"{self.steps} refinement steps"]
        said += ["none of these"] if self.rejected else []
        said += [] if self.labels is None else [escape(f"one of: {', '.join(self.labels)}")]
        caption = f"<caption>{'; '.join(said)}</caption>" if said else ""
        return f"<table>{caption}{rows}</table>"


@dataclass(frozen=True)
class AnswerForm:
    """What an answer holds: so many labels, a threshold to reject below, its set's coverage and kind, or several
    labels, each by itself; and whether the image's embedding is wanted with it."""

    top_k: int
    threshold: float | None
    coverage: float | None
    sets: str
    sigmoids: tuple[Sigmoid | None, Sigmoid] | None = None  # of the whole answer, and of the texts'
    embeddings: bool = False

    @property
    def embedded(self) -> bool:
        """Whether the frozen CLIP's embeddings are needed."""
        return self.embeddings or self.threshold is not None


def check_several(multi_label: bool, reject: bool, coverage: float | None, *limits: object) -> None:
    """Refuse what does not go with several labels: `limits` are those of thinking."""
    if multi_label and (reject or coverage is not None or any(limit is not None for limit in limits)):
        raise PerlclipError(
            "multi_label=True answers after all steps, class by class; it does not go with reject, coverage, "
            "steps, max_mean_steps or max_ms"
        )


class Judge:
    """What is made of the probabilities of a list of classes, some or all of which are `known` from training.

    `trust` was found on images of the classes trained on, or with `own` on images of this very list.
    """

    def __init__(
        self, method: Method, class_names: Sequence[str], classes: Classes, known: Sequence[str], trust: Trust | None,
        *, own: bool = False, head: bool = True, far: FarWords | None = None,
    ) -> None:  # fmt: skip
        self.method, self.class_names, self.classes, self.trust = method, class_names, classes, trust
        self.own, self.head, self.far = own, head, far
        place = {key: i for i, key in enumerate(class_keys(known))}
        found = list(range(len(class_names))) if own else [place.get(key) for key in class_keys(class_names)]
        self.places = [i for i in found if i is not None] if None not in found else None  # among those trained on
        self.trained = [i is not None for i in found]
        self.all_trained = not are_novel(class_names, known)
        self.whole = own or (self.all_trained and len(class_names) == len(known))

    @property
    def temperature(self) -> float:
        """By what logits are divided before they become probabilities."""
        if self.trust is None:
            return 1.0
        found = self.trust.calibration
        return found.temperature if self.own else found.of(novel=not self.all_trained, head=self.head)

    def wanted(
        self, *, top_k: int = 1, reject: bool = False, reject_rate: float = RATE, coverage: float | None = None,
        sets: str = KIND, multi_label: bool = False, embeddings: bool = False,
    ) -> AnswerForm:  # fmt: skip
        """What an answer is to hold, checked: can this classifier say it?"""
        if top_k < 1:
            raise PerlclipError(f"top_k must be at least 1, got {top_k}")
        threshold = self._threshold(reject_rate) if reject else None
        sigmoids = self._sigmoids() if multi_label else None
        coverage = self._checked(coverage, sets)
        return AnswerForm(min(top_k, len(self.class_names)), threshold, coverage, sets, sigmoids, embeddings)

    def _threshold(self, rate: float) -> float:
        """What an image must score not to be rejected; makes what the score needs."""
        rejection = require_trust(self.trust, "rejecting").rejection
        threshold = rejection.threshold(rate, alone=self.places is None)
        if rejection.first == "words" and self.far is None:
            self.far = FarWords.of(self.method.backbone, self.classes)
            if self.far is None:
                raise PerlclipError("so many words name a class of this list that too few are left to reject by")
        return threshold

    def _checked(self, coverage: float | None, sets: str) -> float | None:
        if coverage is not None:
            require_trust(self.trust, "coverage").sets.bound(sets, coverage)
            if not self.whole:
                raise PerlclipError(OTHER_CLASSES)
        return coverage

    def _sigmoids(self) -> tuple[Sigmoid | None, Sigmoid]:
        """Of the whole answer, to classes trained on, and of texts: from images held out, or the backbone's own."""
        found, bias = self.trust.presence if self.trust else None, self.method.backbone.logit_bias
        if found is not None:
            return found.answers, found.texts
        if bias is not None:
            return None, Sigmoid(slope=1.0, offset=bias)
        raise PerlclipError(NONE.format(what="multi_label=True"))

    def several(self, both_BC: Tensor, texts_BC: Tensor, wanted: AnswerForm) -> list[Prediction]:
        """Answers with several labels, from the scores that `Answering` gives."""
        assert wanted.sigmoids is not None
        whole, texts = wanted.sigmoids
        p_BC, threshold_C = texts.probabilities(texts_BC), torch.full_like(texts_BC[0], texts.threshold)
        if whole and self.head:
            trained_C = torch.tensor(self.trained, device=both_BC.device)
            p_BC = torch.where(trained_C, whole.probabilities(both_BC), p_BC)
            threshold_C[trained_C] = whole.threshold
        if not torch.isfinite(p_BC).all():
            raise PerlclipError(NOT_A_NUMBER)
        order_BC = p_BC.argsort(dim=-1, descending=True, stable=True).tolist()
        there_BC, p = (p_BC >= threshold_C).tolist(), p_BC.tolist()
        predictions = []
        for b, order in enumerate(order_BC):
            top = tuple((self.class_names[c], p[b][c]) for c in order[: wanted.top_k])
            labels = tuple(self.class_names[c] for c in order if there_BC[b][c])
            taken = self.method.image_steps
            predictions.append(Prediction(label=top[0][0], probability=top[0][1], top=top, steps=taken, labels=labels))
        return predictions

    def prediction(
        self, values: Sequence[float], indices: Sequence[int], steps: int | None, rejected: bool | None = None,
        labels: tuple[str, ...] | None = None,
    ) -> Prediction:  # fmt: skip
        """An answer from the best probabilities and the places of their classes."""
        if not isfinite(values[0]):
            raise PerlclipError(NOT_A_NUMBER)
        top = tuple((self.class_names[i], p) for i, p in zip(indices, values, strict=True))
        return Prediction(
            label=top[0][0], probability=top[0][1], top=top, steps=steps, rejected=rejected, labels=labels
        )

    def verdicts(
        self, p_BC: Tensor, v_BE: Tensor | None, wanted: AnswerForm
    ) -> tuple[Sequence[bool | None], Sequence[tuple[str, ...] | None]]:
        """Whether each image is none of the classes, and its set of labels: as far as they are wanted."""
        nothing: list[None] = [None] * len(p_BC)
        rejected: Sequence[bool | None] = nothing
        if wanted.threshold is not None:
            assert self.trust is not None and v_BE is not None
            texts_B = text_score(p_BC, self.far, v_BE)
            rejected = (self.trust.rejection.score(texts_B, v_BE, self.places) < wanted.threshold).tolist()
        return rejected, self._label_sets(p_BC, wanted) if wanted.coverage is not None else nothing

    def _label_sets(self, p_BC: Tensor, wanted: AnswerForm) -> Sequence[tuple[str, ...] | None]:
        """The names in each image's set, most probable first."""
        assert self.trust is not None and wanted.coverage is not None
        within_BC = self.trust.sets.of_images(p_BC, wanted.sets, wanted.coverage)
        order_BC = p_BC.argsort(dim=-1, descending=True, stable=True)
        rows = zip(order_BC.tolist(), within_BC.tolist(), strict=True)
        return [tuple(self.class_names[c] for c in order if within[c]) for order, within in rows]
