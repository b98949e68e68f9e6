"""`Classifier`: images in, labels out."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from html import escape
from itertools import count, islice
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.adapters.folder import MESSAGE, Adapter, load_adapter
from perlclip.backbone import Backbone, Images
from perlclip.backbone.accel.cuda_graphs import SMALL, Compiled, graph_size, is_on
from perlclip.data.decoding import check_on_error
from perlclip.data.images import Unreadable, as_source, is_image, read_image, try_image
from perlclip.data.loading import Lost, fixed_views
from perlclip.data.sets import ImageSet, ImageSource
from perlclip.errors import PerlclipError
from perlclip.heads.answering import Answering
from perlclip.heads.head import sees_frozen
from perlclip.inference.judging import AnswerForm, Judge, Prediction, check_several
from perlclip.methods.base import ClassState, Method
from perlclip.methods.perl import Perl
from perlclip.progress import progress_bar
from perlclip.text.classes import Classes, are_novel, check_class_names
from perlclip.text.templates import DEFAULT_TEMPLATE, check_template
from perlclip.thinking.limits import Budget, Deadline, Limit, Pace, check_limits
from perlclip.thinking.policy import Plan, Steps, make_plan, refined_share
from perlclip.thinking.thresholds import Thresholds
from perlclip.trust.conformal import KIND
from perlclip.trust.record import Trust
from perlclip.trust.rejection import RATE, FarWords, class_means

SHOWN = 20  # class names in a notebook's view
AHEAD = 2  # batches that the device has while answers to another one are waited for: a pause of ours does not stop it


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
        self._pace = Pace()
        self._budgets: dict[float, Budget] = {}
        self._state = method.class_state(Classes.spoken(class_names, template), novel=novel)
        self._state.replay = is_on(compile, method.backbone.device)
        known, found = (trained.class_names, trained.trust) if isinstance(trained, Adapter) else ((), None)
        self._judge_by = partial(Judge, method, class_names, self._state.classes, known, head=head)
        self.judge = self._judge_by(trust or found, own=trust is not None)
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
    def trust(self) -> Trust | None:
        """What its answers' certainty goes by: found by `calibrate`, or else by `fit` for the adapter."""
        return self.judge.trust

    @property
    def _own_trust(self) -> Trust | None:
        return self.judge.trust if self.judge.own else None

    @property
    def temperature(self) -> float:
        """By what logits are divided before they become probabilities."""
        return self.judge.temperature

    @property
    def compile_seconds(self) -> float:
        """What recording CUDA graphs has cost so far."""
        adaptive = self._stages.seconds if self._stages else 0.0
        return self._compiled.seconds + self._compiled_both.seconds + adaptive

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
        alone = Answering(self.method, self._state, head.texts_alone()) if head else None
        found: list[tuple[Tensor, ...]] = []
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
        if self.trust and self.judge.places is not None:  # of the shots, which these images are no part of
            means_CE = self.trust.rejection.means_of(self.judge.places, v_NE)
            near_N = (v_NE.float() @ means_CE.T).amax(-1)
        far = FarWords.of(backbone, self._state.classes)
        both = scores[0].cpu(), scores[1].cpu()
        trust = Trust.of(
            "own images", logits_NC.cpu(), texts_NC.cpu(), labels_N, v_NE, far, means_CE, near_N, both,
            ruled=head is not None and head.unseen is not None and sees_frozen(self.method, head.features),
        )  # fmt: skip
        self.judge = self._judge_by(trust, own=True, far=far)
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
        wanted = self.judge.wanted(
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

    @torch.no_grad()
    def _predict_several(self, pixels: Tensor, wanted: AnswerForm) -> list[Prediction]:
        return self.judge.several(
            *self.answering.scores(pixels.to(self.method.backbone.device, non_blocking=True)), wanted
        )

    def release_texts(self) -> None:
        """Drop what belongs to the texts of its classes: for whoever keeps the class embeddings, and asks these."""
        self._state = self.answering.state = ClassState(classes=self._state.classes, novel=self._state.novel)
        self._stages = None

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
            images = self.method.frozen(pixels.to(device))
            v_BE = self.method.backbone.encode_image(images).cpu() if wanted.embeddings else None
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
        rejected, labels = self.judge.verdicts(p_BC, v_BE, wanted)
        rows = zip(best_BT.tolist(), which_BT.tolist(), steps, rejected, labels, strict=True)
        return [self.judge.prediction(*row) for row in rows]

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
