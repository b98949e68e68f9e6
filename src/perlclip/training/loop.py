"""`fit`: one training loop for every method.

The result is a function of (method, training images, recipe, seed, precision): views and order come from counters, not
from a running generator, so that worker processes, an interrupt or a resumed run cannot change it. `fit` is given the
training images alone; it has no way to see a test set.

On CUDA nothing in a step waits for the card: forward and backward pass are one recorded graph, the optimiser is fused,
the next batch is copied meanwhile, and losses are read in bunches. A loss that is not a number stops the optimiser on
the card itself, so that the parameters are still those before it when it is found out.
"""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from perlclip.backbone.accel.cuda_graphs import Compiled
from perlclip.data.loading import epoch_order, on_device, train_batches
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError, unknown_name
from perlclip.methods.base import Method, config_dict
from perlclip.methods.recipes import Recipe
from perlclip.methods.recipes import recipe as recipe_by_name
from perlclip.progress import Bar, progress_bar
from perlclip.training.checkpoint import read_checkpoint, save_checkpoint

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHECKPOINT_SECONDS = 30.0
LOSS_SECONDS = 0.5  # between two readings of the losses, where reading them means waiting for the card
AHEAD = ("cuda",)  # devices that work while the host goes on
RECORD_AFTER = 4  # steps of one shape, that is; a short last batch comes once an epoch


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What training did."""

    losses: list[float] = field(repr=False)
    seconds: float
    compile_seconds: float
    images_per_second: float
    settings: dict[str, Any]

    @property
    def steps(self) -> int:
        """Batches trained on; in float16 a step whose gradients overflow is left out."""
        return len(self.losses)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after the step in progress was finished and its checkpoint written."""


def fit(
    method: Method,
    train_set: ImageSet,
    *,
    recipe: str | Recipe = "fast",
    seed: int = 1,
    precision: str = "float32",
    compile: str = "auto",
    checkpoint: str | Path | None = None,
    resume: bool = False,
    workers: int = 0,
    progress: bool = True,
) -> FitResult:
    """Train a method's own parameters on labelled images.

    `precision="bfloat16"` or `"float16"` computes the frozen towers under autocast, the latter with a loss scale that
    adapts; the method's parameters stay float32. `compile="auto"` replays steps as CUDA graphs where there is CUDA, and
    "off" does not. With a `checkpoint` file the state is written every half minute, on Ctrl-C and at the end, and
    `resume=True` goes on from it to the same result, on the CPU bit by bit. The file is the caller's to remove once the
    result is safe elsewhere.
    """
    if resume and checkpoint is None:
        raise PerlclipError("resume needs the checkpoint file to go on from")
    run = _Run(method, train_set, _resolve(method, recipe, train_set.name), seed, precision, compile, workers)
    path = Path(checkpoint) if checkpoint else None
    if resume and path and path.exists():
        run.load(path)
    total = run.recipe.epochs * run.steps_per_epoch
    started = time.perf_counter()
    first = len(run.losses)
    method.train()
    try:
        with progress_bar("fit", total, show=progress, done=first) as bar, _interrupt_flag() as interrupted:
            for epoch in range(run.epoch, run.recipe.epochs):
                run.train_epoch(epoch, bar, path, interrupted)
    finally:
        run.release()
    method.eval()
    run.take_average()
    run.require_finite()
    if path:
        run.save(path)
    seconds = time.perf_counter() - started
    return FitResult(
        losses=run.losses,
        seconds=seconds,
        compile_seconds=run.gradients.seconds,
        images_per_second=run.images / seconds,
        settings=run.settings,
    )


class _Run:
    """The mutable state of one training: parameters, optimiser, and how far it has come."""

    def __init__(
        self, method: Method, train_set: ImageSet, recipe: Recipe, seed: int, precision: str, compile: str, workers: int
    ) -> None:
        if precision not in PRECISIONS:
            raise unknown_name("precision", precision, PRECISIONS)
        if not len(train_set):
            raise PerlclipError("the training set has no images")
        dtype = PRECISIONS[precision]
        if dtype is not None and method.backbone.dtype not in (dtype, torch.float32):
            raise PerlclipError(f"precision {precision} does not go with a backbone in {method.backbone.dtype}")
        self.method, self.train_set, self.recipe = method, train_set, recipe
        self.seed, self.precision, self.workers = seed, precision, workers
        device = method.backbone.device
        if compile == "on" and precision == "float16":
            raise PerlclipError("compile='on' does not go with float16, whose loss scale is adapted step by step")
        # A loss scale is adapted on the host, step by step, and fused SGD does not get over a first step left out.
        self.ahead = device.type in AHEAD and precision != "float16"
        self.optimizer: Optimizer = recipe.build_optimizer(method.parameters(), fused=self.ahead)
        # A scale that does not overflow from the start, as the usual 65,536 does: skipped steps are lost ones.
        self.scaler = torch.amp.GradScaler(device.type, init_scale=256.0, enabled=precision == "float16")
        self.averages = {name: torch.zeros_like(p) for name, p in method.named_parameters()} if recipe.average else {}
        self.class_state = method.class_state(train_set.classes)
        self.gradients = Compiled(self._gradients, device, compile, after=RECORD_AFTER)
        self.gradients.on &= self.ahead
        self.unread: list[Tensor] = []
        self.read = time.monotonic()
        if self.ahead:
            self.broken = torch.zeros((), device=device)
            self.optimizer.found_inf = self.broken  # type: ignore[attr-defined]  # fused optimisers step only while it is 0
        self.epoch = 0
        self.step = 0
        self.settings = self._describe()  # reads the images' bytes: before training, not when it is over
        self.images = 0
        self.losses: list[float] = []
        self.saved = time.monotonic()

    @property
    def steps_per_epoch(self) -> int:
        return len(self._order(0))

    def train_epoch(self, epoch: int, bar: Bar, path: Path | None, interrupted: Callable[[], bool]) -> None:
        """The rest of one epoch, from `self.step` on."""
        self.epoch = epoch
        rate = self.recipe.rate(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        order = self._order(epoch)[self.step :]
        batches = train_batches(
            self.train_set, self.method.backbone.preprocess, self.recipe.crop_scale, order,
            seed=self.seed, epoch=epoch, workers=self.workers,
        )  # fmt: skip
        for pixels, labels in on_device(batches, self.method.backbone.device):
            self.train_step(pixels, labels)
            bar(note=f"loss {self.losses[-1]:.4f}  lr {rate:.2g}" if self.losses else "")
            stop = interrupted()
            if path and (stop or time.monotonic() - self.saved > CHECKPOINT_SECONDS):
                self.save(path)
            if stop:
                raise Interrupted(f"interrupted after step {self.steps}")
        self.read_losses()
        for name, average in self.averages.items():
            average.add_(self.method.get_parameter(name).detach(), alpha=self.recipe.share(epoch))
        self.epoch, self.step = epoch + 1, 0

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
        self.images += len(labels)
        self.step += 1

    def _gradients(self, pixels: Tensor, labels: Tensor) -> list[Any]:
        """The loss, and its gradient with respect to each parameter."""
        dtype = PRECISIONS[self.precision]
        halved = dtype is not None and dtype != self.method.backbone.dtype  # the towers are not in half already
        with torch.autocast(pixels.device.type, dtype=dtype, enabled=halved):
            loss = self.method.loss(pixels, labels, self.class_state)
        if not loss.requires_grad:
            raise PerlclipError(f"with these settings nothing that {self.method.name} trains reaches the loss")
        gradients = torch.autograd.grad(self.scaler.scale(loss), list(self.method.parameters()), allow_unused=True)
        # Fused optimisers want them laid out as the parameters are.
        return [loss.detach(), *(None if g is None else g.contiguous() for g in gradients)]

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

    def release(self) -> None:
        """Let go of what the steps were recorded in: gigabytes with many classes."""
        self.gradients.forget()
        for p in self.method.parameters():
            p.grad = None

    def take_average(self) -> None:
        """Weights of the epochs' ends averaged, where the recipe says so."""
        for name, average in self.averages.items():
            with torch.no_grad():
                self.method.get_parameter(name).copy_(average)

    def require_finite(self) -> None:
        """Refuse a result with infinities; the loss is checked before each step and cannot see the last one."""
        if not all(torch.isfinite(p).all() for p in self.method.parameters()):
            raise PerlclipError(f"the weights are no longer finite; lower the learning rate ({self.recipe.lr:g})")

    def _describe(self) -> dict[str, Any]:
        """Everything the result depends on, as plain data."""
        backbone = self.method.backbone
        return {
            "method": self.method.name,
            "config": config_dict(self.method),
            "recipe": asdict(self.recipe),
            "seed": self.seed,
            "precision": self.precision,
            "dtype": str(backbone.dtype).removeprefix("torch."),
            "backbone": backbone.fingerprint,
            "data": self.train_set.fingerprint(),
            "images": len(self.train_set),
        }

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
        theirs = checkpoint.position["settings"]
        for key, value in json.loads(json.dumps(self.settings)).items():
            if theirs.get(key) != value:
                raise PerlclipError(
                    f"cannot resume from {path}: it was made with another {key} ({theirs.get(key)!r}, now {value!r})"
                )
        checkpoint.restore(self.method, self.optimizer, self.averages)
        self.scaler.load_state_dict(checkpoint.position["scaler"])
        self.losses = checkpoint.losses
        self.epoch, self.step = checkpoint.position["epoch"], checkpoint.position["step"]

    def _order(self, epoch: int) -> list[list[int]]:
        return epoch_order(
            len(self.train_set), self.recipe.batch_size, self.recipe.drop_last, seed=self.seed, epoch=epoch
        )


def _resolve(method: Method, recipe: str | Recipe, dataset: str) -> Recipe:
    if method.num_trainable == 0:
        raise PerlclipError(f"method {method.name!r} has nothing to train")
    if isinstance(recipe, Recipe):
        return recipe
    return recipe_by_name(method.name, recipe, method.backbone.name, dataset)


@contextmanager
def _interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop after the current step; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    previous = signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
