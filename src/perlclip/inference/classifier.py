"""`Classifier`: images in, labels out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import count, islice
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.adapters.folder import MESSAGE, Adapter, load_adapter
from perlclip.backbone import Backbone, Images
from perlclip.backbone.accel.cuda_graphs import SMALL, Compiled, graph_size
from perlclip.data.decoding import check_on_error
from perlclip.data.images import Unreadable, as_source, is_image, read_image, try_image
from perlclip.data.loading import Lost, fixed_views
from perlclip.data.sets import ImageSet, ImageSource
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.methods.base import ClassState, Method
from perlclip.methods.perl import Perl
from perlclip.progress import progress_bar
from perlclip.text.classes import Classes, are_novel, check_class_names, class_keys
from perlclip.text.templates import DEFAULT_TEMPLATE, check_template
from perlclip.thinking.limits import Budget, Deadline, Limit, Pace, check_limits
from perlclip.thinking.policy import Plan, Steps, make_plan, refined_share
from perlclip.thinking.thresholds import Thresholds
from perlclip.trust.conformal import KIND
from perlclip.trust.presence import Sigmoid
from perlclip.trust.record import NONE, OTHER_CLASSES, Trust, require_trust
from perlclip.trust.rejection import RATE, FarWords, class_means, text_score

SHOWN = 20  # class names in a notebook's view
AHEAD = 2  # batches that the device has while answers to another one are waited for: a pause of ours does not stop it


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


class _Options(TypedDict, total=False):
    """Of `predict`."""

    top_k: int
    batch_size: int
    workers: int
    steps: Steps
    max_mean_steps: float | None
    max_ms: float | None
    reject: bool
    reject_rate: float
    coverage: float | None
    sets: str
    multi_label: bool


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


class Classifier:
    """A method with a list of class names, ready to label images.

    From what `fit` or `load_adapter` gave it takes class names, template and thresholds; a method alone needs class
    names. The vocabulary is open: names that were not trained on make the classes `novel`, which some methods answer
    differently. `thresholds` are those of adaptive thinking; `head=False` leaves out the adapter's head; `trust` is
    what `calibrate` found for these classes, or else the adapter's. `compile="auto"` replays small batches as CUDA
    graphs where there is CUDA, recorded when a size comes the second time; `compile_seconds` says what that has cost.
    Threads may share a classifier, and classifiers a backbone; other processes get it as a pickle of what it was made
    of.
    """

    def __init__(
        self,
        trained: Adapter | Method,
        class_names: Sequence[str] | None = None,
        template: str | None = None,
        *,
        novel: bool | None = None,
        thresholds: Thresholds | None = None,
        head: bool = True,
        trust: Trust | None = None,
        compile: str = "auto",
    ) -> None:
        if isinstance(trained, Adapter):
            method, thresholds = trained.method, thresholds or trained.thresholds
            class_names = trained.class_names if class_names is None else class_names
            template = trained.template if template is None else template
        else:
            method, template = trained, DEFAULT_TEMPLATE if template is None else template
        if class_names is None:
            raise PerlclipError("a classifier of a method needs class names; what fit returned has them")
        class_names = check_class_names(class_names, unique=False)  # in ImageNet's list two names come twice
        check_template(template)
        if novel is None:
            novel = isinstance(trained, Adapter) and are_novel(class_names, trained.class_names)
        self.method = method.eval()
        self.class_names = class_names
        self.template = template
        self.thresholds = thresholds
        self._made_of = partial(type(self), novel=novel, thresholds=thresholds, head=head, compile=compile), trained
        known = trained.class_names if isinstance(trained, Adapter) else ()
        self._own_trust, self._with_head = trust, head
        self.trust = trust or (trained.trust if isinstance(trained, Adapter) else None)
        self._all_trained = not are_novel(class_names, known)
        place = {key: i for i, key in enumerate(class_keys(known))}
        found = [place.get(key) for key in class_keys(class_names)]
        self._places = [i for i in found if i is not None] if None not in found else None  # among those trained on
        self._trained = [place is not None for place in found]
        if trust:
            self._places, self._trained = list(range(len(class_names))), [True] * len(class_names)
        self._far: FarWords | None = None
        self._known = len(known)
        self._pace = Pace()
        self._budgets: dict[float, Budget] = {}
        self._state = method.class_state(Classes.spoken(class_names, template), novel=novel)
        kept = trained.head if head and isinstance(trained, Adapter) else None
        self.answering = answering = Answering(method, self._state, kept)
        self._compiled = Compiled(lambda pixels: [answering.logits(pixels)], method.backbone.device, compile)
        self._compiled_both = Compiled(self._both, method.backbone.device, compile)
        self._stages = answering.stages(compile) if isinstance(method, Perl) else None
        self._encoded: Tensor | None = None  # what was recorded reads these class embeddings
        self._lock = Lock()  # a graph's input and output are one place for all threads

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it was made of; the backbone is loaded again by its name, budgets and graphs begin anew."""
        make, trained = self._made_of
        return partial(make, trust=self._own_trust), (trained, self.class_names, self.template)

    def __repr__(self) -> str:
        named, more = ", ".join(self.class_names[:5]), ", …" * (len(self.class_names) > 5)
        where = f"{self.method.name} on {self.method.backbone.name}"
        return f"Classifier({where}, {len(self.class_names)} classes: {named}{more})"

    def _repr_html_(self) -> str:
        """For notebooks: what it is, and its classes."""
        rows = "".join(
            f"<tr><th style='text-align:left'>{what}</th><td style='text-align:left'>{escape(value)}</td></tr>"
            for what, value in self._about()
        )
        return f"<table><caption>Classifier</caption>{rows}</table>"

    def _about(self) -> list[tuple[str, str]]:
        names, thresholds = self.class_names, self.thresholds
        more = f", … and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        rows = [
            ("method", f"{self.method.name} on {self.method.backbone.name}"),
            ("device", f"{self.method.backbone.device}, {self.method.backbone.dtype_name}"),
            (f"{len(names)} classes", ", ".join(names[:SHOWN]) + more),
            ("prompt", self.template),
            ("head", "yes" if self.answering.head else "no"),
        ]
        if self.trust:
            rows.append(("temperature", f"{self.temperature:.2f}, from {self.trust.images} images held out"))
        if self.method.image_steps:
            adaptive = f"{thresholds.chosen.mean_steps:.1f} on its training images" if thresholds else "no thresholds"
            rows.append(("refinement steps", f"{self.method.image_steps}; adaptive: {adaptive}"))
        return rows

    @property
    def compile_seconds(self) -> float:
        """What recording CUDA graphs has cost so far."""
        adaptive = self._stages.seconds if self._stages else 0.0
        return self._compiled.seconds + self._compiled_both.seconds + adaptive

    @property
    def temperature(self) -> float:
        """By what logits are divided before they become probabilities."""
        if self._own_trust:
            return self._own_trust.calibration.temperature
        found = self.trust
        return found.calibration.of(novel=not self._all_trained, head=self._with_head) if found else 1.0

    @torch.no_grad()
    def calibrate(self, images: ImageSet, *, batch_size: int = 64, workers: int = 0, progress: bool = True) -> Trust:
        """From labelled images of these classes, which nothing was trained on: how sure answers may be.

        The classifier goes by it from now on; `save_adapter(…, trust=…)` keeps it with the adapter, if the classes are
        the adapter's.
        """
        if not len(images):
            raise PerlclipError("there are no images to calibrate on")
        if images.class_names != self.class_names:
            raise PerlclipError("the images to calibrate on must have the classifier's classes, in its order")
        head, backbone = self.answering.head, self.method.backbone
        alone = Answering(self.method, self._state, replace(head, scale=0.0)) if head else None
        found: list[tuple[Tensor, ...]] = []
        self._trained = [True] * len(self.class_names)
        with progress_bar("calibrate", len(images), show=progress) as bar:
            for pixels, _ in fixed_views(images, backbone.preprocess, batch_size, backbone.device, workers):
                frozen = self.method.frozen(pixels)
                logits_BC, v_BE = self._both(frozen)
                texts_BC = alone.logits(frozen) if alone else logits_BC
                found.append((logits_BC, texts_BC, v_BE, *self.answering.scores(frozen)))
                bar(len(pixels))
        logits_NC, texts_NC, v_NE, *scores = (torch.cat(parts) for parts in zip(*found, strict=True))
        labels_N = torch.tensor([int(label) for label in images.labels])
        means_CE, near_N = class_means(v_NE, labels_N, len(self.class_names))
        if self.trust and self._places is not None:  # of the shots, which these images are no part of
            means_CE = self.trust.rejection.means_of(self._places, v_NE)
            near_N = (v_NE.float() @ means_CE.T).amax(-1)
        self._far = far = FarWords.of(backbone, self._state.classes)
        both = scores[0].cpu(), scores[1].cpu()
        trust = Trust.of("own images", logits_NC.cpu(), texts_NC.cpu(), labels_N, v_NE, far, means_CE, near_N, both)
        self.trust = self._own_trust = trust
        self._places = list(range(len(self.class_names)))
        return trust

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        class_names: Sequence[str] | None = None,
        template: str | None = None,
        backbone: Backbone | str | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "float32",
        head: bool = True,
        compile: str = "auto",
        revision: str | None = None,
    ) -> "Classifier":
        """From an adapter folder, or else a repository of the hub, `user/repo`, at some `revision` of it.

        Other `class_names` (and `template`) may be given: the vocabulary is open.
        """
        if class_names is not None:
            class_names = check_class_names(class_names)
        adapter = load_adapter(folder, backbone=backbone, device=device, dtype=dtype, revision=revision)
        return cls(adapter, class_names, template, head=head, compile=compile)

    def push_to_hub(
        self, repo: str, *, private: bool = False, message: str = MESSAGE, dataset: str | None = None
    ) -> str:
        """Put its adapter on the Hugging Face hub, as `push_adapter`, with what `calibrate` found for its classes."""
        _, trained = self._made_of
        if isinstance(trained, Method):
            trained = Adapter(method=trained, class_names=self.class_names, template=self.template)
        if self._own_trust and trained.class_names == self.class_names:
            trained = replace(trained, trust=self._own_trust)
        return trained.push_to_hub(repo, private=private, message=message, dataset=dataset)

    @overload
    def predict(  # type: ignore[overload-overlap]  # a str is one image, not many
        self, images: ImageSource, *, on_error: Literal["stop"] = "stop", **options: Unpack[_Options]
    ) -> Prediction: ...
    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: Iterable[ImageSource], *, on_error: Literal["stop"] = "stop", **options: Unpack[_Options]
    ) -> list[Prediction]: ...
    @overload
    def predict(  # type: ignore[overload-overlap]
        self, images: ImageSource, *, on_error: str, **options: Unpack[_Options]
    ) -> Prediction | Unreadable: ...
    @overload
    def predict(
        self, images: Iterable[ImageSource], *, on_error: str, **options: Unpack[_Options]
    ) -> list[Prediction | Unreadable]: ...
    def predict(
        self, images: ImageSource | Iterable[ImageSource], *, top_k: int = 1, batch_size: int = 32, workers: int = 0,
        steps: Steps = None, max_mean_steps: float | None = None, max_ms: float | None = None,
        reject: bool = False, reject_rate: float = RATE, coverage: float | None = None, sets: str = KIND,
        multi_label: bool = False, on_error: str = "stop",
    ) -> Prediction | Unreadable | Sequence[Prediction | Unreadable]:  # fmt: skip
        """Label one image, or several: paths, files' bytes, open files, PIL images or uint8 arrays; `workers` decode.

        PERL takes all K refinement steps, or `steps` of them, or with `steps="adaptive"` as many as each image needs.
        `max_mean_steps` bounds their mean over all images that this classifier answers so; after `max_ms` milliseconds
        a batch, decoding included, is given the answers it has, once its base pass is made. Both imply "adaptive".

        With `reject=True` each answer says whether the image is none of the classes; those of a class are `rejected` at
        the rate given. With a `coverage` it has the set of `labels` that holds the true one so often: `sets` are "lac",
        the smallest, or "raps". Both go by images that were held out, and are refused without enough of them.

        With `multi_label=True` an image may have several labels, or none: probabilities are each class's own, whatever
        the others are, and `labels` are the classes above a threshold, which images held out have set.

        An image that cannot be read is an error, or with `on_error="skip"` an `Unreadable` in the place of its answer.
        """
        one = is_image(images)
        options = _Options(
            top_k=top_k, batch_size=batch_size, workers=workers, steps=steps, max_mean_steps=max_mean_steps,
            max_ms=max_ms, reject=reject, reject_rate=reject_rate, coverage=coverage, sets=sets,
            multi_label=multi_label,
        )  # fmt: skip
        several: Any = [images] if one else images
        found = self.predict_iter(several, on_error=on_error, **options)
        return next(found) if one else list(found)

    @overload
    def predict_iter(
        self, images: Iterable[ImageSource], *, on_error: Literal["stop"] = "stop", **options: Unpack[_Options]
    ) -> Iterator[Prediction]: ...
    @overload
    def predict_iter(
        self, images: Iterable[ImageSource], *, on_error: str, **options: Unpack[_Options]
    ) -> Iterator[Prediction | Unreadable]: ...
    def predict_iter(
        self, images: Iterable[ImageSource], *, top_k: int = 1, batch_size: int = 32, workers: int = 0,
        steps: Steps = None, max_mean_steps: float | None = None, max_ms: float | None = None,
        reject: bool = False, reject_rate: float = RATE, coverage: float | None = None, sets: str = KIND,
        multi_label: bool = False, on_error: str = "stop",
    ) -> Iterator[Prediction | Unreadable]:  # fmt: skip
        """The same, one after the other, holding one batch in memory, or with `workers` a few."""
        if batch_size < 1:
            raise PerlclipError(f"batch size must be at least 1, got {batch_size}")
        check_on_error(on_error)
        found = self.predict_batches(
            self._batches(images, batch_size, workers, on_error == "skip"), top_k=top_k, steps=steps,
            max_mean_steps=max_mean_steps, max_ms=max_ms, reject=reject, reject_rate=reject_rate, coverage=coverage,
            sets=sets, multi_label=multi_label,
        )  # fmt: skip
        for answers, _ in found:
            yield from answers

    def predict_batches(
        self, batches: Iterable[tuple[Tensor, Lost]], *, top_k: int = 1, steps: Steps = None,
        max_mean_steps: float | None = None, max_ms: float | None = None, reject: bool = False,
        reject_rate: float = RATE, coverage: float | None = None, sets: str = KIND, multi_label: bool = False,
        embeddings: bool = False, ahead: bool = False,
    ) -> Iterator[tuple[list[Prediction | Unreadable], Tensor | None]]:  # fmt: skip
        """Answers to batches of pixels, each with the images that are missing in it by their place among all.

        With `embeddings`, also the frozen CLIP's of the pixels, (B, E), on the CPU. With `ahead`, the device is given
        the next two batches before the answers to this one are waited for.
        """
        check_limits(max_mean_steps, max_ms)
        check_several(multi_label, reject, coverage, steps, max_mean_steps, max_ms)
        wanted = self.wanted(
            top_k=top_k, reject=reject, reject_rate=reject_rate, coverage=coverage, sets=sets, multi_label=multi_label,
            embeddings=embeddings,
        )  # fmt: skip
        remaining, waiting = iter(batches), deque[tuple[Callable[[], list[Prediction]], Tensor | None, Lost]]()
        while True:
            plan = self.plan(steps, max_mean_steps, max_ms)  # a deadline's clock starts here
            batch = next(remaining, None)
            if batch is not None:
                pixels, lost = batch
                found = self._begin_batch(pixels, wanted, plan) if len(pixels) else (list[Prediction], None)
                waiting.append((*found, lost))
            while len(waiting) > (AHEAD if ahead and batch is not None else 0):
                finish, v_BE, lost = waiting.popleft()
                some = finish()
                answers = iter(some)
                yield [lost[i] if i in lost else next(answers) for i in range(len(some) + len(lost))], v_BE
            if batch is None:
                return

    def _batches(
        self, images: Iterable[ImageSource], batch_size: int, workers: int, skip: bool
    ) -> Iterator[tuple[Tensor, Lost]]:
        """Batches of pixels, and by their place in the batch the images that are missing in it."""
        preprocess = self.method.backbone.preprocess
        if workers:
            sources = list(map(as_source, images))
            all_lost: Lost = {}
            known = ImageSet(images=sources, labels=[0] * len(sources), class_names=("any",))
            device = self.method.backbone.device
            loaded = fixed_views(known, preprocess, batch_size, device, workers, all_lost if skip else None)
            for start, (pixels, _) in zip(count(0, batch_size), loaded, strict=False):
                yield pixels, {i: all_lost[start + i] for i in range(batch_size) if start + i in all_lost}
            return
        remaining = iter(images)
        while batch := list(islice(remaining, batch_size)):
            read = [try_image(image) if skip else read_image(image) for image in batch]
            views = [preprocess.test_view(image) for image in read if not isinstance(image, Unreadable)]
            lost = {i: image for i, image in enumerate(read) if isinstance(image, Unreadable)}
            yield torch.stack(views) if views else torch.empty(0), lost

    def plan(self, steps: Steps, max_mean_steps: float | None, max_ms: float | None) -> Plan | None:
        """How far a batch may think; None is all the way."""
        unlimited = max_mean_steps is None and max_ms is None
        if unlimited and (steps is None or (steps == self.method.image_steps and type(steps) is int)):
            return None
        limits: list[Limit] = []
        if max_ms is not None and isinstance(self.method, Perl):
            limits.append(Deadline(max_ms, self._pace, refined_share(self.method)))
        if max_mean_steps is not None:
            limits.append(self._budgets.setdefault(max_mean_steps, Budget(max_mean_steps)))
        policy = self.thresholds.within(max_mean_steps) if self.thresholds else None
        return make_plan(self.method, steps, policy, limits)

    def _threshold(self, rate: float) -> float:
        """What an image must score not to be rejected; makes what the score needs."""
        rejection = require_trust(self.trust, "rejecting").rejection
        threshold = rejection.threshold(rate, alone=self._places is None)
        if rejection.first == "words" and self._far is None:
            self._far = FarWords.of(self.method.backbone, self._state.classes)
            if self._far is None:
                raise PerlclipError("so many words name a class of this list that too few are left to reject by")
        return threshold

    def _checked(self, coverage: float | None, sets: str) -> float | None:
        if coverage is not None:
            require_trust(self.trust, "coverage").sets.bound(sets, coverage)
            whole = self._own_trust or (self._all_trained and len(self.class_names) == self._known)
            if not whole:
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

    @torch.no_grad()
    def _predict_several(self, pixels: Tensor, wanted: AnswerForm) -> list[Prediction]:
        return self.several(*self.answering.scores(pixels.to(self.method.backbone.device, non_blocking=True)), wanted)

    def several(self, both_BC: Tensor, texts_BC: Tensor, wanted: AnswerForm) -> list[Prediction]:
        """Answers with several labels, from the scores that `Answering` gives."""
        assert wanted.sigmoids is not None
        whole, texts = wanted.sigmoids
        p_BC, threshold_C = texts.probabilities(texts_BC), torch.full_like(texts_BC[0], texts.threshold)
        if whole and self._with_head:
            trained_C = torch.tensor(self._trained, device=both_BC.device)
            p_BC = torch.where(trained_C, whole.probabilities(both_BC), p_BC)
            threshold_C[trained_C] = whole.threshold
        if not torch.isfinite(p_BC).all():
            raise PerlclipError("an answer is not a number: the adapter's weights are unusable in the backbone's dtype")
        order_BC = p_BC.argsort(dim=-1, descending=True, stable=True).tolist()
        there_BC, p = (p_BC >= threshold_C).tolist(), p_BC.tolist()
        predictions = []
        for b, order in enumerate(order_BC):
            top = tuple((self.class_names[c], p[b][c]) for c in order[: wanted.top_k])
            labels = tuple(self.class_names[c] for c in order if there_BC[b][c])
            taken = self.method.image_steps
            predictions.append(Prediction(label=top[0][0], probability=top[0][1], top=top, steps=taken, labels=labels))
        return predictions

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

    def release_texts(self) -> None:
        """Drop what belongs to the texts of its classes: for whoever keeps the class embeddings, and asks these."""
        self._state = self.answering.state = ClassState(classes=self._state.classes, novel=self._state.novel)

    def answer(self, pixels: Tensor, wanted: AnswerForm, plan: Plan | None) -> list[Prediction]:
        """A batch of views."""
        return self._begin_batch(pixels, wanted, plan)[0]()

    @torch.no_grad()
    def _begin_batch(
        self, pixels: Tensor, wanted: AnswerForm, plan: Plan | None
    ) -> tuple[Callable[[], list[Prediction]], Tensor | None]:
        """Have the device answer: what waits for its answers, and embeddings on the CPU, there when it has waited."""
        device = self.method.backbone.device
        if wanted.sigmoids is not None:
            v_BE = self.method.backbone.encode_image(pixels.to(device)).cpu() if wanted.embeddings else None
            return partial(self._predict_several, pixels, wanted), v_BE
        logits_BC, steps, v_BE = self._answer(pixels.to(device, non_blocking=True), plan, wanted.embedded)
        p_BC = (logits_BC / self.temperature).softmax(-1)
        kept = [*p_BC.topk(wanted.top_k), *([v_BE] if wanted.embeddings and v_BE is not None else [])]
        arrived = None
        if device.type == "cuda":  # so that nothing that is given to the device later is waited for
            kept = [tensor.to("cpu", non_blocking=True) for tensor in kept]
            arrived = torch.cuda.current_stream(device).record_event()
        values_BT, indices_BT, *views = (tensor.cpu() for tensor in kept)
        finish = partial(self._finish_batch, p_BC, values_BT, indices_BT, arrived, steps, v_BE, wanted)
        return finish, views[0] if views else None

    @torch.no_grad()
    def _finish_batch(
        self, p_BC: Tensor, best_BT: Tensor, which_BT: Tensor, arrived: torch.cuda.Event | None,
        steps: Sequence[int | None], v_BE: Tensor | None, wanted: AnswerForm,
    ) -> list[Prediction]:  # fmt: skip
        if arrived is not None:
            arrived.synchronize()
        rejected, labels = self.judge(p_BC, v_BE, wanted)
        rows = zip(best_BT.tolist(), which_BT.tolist(), steps, rejected, labels, strict=True)
        return [self.prediction(*row) for row in rows]

    def prediction(
        self, values: Sequence[float], indices: Sequence[int], steps: int | None, rejected: bool | None = None,
        labels: tuple[str, ...] | None = None,
    ) -> Prediction:  # fmt: skip
        """An answer from the best probabilities and the places of their classes."""
        if not isfinite(values[0]):
            raise PerlclipError("an answer is not a number: the adapter's weights are unusable in the backbone's dtype")
        top = tuple((self.class_names[i], p) for i, p in zip(indices, values, strict=True))
        return Prediction(
            label=top[0][0], probability=top[0][1], top=top, steps=steps, rejected=rejected, labels=labels
        )

    def judge(
        self, p_BC: Tensor, v_BE: Tensor | None, wanted: AnswerForm
    ) -> tuple[Sequence[bool | None], Sequence[tuple[str, ...] | None]]:
        """Whether each image is none of the classes, and its set of labels: as far as they are wanted."""
        nothing: list[None] = [None] * len(p_BC)
        rejected: Sequence[bool | None] = nothing
        if wanted.threshold is not None:
            assert self.trust is not None and v_BE is not None
            texts_B = text_score(p_BC, self._far, v_BE)
            rejected = (self.trust.rejection.score(texts_B, v_BE, self._places) < wanted.threshold).tolist()
        return rejected, self._label_sets(p_BC, wanted) if wanted.coverage is not None else nothing

    def _label_sets(self, p_BC: Tensor, wanted: AnswerForm) -> Sequence[tuple[str, ...] | None]:
        """The names in each image's set, most probable first."""
        assert self.trust is not None and wanted.coverage is not None
        within_BC = self.trust.sets.of_images(p_BC, wanted.sets, wanted.coverage)
        order_BC = p_BC.argsort(dim=-1, descending=True, stable=True)
        rows = zip(order_BC.tolist(), within_BC.tolist(), strict=True)
        return [tuple(self.class_names[c] for c in order if within[c]) for order, within in rows]

    def _both(self, images: Images) -> list[Tensor]:
        """The answer and the frozen CLIP's embedding, which PERL and methods of the text tower have made anyway."""
        images = self.method.frozen(images)
        return [self.answering.logits(images), self.method.backbone.encode_image(images)]

    def _answer(
        self, pixels: Tensor, plan: Plan | None, embedded: bool
    ) -> tuple[Tensor, Sequence[int | None], Tensor | None]:
        encoded = self.method.class_embedding_steps(self._state)
        if self._compiled.on and encoded is not self._encoded:
            with self._lock:
                self._encoded = encoded
                self._compiled.forget()
                self._compiled_both.forget()
                if self._stages:
                    self._stages.forget()
        if plan is None:
            logits_BC, *rest = self._made(pixels, embedded)
            return logits_BC, [self.method.image_steps] * len(pixels), rest[0] if rest else None
        images = self.method.frozen(pixels)
        assert self._stages is not None
        with self._lock if self._compiled.on else nullcontext():
            answer = plan.answer(images, self._stages if self._compiled.on else self.answering.stages())
        v_BE = self.method.backbone.encode_image(images) if embedded else None
        return answer.logits_BC, answer.steps_B.tolist(), v_BE

    def _made(self, pixels: Tensor, embedded: bool) -> list[Tensor]:
        """Logits, and embeddings if they are wanted."""
        count, compiled = len(pixels), self._compiled_both if embedded else self._compiled
        if not compiled.on or count > SMALL:
            return self._both(pixels) if embedded else [self.answering.logits(pixels)]
        padded = F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, graph_size(count) - count))
        with self._lock:
            return [made[:count].clone() for made in compiled(padded)]
