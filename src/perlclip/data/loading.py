"""Batches of pixels on a device, the same for a seed whatever the number of worker processes."""

import random
import signal
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perlclip.data.images import Unreadable, read_image, try_image
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError


class Views(Protocol):
    """What makes pixels of an image: a backbone's preprocessing."""

    def test_view(self, image: Image.Image) -> Tensor:
        """The one view of an image that is tested."""

    def train_view(self, image: Image.Image, rng: random.Random, scale: tuple[float, float]) -> Tensor:
        """A random one to train on."""


LAST_SECONDS = 3.0
AHEAD, THREADS = 2, 8  # batches, and threads that make them
Batches = Generator[tuple[Tensor, Tensor], None, None]  # pixels and labels
Order = Sequence[tuple[int, Sequence[int]]]  # of each batch, its epoch and its images
Lost = dict[int, Unreadable]  # by their positions
Loaded = tuple[Tensor, Tensor, list[tuple[int, Unreadable]]]  # pixels, labels, and what could not be read


class _Loaded(Dataset[tuple[Tensor | Unreadable, int]]):
    """Views of single images; a random one depends on (seed, epoch, image) alone, so workers cannot change it."""

    def __init__(
        self, images: ImageSet, views: Views, scale: tuple[float, float] | None = None, seed: int = 0,
        skip: bool = False,
    ) -> None:  # fmt: skip
        self.images, self.views, self.scale, self.seed, self.skip = images, views, scale, seed, skip

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor | Unreadable, int]:
        """A view and its label; of an image that cannot be read, if it is to be skipped, why, and its position."""
        epoch, index = place
        source, label = self.images.images[index], int(self.images.labels[index])
        image = try_image(source) if self.skip else read_image(source)
        if isinstance(image, Unreadable):
            return image, index
        if self.scale is None:
            return self.views.test_view(image), label
        rng = random.Random(f"view {self.seed} {epoch} {index}")
        return self.views.train_view(image, rng, self.scale), label


def fixed_views(
    images: ImageSet, views: Views, batch_size: int, device: torch.device, workers: int = 0, lost: Lost | None = None
) -> Batches:
    """Every image once, in order, in the backbone's own view.

    An image that cannot be read is an error; or, if there is a place for what is `lost`, it is put there and missing
    in its batch, which may be empty then.
    """
    if batch_size < 1:
        raise PerlclipError(f"batch size must be at least 1, got {batch_size}")
    order = [(0, range(i, min(i + batch_size, len(images)))) for i in range(0, len(images), batch_size)]
    return _load(_Loaded(images, views, skip=lost is not None), order, device, workers, {} if lost is None else lost)


def random_views(
    images: ImageSet,
    views: Views,
    scale: tuple[float, float],
    order: Order,
    device: torch.device,
    *,
    seed: int,
    workers: int = 0,
) -> Batches:
    """Augmented views in batches; one set of worker processes serves all epochs."""
    return _load(_Loaded(images, views, scale, seed), order, device, workers, {})


def epoch_order(size: int, batch_size: int, drop_last: bool, *, seed: int, epoch: int) -> list[list[int]]:
    """Random batches without replacement; a short last batch is dropped only if there is a full one."""
    order = list(range(size))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    batches = [order[i : i + batch_size] for i in range(0, size, batch_size)]
    if drop_last and len(batches) > 1 and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


def _load(loaded: _Loaded, order: Order, device: torch.device, workers: int, lost: Lost) -> Batches:
    if not workers and device.type == "cuda":
        yield from _on_device((_kept(batch, lost) for batch in _ahead(loaded, order, pin=True)), device)
        return
    loader: DataLoader[Any] = DataLoader(
        loaded,
        collate_fn=_together,
        batch_sampler=[[(epoch, index) for index in batch] for epoch, batch in order],
        num_workers=min(workers, len(order)),
        pin_memory=device.type == "cuda",  # elsewhere it would open a CUDA context for nothing
        worker_init_fn=_start_worker,
        generator=torch.Generator(),  # it draws a number when it starts: not one of the process's own
    )
    try:
        yield from _on_device((_kept(batch, lost) for batch in loader), device)
    except PerlclipError as error:
        # A worker's exception arrives with its traceback as message; the sentence is the last line of it.
        sentence = str(error).strip().splitlines()[-1].removeprefix("perlclip.errors.PerlclipError: ")
        raise PerlclipError(sentence) from error


def _ahead(loaded: _Loaded, order: Order, *, pin: bool = False) -> Iterator[Loaded]:
    """The next batches are made by threads while a card works on this one: it leaves the processor free for that."""
    threads = ThreadPoolExecutor(min(THREADS, torch.get_num_threads()), thread_name_prefix="views")
    coming: deque[list[Future[tuple[Tensor | Unreadable, int]]]] = deque()

    def next_batch() -> Loaded:
        pixels, labels, lost = _together([view.result() for view in coming.popleft()])
        return (pixels.pin_memory(), labels.pin_memory(), lost) if pin else (pixels, labels, lost)

    try:
        for epoch, batch in order:
            coming.append([threads.submit(loaded.__getitem__, (epoch, index)) for index in batch])
            if len(coming) > AHEAD:
                yield next_batch()
        while coming:
            yield next_batch()
    finally:
        threads.shutdown(cancel_futures=True)


def _together(items: Sequence[tuple[Tensor | Unreadable, int]]) -> Loaded:
    """Pixels and labels of the images that could be read, and the others by position."""
    views = [(view, label) for view, label in items if isinstance(view, Tensor)]
    pixels = torch.stack([view for view, _ in views]) if views else torch.empty(0)
    lost = [(index, view) for view, index in items if isinstance(view, Unreadable)]
    return pixels, torch.tensor([label for _, label in views], dtype=torch.int64), lost


def _kept(batch: Loaded, lost: Lost) -> tuple[Tensor, Tensor]:
    pixels, labels, unreadable = batch
    lost.update(unreadable)
    return pixels, labels


def _start_worker(_: int) -> None:
    """Ctrl-C reaches all processes of a terminal, SIGTERM those of a job: the main one decides when to stop, and warns.

    It ends its workers with SIGTERM itself, so that one counts after a moment, in which a step can be finished.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGTERM, lambda *_: signal.setitimer(signal.ITIMER_REAL, LAST_SECONDS))
    warnings.simplefilter("ignore")


def _on_device(batches: Iterable[Sequence[Tensor]], device: torch.device) -> Batches:
    """Batches on a device; on CUDA the next one is copied while this one is worked on."""
    if device.type != "cuda":
        for pixels, labels in batches:
            yield pixels.to(device), labels.to(device)
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


def _arrived(batch: list[Tensor], copied: torch.cuda.Event) -> tuple[Tensor, Tensor]:
    here = torch.cuda.current_stream(batch[0].device)
    here.wait_event(copied)
    for tensor in batch:
        tensor.record_stream(here)
    pixels, labels = batch
    return pixels, labels
