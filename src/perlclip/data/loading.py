"""Batches of pixels, the same for a seed whatever the number of worker processes."""

import random
import signal
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perlclip.data.images import Preprocess, read_image
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError


class _Views(Dataset[tuple[Tensor, int]]):
    def __init__(self, images: ImageSet, preprocess: Preprocess) -> None:
        self.images, self.preprocess = images, preprocess

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.preprocess.test_view(read_image(self.images.images[index])), int(self.images.labels[index])


class _RandomViews(_Views):
    """The view of image i in epoch e depends on (seed, e, i) alone, so workers and resuming cannot change it."""

    def __init__(
        self, images: ImageSet, preprocess: Preprocess, scale: tuple[float, float], seed: int, epoch: int
    ) -> None:
        super().__init__(images, preprocess)
        self.scale, self.seed, self.epoch = scale, seed, epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        rng = random.Random(f"view {self.seed} {self.epoch} {index}")
        image = read_image(self.images.images[index])
        return self.preprocess.train_view(image, rng, self.scale), int(self.images.labels[index])


def eval_batches(
    images: ImageSet, preprocess: Preprocess, batch_size: int, workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image once, in order, in CLIP's own view."""
    if batch_size < 1:
        raise PerlclipError(f"batch size must be at least 1, got {batch_size}")
    order = [list(range(i, min(i + batch_size, len(images)))) for i in range(0, len(images), batch_size)]
    yield from _load(_Views(images, preprocess), order, workers)


def train_batches(
    images: ImageSet,
    preprocess: Preprocess,
    scale: tuple[float, float],
    order: list[list[int]],
    *,
    seed: int,
    epoch: int,
    workers: int = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch (or of the rest of it), as augmented views."""
    yield from _load(_RandomViews(images, preprocess, scale, seed, epoch), order, workers)


def on_device(batches: Iterable[Sequence[Tensor]], device: torch.device) -> Iterator[list[Tensor]]:
    """Batches on a device; on CUDA the next one is copied while this one is worked on."""
    if device.type != "cuda":
        for batch in batches:
            yield [tensor.to(device) for tensor in batch]
        return
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: tuple[list[Tensor], torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(copying):
            moved = [tensor.to(device, non_blocking=True) for tensor in batch]
            coming = moved, copying.record_event()
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = coming
    if waiting is not None:
        yield _arrived(*waiting)


def _arrived(batch: list[Tensor], copied: torch.cuda.Event) -> list[Tensor]:
    here = torch.cuda.current_stream(batch[0].device)
    here.wait_event(copied)
    for tensor in batch:
        tensor.record_stream(here)
    return batch


def epoch_order(size: int, batch_size: int, drop_last: bool, *, seed: int, epoch: int) -> list[list[int]]:
    """Random batches without replacement; a short last batch is dropped only if there is a full one."""
    order = list(range(size))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    batches = [order[i : i + batch_size] for i in range(0, size, batch_size)]
    if drop_last and len(batches) > 1 and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


def _ignore_interrupts(_: int) -> None:
    """Ctrl-C reaches all processes of a terminal; it is the main one that decides when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _load(views: _Views, order: list[list[int]], workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
        views,  # type: ignore[arg-type]
        batch_sampler=order,
        num_workers=min(workers, len(order)),
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_ignore_interrupts,
    )
    try:
        yield from loader
    except PerlclipError as error:
        # A worker's exception arrives with its traceback as message; the sentence is the last line of it.
        raise PerlclipError(
            str(error).strip().splitlines()[-1].removeprefix("perlclip.errors.PerlclipError: ")
        ) from error
