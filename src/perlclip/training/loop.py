"""`fit`: one training loop for every method.

The result is a function of (method, training images, recipe, seed, the towers' dtype): views and order come from
counters, not from a running generator, so that worker processes, an interrupt or a resumed run cannot change it. `fit`
is given the training images alone; it has no way to see a test set.

On CUDA nothing in a step waits for the card: forward and backward pass are one recorded graph, the optimiser is fused,
the next batch is copied meanwhile, and losses are read in bunches. A loss that is not a number stops the optimiser on
the card itself, so that the parameters are still those before it when it is found out.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from perlclip.adapters.folder import Adapter
from perlclip.backbone import PLAIN, Backbone
from perlclip.data.decoding import readable
from perlclip.data.loading import epoch_order, random_views
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError, Terminated, first_line
from perlclip.methods.base import ClassState, Method, config_dict
from perlclip.methods.recipe import Recipe
from perlclip.methods.registry import default_recipe, find_recipe
from perlclip.progress import progress_bar
from perlclip.threads import one_thread
from perlclip.training.checkpoint import read_checkpoint, save_checkpoint
from perlclip.training.choose_head import Choice, HeldOut, choose_head
from perlclip.training.choose_lens import LensChoice, choose_lens
from perlclip.training.choose_thresholds import set_thresholds
from perlclip.training.environment import environment
from perlclip.training.gradients import Gradients
from perlclip.training.optimizer import build_optimizer
from perlclip.training.shots import center_of, look_at
from perlclip.trust.record import Trust
from perlclip.trust.rejection import FarWords

CHECKPOINT_SECONDS = 30.0
LOSS_SECONDS = 0.5  # between two readings of the losses, where reading them means waiting for the card


@dataclass(frozen=True, kw_only=True)
class FitResult(Adapter):
    """What training made, an adapter ready to be saved or used, and how it went.

    `settings` is everything that the training depends on; `state` what is frozen of the classes trained on; `choice`
    how the head was chosen, in `head_seconds`, `lens` how the lens was, in `lens_seconds`; thresholds took
    `threshold_seconds`.
    """

    losses: list[float] = field(repr=False)
    seconds: float
    compile_seconds: float
    images_per_second: float
    settings: dict[str, Any] = field(repr=False)
    state: ClassState = field(repr=False)
    choice: Choice | None = None
    lens: LensChoice | None = None
    lens_seconds: float = 0.0
    head_seconds: float = 0.0
    threshold_seconds: float = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle: of what is frozen of the classes only their names, from which it is made again."""
        return {**vars(self), "state": self.state.classes}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept, state=kept["method"].class_state(kept["state"]))

    @property
    def steps(self) -> int:
        """Batches trained on; in float16 a step whose gradients overflow is left out."""
        return len(self.losses)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the step in progress was finished and its checkpoint written; of SIGTERM that is `Terminated`."""


def fit(
    method: Method,
    train_set: ImageSet,
    *,
    recipe: str | Recipe | None = None,
    dataset: str = "",
    seed: int = 1,
    thresholds: bool = True,
    lens: str = "auto",
    head: bool = True,
    rehearse: bool = True,
    compile: str = "auto",
    gradients: Gradients | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    workers: int = 0,
    progress: bool = True,
) -> FitResult:
    """Train a method's own parameters on labelled images.

    A recipe is `fast` (one epoch), `original` (the authors' own, if need be for one `dataset` of CoOp's fifteen),
    `strong` (PERL's default, ours, with more epochs for few images), or one of your own, taken to the letter; the
    default is the one the method was created for, or else `strong` or `original`. A recipe whose settings the method
    does not have is refused. PERL's thresholds for adaptive thinking are set at the end, unless `thresholds=False`.

    `lens="auto"` chooses how images are shown to the frozen tower, by the shots: as they are, or through one of
    `perlclip.backbone.LENSES` (`choose_lens`). Another name is that lens. A method that was made with a lens keeps it,
    and so does one whose `gradients` are given, as these were recorded with it.

    Unless `head=False`, the result has a head for the classes trained on, or a mixture with zero-shot's answer, or
    neither, whatever is best for shots held out: see `choose_head`. For that, a method that trains is trained again, on
    three quarters of the shots and for half of the epochs, or where each class has one, on half of the classes; with
    `rehearse=False` it is not, and zero-shot is no candidate. Of a method that has nothing to train, as `ridge`, the
    head is all that is made. The same shots held out say how sure answers may be (`Trust`), where there are any: see
    docs/trust.md.

    `compile="auto"` replays steps as CUDA graphs where there is CUDA, and "off" does not; `gradients` holds such graphs
    of this very method and these classes, made with a `compile` of their own, for its next training. A backbone in
    float16 trains with a loss scale that adapts; the method's parameters are always float32. With a `checkpoint` file
    the state is written every half minute, on Ctrl-C or SIGTERM and at the end, and `resume=True` goes on from it, if
    it is there, to the same result, on the CPU bit by bit. The file is the caller's to remove once the result is safe
    elsewhere.
    """
    if resume and checkpoint is None:
        raise PerlclipError("resume needs the checkpoint file to go on from")
    if not len(train_set):
        raise PerlclipError("the training set has no images")
    train_set, _ = readable(train_set, progress=progress)  # now, not in the middle of the training
    alone, began = head and not method.num_trainable, time.perf_counter()
    name, found = ("", Recipe()) if alone else _resolve(method, recipe, dataset, train_set)
    if gradients and (gradients.method is not method or gradients.classes != train_set.classes):
        raise PerlclipError("the gradients given are those of another method or of other classes")
    path = Path(checkpoint) if checkpoint else None
    begun = path if resume and path and path.exists() else None
    looked = None
    if lens == "auto":
        keeps = "lens" in method.given or gradients is not None
        looked = None if keeps else _looked(method, train_set, begun, seed, workers, progress)
        lens = looked.name if looked else _lens_of(begun) if begun and not keeps else method.config.lens
    if lens != method.config.lens:
        method = copy(method) if alone else method  # for which others may have a head
        method.config = replace(method.config, lens=lens)
    lens_seconds = time.perf_counter() - began
    if alone:
        method = _with_recipe(method)
    if method.center:
        method.take_center(center_of(method, train_set, workers))
    if alone:
        made_alone = _head_alone(method, train_set, looked, seed, workers)
        return replace(made_alone, lens=looked, lens_seconds=lens_seconds)
    run = _Run(train_set, found, seed, gradients or Gradients(method, train_set.classes, compile, keep=False))
    recorded = run.gradients.seconds
    if begun:
        run.load(begun)
    started = time.perf_counter()
    run.complete(path, workers, progress)
    if path:
        run.save(path)
    seconds = time.perf_counter() - started
    made, choice, seen, trust = None, None, None, None
    if head:
        seen = look_at(method, train_set, run.class_state, workers)

        # Fresh methods, so that an interrupt or another initialisation of this one cannot change what is chosen.
        def rehearsal(fresh: Method, part: ImageSet) -> None:
            # Which answer is better shows in half of the epochs; with half of the classes that is half of the steps.
            whole = part.classes == train_set.classes
            shorter = replace(found, epochs=max(1, found.epochs // 2)) if whole else found
            if fresh.center:
                fresh.take_center(center_of(fresh, part, workers))
            state = copy(run.class_state) if whole else None
            own = Gradients(fresh, part.classes, compile, state, keep=False)
            _Run(part, shorter, seed, own).complete(None, workers, progress, "rehearsal")

        made, choice, held = choose_head(
            method, train_set, train=rehearsal if rehearse else None, state=run.class_state, seen=seen, seed=seed,
            workers=workers,
        )  # fmt: skip
        trust = _trust(method, run.class_state, choice, held)
    result = FitResult(
        method=method,
        class_names=train_set.class_names,
        template=train_set.template,
        training=_record(run.settings, train_set, method, name, seconds, looked, choice),
        head=made,
        trust=trust,
        losses=run.losses,
        seconds=seconds,
        compile_seconds=run.gradients.seconds - recorded,
        images_per_second=run.images / seconds,
        settings=run.settings,
        state=run.class_state,
        choice=choice,
        lens=looked,
        lens_seconds=lens_seconds,
        head_seconds=time.perf_counter() - started - seconds,
    )
    if not thresholds or not method.image_steps:
        return result
    started = time.perf_counter()
    settled = set_thresholds(
        result, train_set, state=run.class_state, seen=seen, seed=seed, workers=workers, progress=progress,
    )  # fmt: skip
    return replace(result, thresholds=settled, threshold_seconds=time.perf_counter() - started)


def _looked(
    method: Method, train_set: ImageSet, begun: Path | None, seed: int, workers: int, progress: bool
) -> LensChoice | None:
    """The lens chosen; nothing where a training has begun with another one, on another device or in another version."""
    with _threads(method.backbone):
        looked = choose_lens(method, train_set, seed=seed, workers=workers, progress=progress)
    return looked if begun is None or _lens_of(begun) == looked.name else None


def _lens_of(checkpoint: Path) -> str:
    """The lens that a training looked through."""
    config = read_checkpoint(checkpoint).position["settings"].get("config")
    return str(config.get("lens", PLAIN)) if isinstance(config, dict) else PLAIN


def _head_alone(method: Method, train_set: ImageSet, looked: LensChoice | None, seed: int, workers: int) -> FitResult:
    """Of a method that has nothing to train."""
    started = time.perf_counter()
    state, settings = method.class_state(train_set.classes), _describe(method, train_set, seed)
    made, choice, held = choose_head(method.eval(), train_set, state=state, seed=seed, workers=workers)
    trust = _trust(method, state, choice, held)
    seconds = time.perf_counter() - started
    return FitResult(
        method=method,
        class_names=train_set.class_names,
        template=train_set.template,
        training=_record(settings, train_set, method, "", seconds, looked, choice),
        head=made,
        trust=trust,
        losses=[],
        seconds=seconds,
        compile_seconds=0.0,
        images_per_second=len(train_set) / seconds,
        settings=settings,
        state=state,
        choice=choice,
    )


def _trust(method: Method, state: ClassState, choice: Choice, held: HeldOut | None) -> Trust | None:
    """What shots held out say about probabilities; nothing where there were none."""
    if held is None:
        return None
    far = FarWords.of(method.backbone, state.classes)
    v0_NE = held.v0_NE.to(method.backbone.device)
    found, scores = held.answers(choice), held.scores(choice)
    return Trust.of(
        choice.how, *found, held.labels_N, v0_NE, far, held.means_CE, held.near_N, scores,
        ruled=choice.ruled,
    )  # fmt: skip


def _record(
    settings: dict[str, Any], train_set: ImageSet, method: Method, name: str, seconds: float,
    looked: LensChoice | None, choice: Choice | None,
) -> dict[str, Any]:  # fmt: skip
    """The training record of an adapter; its card says the method, its settings and the backbone itself."""
    used = {key: value for key, value in settings.items() if key not in ("method", "config", "backbone")}
    return {
        "source": train_set.name,
        "shots": train_set.shots,
        "recipe_name": name,
        **used,
        "seconds": round(seconds, 2),
        "environment": environment(method.backbone.device),
        **({"lens": looked.record()} if looked else {}),
        **({"head": choice.record()} if choice else {}),
    }


def _describe(method: Method, train_set: ImageSet, seed: int, recipe: Recipe | None = None) -> dict[str, Any]:
    """Everything a training depends on, as plain data."""
    backbone = method.backbone
    return {
        "method": method.name,
        "config": config_dict(method),
        "recipe": recipe.as_dict() if recipe else None,
        "seed": seed,
        "dtype": backbone.dtype_name,
        "backbone": backbone.fingerprint,
        "data": train_set.fingerprint(),
        "images": len(train_set),
    }


class _Run:
    """The mutable state of one training: parameters, optimiser, and how far it has come."""

    def __init__(self, train_set: ImageSet, recipe: Recipe, seed: int, gradients: Gradients) -> None:
        self.train_set, self.recipe, self.seed, self.gradients = train_set, recipe, seed, gradients
        self.method, self.class_state, self.scaler = gradients.method, gradients.state, gradients.scaler
        self.ahead, method = gradients.ahead, gradients.method
        self.optimizer: Optimizer = build_optimizer(recipe, method.parameters(), fused=self.ahead)
        self.averages = {name: torch.zeros_like(p) for name, p in method.named_parameters()} if recipe.average else {}
        self.unread: list[Tensor] = []
        self.read = time.monotonic()
        if self.ahead:
            self.broken = torch.zeros((), device=method.backbone.device)
            self.optimizer.found_inf = self.broken  # type: ignore[attr-defined]  # fused optimisers step only while it is 0
        self.epoch = 0
        self.step = 0
        # Reads the images' bytes: before training, not when it is over.
        self.settings = _describe(method, train_set, seed, recipe)
        self.images = 0
        self.losses: list[float] = []
        self.saved = time.monotonic()

    def complete(self, path: Path | None, workers: int, progress: bool, title: str = "fit") -> None:
        """Train, and leave the method ready to answer."""
        self.method.train()
        try:
            self.train(path, workers, progress, title)
        finally:
            self.gradients.end()
        self.method.eval()
        self.take_average()
        self.require_finite()

    def train(self, path: Path | None, workers: int, progress: bool, title: str) -> None:
        """All epochs, or what is left of them."""
        epochs = [self._order(epoch) for epoch in range(self.recipe.epochs)]
        order = [(e, batch) for e, batches in enumerate(epochs) if e >= self.epoch for batch in batches][self.step :]
        preprocess, device = self.method.backbone.preprocess, self.method.backbone.device
        scale, total = self.recipe.crop_scale, sum(map(len, epochs))
        views = random_views(self.train_set, preprocess, scale, order, device, seed=self.seed, workers=workers)
        with (
            progress_bar(title, total, show=progress, done=self.steps) as bar,
            _asked_to_stop() as asked,
            _threads(self.method.backbone),
            closing(views) as batches,
        ):
            for (epoch, _), (pixels, labels) in zip(order, batches, strict=True):
                rate = self.recipe.rate(epoch)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.train_step(pixels, labels)
                bar(note=f"loss {self.losses[-1]:.4f}  lr {rate:.2g}" if self.losses else "")
                if self.step == len(epochs[epoch]):
                    self.end_epoch()
                stop = asked()
                if path and (stop or time.monotonic() - self.saved > CHECKPOINT_SECONDS):
                    self.save(path)
                if stop:
                    raise stop(f"interrupted after step {self.steps}")

    def end_epoch(self) -> None:
        """What is done once per epoch."""
        self.read_losses()
        for name, average in self.averages.items():
            average.add_(self.method.get_parameter(name).detach(), alpha=self.recipe.share(self.epoch))
        self.epoch, self.step = self.epoch + 1, 0

    @property
    def steps(self) -> int:
        """Steps done, whether or not their losses have been read."""
        return len(self.losses) + len(self.unread)

    def train_step(self, pixels: Tensor, labels: Tensor) -> None:
        """One optimiser step; parameters are left alone from the first loss on that is not a number."""
        loss, *gradients = self.gradients(pixels, labels)
        self.unread.append(loss.clone())
        if self.ahead:
            torch.maximum(self.broken, (~loss.isfinite()).float(), out=self.broken)
        if not self.ahead or time.monotonic() - self.read > LOSS_SECONDS:
            self.read_losses()
        for p, gradient in zip(self.method.parameters(), gradients, strict=True):
            p.grad = gradient
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.method.changed()
        self.images += len(labels)
        self.step += 1

    def read_losses(self) -> None:
        """Fetch the losses not read yet, and stop at one that is not a number."""
        values = torch.stack(self.unread).tolist() if self.unread else []
        self.unread, self.read = [], time.monotonic()
        for value in values:
            if not math.isfinite(value):
                raise PerlclipError(
                    f"the loss became {value} at step {len(self.losses) + 1}; lower the learning rate "
                    f"({self.recipe.lr:g}) or use float32"
                )
            self.losses.append(value)

    def take_average(self) -> None:
        """Weights of the epochs' ends averaged, where the recipe says so."""
        for name, average in self.averages.items():
            with torch.no_grad():
                self.method.get_parameter(name).copy_(average)

    def require_finite(self) -> None:
        """Refuse a result with infinities; the loss is checked before each step and cannot see the last one."""
        if not all(torch.isfinite(p).all() for p in self.method.parameters()):
            raise PerlclipError(f"the weights are no longer finite; lower the learning rate ({self.recipe.lr:g})")

    def save(self, path: Path) -> None:
        """Write the state after the last complete step."""
        self.read_losses()
        position = {
            "epoch": self.epoch,
            "step": self.step,
            "settings": self.settings,
            "scaler": self.scaler.state_dict(),
        }
        save_checkpoint(path, self.method, self.optimizer, self.averages, self.losses, position)
        self.saved = time.monotonic()

    def load(self, path: Path) -> None:
        """Take up the state of a checkpoint made with the same settings."""
        checkpoint = read_checkpoint(path)
        position = checkpoint.position
        ours = json.loads(json.dumps(self.settings))
        theirs = {key: position["settings"].get(key) for key in ours}
        precision = position["settings"].get("precision", theirs["dtype"])
        if precision != theirs["dtype"]:  # 0.1.0 could train in another format than the towers'
            theirs["dtype"] = f"{precision} on {theirs['dtype']}"
        if differences := list(_differences(theirs, ours)):
            raise PerlclipError(f"cannot resume from {path}: it was made with {', '.join(differences)}")
        try:
            checkpoint.restore(self.method, self.optimizer, self.averages)
            self.scaler.load_state_dict(position["scaler"])
            self.losses = checkpoint.losses
            self.epoch, self.step = position["epoch"], position["step"]
            if self.step == len(self._order(self.epoch)):  # as 0.1.0 left it
                self.end_epoch()
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise PerlclipError(f"cannot resume from {path}: it is damaged ({first_line(error)})") from error

    def _order(self, epoch: int) -> list[list[int]]:
        return epoch_order(
            len(self.train_set), self.recipe.batch_size, self.recipe.drop_last, seed=self.seed, epoch=epoch
        )


def _resolve(method: Method, recipe: str | Recipe | None, dataset: str, train_set: ImageSet) -> tuple[str, Recipe]:
    """The recipe and its name.

    Settings that it wants and that no parameter depends on are made, unless the method's maker chose others; a method
    that lacks another one is refused.
    """
    if not method.num_trainable:
        raise PerlclipError(f"method {method.name!r} has nothing to train")
    if isinstance(recipe, Recipe):
        return "own", recipe
    made_for, made_on, made_with = method.made_for
    name, dataset = recipe or made_for or default_recipe(method.name), dataset or made_on
    shots = made_with or train_set.shots_each
    found, wanted = find_recipe(method.name, name, method.backbone.name, dataset, shots, len(train_set))
    if made_for:  # the settings of another recipe are no longer wanted
        made = find_recipe(method.name, made_for, method.backbone.name, made_on, made_with)[1]
        wanted = {key: getattr(method.config_class(), key) for key in made} | wanted
    lacking = _adjust(method, wanted)
    if lacking and (made_for, made_on) != (name, dataset):
        settings = ", ".join(f"{key}={value!r}" for key, value in lacking.items())
        how = f"recipe={name!r}" + (f", dataset={dataset!r}" if dataset else "")
        raise PerlclipError(
            f"recipe {name!r} wants {settings}: make the method with create_method({method.name!r}, backbone, {how})"
        )
    return name, found


def _adjust(method: Method, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Settings made on a method that exists, unless its maker chose others; what cannot be made so."""
    lacking = {key: value for key, value in wanted.items() if getattr(method.config, key) != value}
    free = method.config.adjustable & lacking.keys()
    method.config = replace(method.config, **{key: lacking[key] for key in free - method.given})
    return {key: value for key, value in lacking.items() if key not in free}


def _with_recipe(method: Method) -> Method:
    """A method that has nothing to train with the settings of its recipe, and a center of its own."""
    if method.config.adjustable:
        method = deepcopy(method)  # for which others may have a head
        _adjust(method, find_recipe(method.name, default_recipe(method.name), method.backbone.name)[1])
    return method


_SPOKEN = {"data": "other training images", "images": "another number of them", "backbone": "another backbone"}


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings that are not the same, a few words for each."""
    for key in dict.fromkeys((*ours, *theirs)):
        then, now = theirs.get(key), ours.get(key)
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            yield from _differences(then, now, f"{prefix}{key} ")
        elif then != now:
            yield _SPOKEN.get(key, f"another {prefix}{key} ({then!r}, now {now!r})")


_SIGNALS: dict[int, type[KeyboardInterrupt]] = {signal.SIGINT: Interrupted, signal.SIGTERM: Terminated}


def _threads(backbone: Backbone) -> AbstractContextManager[None]:
    """One for small backbones on a CPU: as fast as two, and beside other work many times faster."""
    return one_thread() if backbone.small else nullcontext()


@contextmanager
def _asked_to_stop() -> Iterator[Callable[[], type[KeyboardInterrupt] | None]]:
    """Ctrl-C or SIGTERM asks for a stop after the current step, raised as this; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked: list[type[KeyboardInterrupt]] = []

    def ask(number: int, _: object) -> None:
        if asked:
            raise Terminated("terminated") if number == signal.SIGTERM else KeyboardInterrupt
        asked.append(_SIGNALS[number])

    previous = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield lambda: asked[0] if asked else None
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if asked:  # after the last step, while loading processes were ended
        raise asked[0]("interrupted")
