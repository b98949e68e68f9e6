"""What goes on behind the page, in one thread: looking at images, guessing, training, export.

Small things come first and between the steps of large ones: after every label the guesses are made anew (milliseconds),
images are looked at in batches, PERL is trained when a few labels are new, and may be stopped. What it has made is in
the project's folder; started again, it goes on from there.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from perlclip.adapters.folder import Adapter, load_adapter, save_adapter
from perlclip.analysis.cases import Wanted, look_into
from perlclip.analysis.gallery import case_view
from perlclip.backbone import PLAIN, Backbone
from perlclip.data.decoding import readable
from perlclip.data.images import ImageSource, Unreadable, try_image
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError, first_line
from perlclip.inference.evaluation import evaluate
from perlclip.methods.base import ClassState, Method
from perlclip.methods.recipe import Recipe
from perlclip.methods.registry import create_method, default_recipe, find_recipe
from perlclip.progress import heard_by
from perlclip.studio.guessing import Guesses, doubtful, guess
from perlclip.studio.kept import Features, Thumbnails
from perlclip.studio.project import Labels, Project, file_identity
from perlclip.studio.takeaway import write_export
from perlclip.text.classes import Classes
from perlclip.training.gradients import RECORD_AFTER, Gradients
from perlclip.training.loop import FitResult, fit

BATCH = 32  # images looked at between two chances for something else
SHOTS = 32  # of a class that PERL is trained on, at most: the rest is left to the quick head
ENOUGH = 512  # images looked at before anything is trained
READY_ON = ("cuda",)  # devices whose kernels are made, and steps recorded, when first needed
READY_WITH = (7, 6, 5)  # images to try them on: a batch of 4, and a last one of 3, 2 or 1
ROOM = 0.25  # of a card, that must be free where recorded steps are kept for the next training
FRESH = 2.0  # seconds between two rounds of guesses while images are looked at


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is being done, and what went wrong last."""

    task: str = ""  # "look", "train", "export"
    title: str = ""
    done: int = 0
    total: int = 0
    note: str = ""
    error: str = ""


class _StoppedError(Exception):
    """Somebody does not want it any more."""


class Worker:
    """The thread and what it has found; everything that others read is replaced as a whole, never changed."""

    def __init__(
        self, project: Project, backbone: Backbone, *, every: int = 10, out: str | Path | None = None,
        recipe: str | Recipe | None = None, start: Adapter | None = None,
    ) -> None:  # fmt: skip
        self.project, self.backbone, self.every, self.recipe = project, backbone, every, recipe
        root = project.root.resolve()
        self.out = Path(out) if out else root.with_name(f"{root.name}-adapter")
        if self.out.exists() and not self.out.is_dir():
            raise PerlclipError(f"an export cannot be written to {self.out}, which is no folder: give another --out")
        if isinstance(recipe, str):
            find_recipe("perl", recipe, backbone.name)  # said now, not after ten labels
        self.method: Method = create_method("ridge", backbone)
        self.features = Features(project.folder, backbone, project.keys)
        self.thumbnails = Thumbnails(project.folder, project.paths, project.keys)
        self.status = Status()
        self.guesses: Guesses | None = None
        self.checked: dict[str, Any] = {}
        self.unreadable: dict[int, str] = {}
        self.perl: Adapter | None = start if start and start.method.name == "perl" else None
        self._apart: Adapter | None = None  # the last PERL that has not seen what is held out
        self.exported: dict[str, Any] = {}
        # Guesses have embeddings alone, of the images as they are.
        head = start.head.without_middle() if start and start.head and start.method.config.lens == PLAIN else None
        self._first_head = head if head and head.features == "first" and not head.idle else None
        self._state: tuple[Classes, ClassState] | None = None
        self._gradients: Gradients | None = None  # recorded, of the classes trained on last
        self._read: dict[str, ImageSource] = {}  # images of the last training as they were decoded, by their identity
        self._guessed_at = 0.0
        self._trained = max((row["version"] for row in self.history if row["kind"] == "perl"), default=0)
        self._counted = max((row["version"] for row in self.history if row["kind"] == "quick"), default=-1)
        self._asked: dict[str, Any] = {}  # what the page wants: "train", "export"
        self._stop_task = self._ending = False
        self._ready: Classes | None = None  # what a training was tried for nothing with
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perlclip-studio", daemon=True)
        self._looking = threading.Semaphore(1)
        self._decoders = ThreadPoolExecutor(4, "perlclip-studio-decoder")
        # A folder often goes class by class; the first images looked at shall be of all kinds.
        self._order = torch.randperm(len(project), generator=torch.Generator().manual_seed(1))
        if start is None and (project.folder / "perl").is_dir():
            try:
                self.perl = self._apart = load_adapter(project.folder / "perl", backbone=backbone)
            except PerlclipError:  # of another backbone, or damaged: it is made again
                self._trained = 0

    @property
    def history(self) -> list[dict[str, Any]]:
        """Every refit: how many labels there were, and the accuracy on those held out."""
        return self.project.refits.entries

    # ---- from other threads ----

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after what it is at right now, and write what is not written."""
        self._ending = self._stop_task = True
        self._wake.set()
        self._thread.join()
        self._decoders.shutdown()
        self.features.write()

    def wake(self) -> None:
        """Something has changed."""
        self._wake.set()

    def ask(self, what: str, **how: Any) -> None:
        """Have PERL trained now, an export written, or what is under way stopped."""
        if what == "stop":
            self._stop_task = True
        else:
            self._asked[what] = how
        self._wake.set()

    def check_classes(self, names: Sequence[str], template: str) -> None:
        """Refuse what the backbone's texts cannot say."""
        self.backbone.tokenize(Classes.spoken(names, template).plain().prompts())

    def explain(self, place: int) -> dict[str, Any]:
        """How PERL came to its answer about an image: maps and confidence step by step."""
        adapter = self.perl
        if adapter is None:
            raise PerlclipError("evidence maps are PERL's: they are here once it has been trained")
        with self._looking:
            names = list(adapter.class_names)
            state = adapter.method.class_state(Classes.spoken(names, adapter.template))
            wanted = Wanted(image=self.project.paths[place], name=self.project.names[place])
            (case,) = look_into(adapter.method, [wanted], names, state, how="gradient", head=adapter.head)
        return {
            "classes": case.classes, "answers": case.answers, "confidence": case.confidence_KM.tolist(),
            **case_view(case),
        }  # fmt: skip

    # ---- the thread ----

    def _run(self) -> None:
        while not self._ending:
            self._wake.clear()
            try:
                busy = self._guess() or self._look(enough=ENOUGH) or self._export() or self._train()
                busy = busy or self._get_ready() or self._look()
                self._stop_task = self._ending
            except _StoppedError:
                busy, self._stop_task = True, self._ending
                self.status = Status()
            except Exception as error:  # the page must say it, and the next label gets another try
                busy = False
                self.status = Status(error=str(error) if isinstance(error, PerlclipError) else first_line(error))
            if not busy:
                if self.status.task:
                    self.status = Status(error=self.status.error)
                self._wake.wait(60)

    def _class_state(self, labels: Labels) -> ClassState:
        """The texts of the classes, encoded once while they are the same."""
        classes = Classes.spoken(labels.names, labels.template)
        if self._state is None or self._state[0] != classes:
            with torch.no_grad():
                self._state = classes, self.method.class_state(classes)
        return self._state[1]

    def _guess(self) -> bool:
        """Guesses anew, if a label or enough images are new."""
        before, labels = self.guesses, self.project.labels()
        grown = before is None or int(before.have_N.sum()) < int(self.features.have_N.sum())
        new = before is None or before.labels.version != labels.version
        waited = time.monotonic() - self._guessed_at > FRESH or bool(self.features.have_N.all())
        if not labels.names or not (new or (grown and waited)):
            return False
        state, have_N = self._class_state(labels), self.features.have_N.clone()
        v_NE = self.features.v_NE
        with torch.no_grad():
            zero_NC = self.method.similarity(v_NE, self.method.class_embeddings(state).cpu())
        self.guesses = found = guess(
            self.project, labels, self.method, state, v_NE, zero_NC, have_N, before, self._first_head
        )
        self.checked = doubtful(found, v_NE, zero_NC)
        self._guessed_at = time.monotonic()
        if found.quick and labels.version > self._counted:
            self._counted = labels.version
            save_adapter(found.quick, self.project.folder / "quick")
            self._record("quick", labels, found.accuracy, found.zero_shot, found.held)
        return True

    def _record(
        self, kind: str, labels: Labels, accuracy: float | None, zero: float | None, held: int, **more: Any
    ) -> None:
        row = {"kind": kind, "version": labels.version, "labels": len(labels.given()), "held": held}
        self.project.refits.append(row | {"accuracy": accuracy, "zero_shot": zero, "at": time.time(), **more})

    def _look(self, enough: int = 0) -> bool:
        """One batch of images that the backbone has not seen; none once there are enough for a start."""
        left_N = ~self.features.have_N
        left_N[list(self.unreadable)] = False
        left = int(left_N.sum())
        if not left:
            self.features.write()
        if not left or (enough and len(self.project) - left >= enough):
            return False
        # What was labelled before comes first: the features of another backbone are not there yet.
        labelled_N = torch.zeros_like(left_N)
        labelled_N[list(self.project.labels().of)] = True
        first_N = left_N & labelled_N
        batch = self._order[(first_N if first_N.any() else left_N)[self._order]][:BATCH].tolist()
        views = list(self._decoders.map(self._view, batch))
        seen = [(p, view) for p, view in zip(batch, views, strict=True) if isinstance(view, Tensor)]
        lost = {p: view.reason for p, view in zip(batch, views, strict=True) if isinstance(view, Unreadable)}
        self.unreadable = {**self.unreadable, **lost}
        if seen:
            with torch.inference_mode():
                pixels = torch.stack([view for _, view in seen]).to(self.backbone.device)
                v_BE = self.backbone.encode_image(pixels).float().cpu().clone()
            if not torch.isfinite(v_BE).all():
                raise PerlclipError("what the backbone says of the images is no number; try --dtype float32")
            self.features.add([p for p, _ in seen], v_BE)
        done = len(self.project) - left + len(batch)
        self.status = Status(task="look", title="looking at images", done=done, total=len(self.project))
        return True

    def _view(self, place: int) -> Tensor | Unreadable:
        """Pixels for the tower; the thumbnail is made on the way."""
        image = try_image(self.project.paths[place])
        if isinstance(image, Image.Image):
            self.thumbnails.get(place, image)
            return self.backbone.preprocess.test_view(image)
        return image

    def _train(self) -> bool:
        """PERL, if it was asked for or enough labels are new."""
        asked = self._asked.pop("train", None) is not None
        labels = self.project.labels()
        train, held = ([p for p in part if p not in self.unreadable] for part in self.project.split(labels))
        given = labels.given()
        if len({given[p] for p in train}) < 2:
            if asked:
                raise PerlclipError("to train, label at least one image of each of two classes")
            return False
        strokes = self.project.journal.entries[self._trained :]
        new = sum(len(stroke["images"]) for stroke in strokes if stroke["op"] == "label" and stroke["value"] >= 0)
        if not asked and new < self.every:
            return False
        self._trained = labels.version  # also if it fails or is stopped: the next labels ask again
        started = time.monotonic()
        self.status = Status(task="train", title="training PERL")
        with heard_by(self._heard):
            shots = self._shots(labels, train)
            read = time.monotonic()
            fitted = self._fit(shots, rehearse=False, thresholds=False)
            made, accuracy, metrics = time.monotonic(), None, {}
            if held:
                images = self.project.image_set(labels, held)
                found = evaluate(fitted, images, state=fitted.state, batch_size=BATCH, compile="off", on_error="skip")
                accuracy, metrics = found.accuracy, {"held-out": found.metrics()}
        self.perl = self._apart = fitted = replace(fitted, metrics=metrics)
        tested = time.monotonic()
        save_adapter(fitted, self.project.folder / "perl")
        ended = time.monotonic()
        parts = {
            "seconds": ended - started, "reading_seconds": read - started, "steps_seconds": fitted.seconds,
            "recording_seconds": fitted.compile_seconds, "head_seconds": fitted.head_seconds,
            "testing_seconds": tested - made, "saving_seconds": ended - tested,
        }  # fmt: skip
        zero = self.guesses.zero_shot if self.guesses else None
        took = {name: round(value, 2) for name, value in parts.items()}
        self._record("perl", labels, accuracy, zero, len(held), **took)
        self.status = Status()
        return True

    def _get_ready(self) -> bool:
        """Trainings for nothing, before there are labels: a card's first one waits seconds for its kernels."""
        labels, seen = self.project.labels(), self.features.have_N.nonzero()[:BATCH, 0].tolist()
        classes = Classes.spoken(labels.names, labels.template)
        if self.backbone.device.type not in READY_ON or self._ready == classes:
            return False
        if len(labels.names) < 2 or len(seen) < max(READY_WITH):
            return False
        self._ready = classes
        self.status = Status(task="train", title="getting ready to train")
        images = ImageSet(
            images=[self.project.paths[p] for p in seen], labels=[i % 2 for i in range(len(seen))],
            class_names=labels.names, template=labels.template,
        )  # fmt: skip
        with heard_by(self._heard):
            images, _ = readable(images, on_error="skip")
            for count in READY_WITH * self._until_recorded():
                fitted = self._fit(images.select(range(min(count, len(images)))), rehearse=False, thresholds=False)
            evaluate(fitted, images, state=fitted.state, batch_size=BATCH, compile="off")
        self.status = Status()
        return True

    def _until_recorded(self) -> int:
        """Trainings after which a size of batch has come often enough to be recorded."""
        return -(-RECORD_AFTER // self._recipe[1].epochs)

    @property
    def _recipe(self) -> tuple[str, Recipe]:
        """Its name, and itself as for many images: by more epochs for few somebody would wait four times as long."""
        if isinstance(self.recipe, Recipe):
            return "own", self.recipe
        name = self.recipe or default_recipe("perl")
        return name, find_recipe("perl", name, self.backbone.name)[0]

    def _shots(self, labels: Labels, places: Sequence[int]) -> ImageSet:
        """Labelled images to train on, decoded; those of the last training whose files are the same are not read again.

        What cannot be read any more is left out from now on.
        """
        places = [p for p in places if p not in self.unreadable]
        images = self.project.image_set(labels, places)
        if max(map(len, images.by_class().values()), default=0) > SHOTS:
            chosen = sorted(images.sample(SHOTS, Random(1)))
            places, images = [places[i] for i in chosen], images.select(chosen)
        keys = [file_identity(self.project.paths[p], self.project.names[p]) for p in places]
        known = [self._read.get(key, path) for key, path in zip(keys, images.images, strict=True)]
        found, lost = readable(replace(images, images=known), on_error="skip")
        reasons = {each.image: each.reason for each in lost}
        gone = {p: reasons[name] for p in places if (name := str(self.project.paths[p])) in reasons}
        self.unreadable = {**self.unreadable, **gone}
        there = (key for p, key in zip(places, keys, strict=True) if p not in gone)
        self._read = dict(zip(there, found.images, strict=True))
        return found

    def _new(self) -> Method:
        if isinstance(self.recipe, Recipe):
            return create_method("perl", self.backbone)
        return create_method("perl", self.backbone, recipe=self._recipe[0])

    def _fit(self, some: ImageSet, **how: Any) -> FitResult:
        """PERL from its beginning. One method is trained again and again, as its recorded steps go with its tensors."""
        made, kept = self._new(), self._gradients
        if kept is None or kept.classes != some.classes:
            kept = self._gradients = Gradients(self._new(), some.classes)
        _copy_parameters(made, kept.method)
        name, recipe = self._recipe
        fitted = fit(kept.method, some, recipe=recipe, gradients=kept, **how)
        _copy_parameters(kept.method, made)
        made.config = kept.method.config
        if self.backbone.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.backbone.device)
            self._gradients = kept if free > ROOM * total else None
        return replace(fitted, method=made.eval(), training={**fitted.training, "recipe_name": name})

    def _export(self) -> bool:
        """Adapter, labels and report into the folder for them; trained on all labels, if so asked."""
        how = self._asked.pop("export", None)
        if how is None:
            return False
        self.status = Status(task="export", title="exporting")
        labels = self.project.labels()
        train, held = self.project.split(labels)
        if not train and not held:
            raise PerlclipError("there is nothing to export yet: label some images first")

        def of_these(adapter: Adapter | None) -> Adapter | None:
            return adapter if adapter and adapter.class_names == labels.names else None

        adapter, apart = self.perl, of_these(self._apart)
        if how.get("all"):
            self.status = Status(task="train", title="training on all labels")
            with heard_by(self._heard):
                fitted = self._fit(self._shots(labels, train + held))
            adapter = replace(fitted, metrics=apart.metrics if apart else {})
        elif how.get("kind") == "quick" or adapter is None:
            adapter = self.guesses.quick if self.guesses else None
        if adapter is None:
            raise PerlclipError("there is no adapter yet: wait until the labelled images have been looked at")
        perl = adapter.method.name == "perl"
        if not of_these(adapter):
            again = "PERL was trained for other classes: train it once more first"
            raise PerlclipError(again if perl else "guesses are still being made for other classes: export once more")
        tested = apart if perl and apart else of_these(self.guesses.measured if self.guesses else None)
        self.status = Status(task="export", title="exporting")
        with heard_by(self._heard):
            written = write_export(self.project, labels, adapter, tested, held, self.out)
        self.exported = {"folder": str(self.out), "files": written, "at": time.time(), "method": adapter.method.name}
        self.status = Status()
        return True

    def _heard(self, title: str, done: int, total: int, note: str) -> None:
        """Between two steps of something long."""
        if self._stop_task:
            raise _StoppedError
        self.status = replace(self.status, title=self.status.title or title, done=done, total=total, note=note)
        before = self.status
        self._guess()
        self.status = before

    def as_json(self) -> dict[str, Any]:
        """The status, for the page."""
        return asdict(self.status)


@torch.no_grad()
def _copy_parameters(source: Method, target: Method) -> None:
    """And the center of images, where there is one."""
    for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
        ours.copy_(theirs)
    if source.center_E is not None and target.center_E is not None:
        target.center_E.copy_(source.center_E)
    target.changed()
