"""Processes that decode, and memory that they share with the one that has the device.

A few slots of one batch each are allocated once. Processes write crops into them, a handful of images at a time, so
that all of them work on the same batch: the device works on one slot while the others are filled, no pixel goes through
a pipe, and memory does not grow with the number of processes. On CUDA the slots are page-locked, and copied while the
device computes. An image that kills its process twice is one that cannot be read; the process is replaced.

Shapes: S slots, B images in one of them, (3, H, W) bytes of an image.
"""

import os
import signal
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, Pipe, wait
from queue import Empty, Full, Queue
from threading import BoundedSemaphore, Event, Thread
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perlclip.data.images import ImageSource, Unreadable, image_name, try_image
from perlclip.data.loading import Lost
from perlclip.files import MIB

SLOTS = 4  # one on the device, the others being filled
HANDFUL = 8  # images that a process is given at once
PENDING = 2  # handfuls that it has: one in work, one to go on with
AHEAD = 256  # images whose bytes or paths are read before they are wanted
HELD = 512  # MiB of them: twice the largest image
PATIENCE = 0.2  # seconds after which who waits looks whether it is over
ALIVE = 2.0  # seconds after which a process looks whether its parent still is
DIED = "the process that decoded image {} died, twice"

Tag = TypeVar("Tag")
Source = ImageSource | Unreadable


class Crops(Protocol):
    """What makes the bytes of an image, and the device's numbers of them: a backbone's preprocessing."""

    @property
    def size(self) -> int: ...
    def crop(self, image: Image.Image) -> np.ndarray: ...
    def pixels(self, crops_B3HW: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Decoded(Generic[Tag]):
    """A batch: what was said of its images, the pixels of those that could be read, and by their place the others."""

    tags: list[Tag]
    pixels: Tensor
    lost: Lost


def decoded(
    items: Iterable[tuple[Tag, Source]], crops: Crops, batch_size: int, device: torch.device, *, workers: int = 0,
    least: int = 0,
) -> Generator[Decoded[Tag], None, None]:  # fmt: skip
    """Images in batches on a device, in order; `least` as in `read_image`.

    The pixels of a batch are there until the next one is asked for.
    """
    if not workers:
        yield from _here(items, crops, batch_size, device, least)
        return
    pool: _Pool[Tag] = _Pool(items, crops, batch_size, workers, least, pinned=device.type == "cuda")
    copying = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    try:
        while (slot := pool.ready()) is not None:
            x_B3HW, copied = _sent(pool.crops_SB3HW[slot.place, : len(slot.tags)], device, copying)
            kept = [i for i in range(len(slot.tags)) if i not in slot.lost]
            if len(kept) < len(slot.tags):
                x_B3HW = x_B3HW[torch.tensor(kept, dtype=torch.long, device=device)]
            yield Decoded(slot.tags, crops.pixels(x_B3HW), slot.lost)
            if copied is not None:
                copied.synchronize()
            pool.free(slot)
    finally:
        pool.close()


def crop_of(source: Source, crops: Crops, least: int = 0) -> np.ndarray | Unreadable:
    """What the tower sees of an image, or why it cannot be read."""
    image = source if isinstance(source, Unreadable) else try_image(source, least)
    if isinstance(image, Unreadable):
        return image
    try:
        return crops.crop(image)
    except Exception as error:  # as decoders, resizing raises whatever it likes
        return Unreadable(image_name(source), f"image {image_name(source)} cannot be resized: {error}")


def _here(
    items: Iterable[tuple[Tag, Source]], crops: Crops, batch_size: int, device: torch.device, least: int
) -> Iterator[Decoded[Tag]]:
    """The same without other processes."""
    remaining = iter(items)
    while batch := list(islice(remaining, batch_size)):
        made = [crop_of(source, crops, least) for _, source in batch]
        views = [torch.from_numpy(np.ascontiguousarray(view)) for view in made if not isinstance(view, Unreadable)]
        lost = {i: view for i, view in enumerate(made) if isinstance(view, Unreadable)}
        stacked = torch.stack(views) if views else torch.empty((0, 3, crops.size, crops.size), dtype=torch.uint8)
        yield Decoded([tag for tag, _ in batch], crops.pixels(stacked.to(device)), lost)


def _sent(x_B3HW: Tensor, device: torch.device, copying: torch.cuda.Stream | None) -> tuple[Tensor, Any]:
    """A slot's bytes on the device, and when they are all there, if that is later."""
    if copying is None:
        return x_B3HW.to(device), None
    with torch.cuda.stream(copying):
        moved = x_B3HW.to(device, non_blocking=True)
        copied = copying.record_event()
    here = torch.cuda.current_stream(device)
    here.wait_event(copied)
    moved.record_stream(here)
    return moved, copied


# ---- in the process that has the device ----


@dataclass
class _Filling(Generic[Tag]):
    """A batch that is being filled."""

    place: int
    tags: list[Tag] = field(default_factory=list)
    lost: Lost = field(default_factory=dict)
    left: int = 0  # images that are not decoded yet
    full: bool = False


@dataclass
class _Task(Generic[Tag]):
    """A handful of images, and where in a slot their crops go."""

    slot: _Filling[Tag]
    places: list[int]
    sources: list[Source]
    alone: bool = False  # an image over which a process has died

    def part(self, chosen: Sequence[int], *, alone: bool = False) -> "_Task[Tag]":
        """Some of them."""
        return _Task(self.slot, [self.places[i] for i in chosen], [self.sources[i] for i in chosen], alone)


class _Worker(Generic[Tag]):
    """A process, and what it was given to do."""

    def __init__(self, shared: tuple[Tensor, Tensor], crops: Crops, least: int) -> None:
        here, there = Pipe()
        context = torch.multiprocessing.get_context()
        self.connection: Connection = here
        self.tasks: deque[_Task[Tag]] = deque()
        self.process = context.Process(target=_work, args=(there, *shared, crops, least, os.getpid()), daemon=True)
        self.process.start()
        there.close()


class _Pool(Generic[Tag]):
    """The slots, the processes, and a thread that gives out work and takes what is done."""

    def __init__(
        self, items: Iterable[tuple[Tag, Source]], crops: Crops, batch_size: int, workers: int, least: int, *,
        pinned: bool,
    ) -> None:  # fmt: skip
        shape = (SLOTS, batch_size, 3, crops.size, crops.size)
        self.crops_SB3HW = _shared(shape)
        self.shared = self.crops_SB3HW, _shared(shape[:2])
        self.done_SB = self.shared[1].numpy()  # what the processes have finished
        self.batch_size, self.how = batch_size, (crops, least)
        self.workers = [self._start() for _ in range(workers)]
        self.pinned = pinned and _pin(self.crops_SB3HW)
        self.stopped = Event()
        self.items = _ahead(items, self.stopped)
        self.idle = deque(range(SLOTS))  # slots that nobody uses
        self.order: deque[_Filling[Tag]] = deque()  # slots in work, in the order of their images
        self.again: deque[_Task[Tag]] = deque()
        self.results: Queue[_Filling[Tag] | BaseException | None] = Queue()
        self.woken, self.wake = Pipe(duplex=False)
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def ready(self) -> _Filling[Tag] | None:
        """The next batch; None behind the last."""
        found = self.results.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def free(self, slot: _Filling[Tag]) -> None:
        """A batch is done with."""
        self.idle.append(slot.place)
        self.wake.send_bytes(b"1")

    def close(self) -> None:
        """End the thread and the processes, whatever they are doing."""
        self.stopped.set()
        self.wake.send_bytes(b"0")
        self.thread.join()
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()  # it holds nothing that could be damaged
            worker.process.join()
        self.wake.close()
        self.woken.close()
        if self.pinned:
            _unpin(self.crops_SB3HW)

    def _start(self) -> _Worker[Tag]:
        return _Worker(self.shared, *self.how)

    def _run(self) -> None:
        """The thread: as long as there is something to decode, keep all processes busy."""
        try:
            while not self.stopped.is_set():
                self._give()
                self._deliver()
                busy = [worker for worker in self.workers if worker.tasks]
                if not busy and not self.order and self.items is None:
                    self.results.put(None)
                    return
                waits: list[Any] = [self.woken, *(worker.connection for worker in busy)]
                for found in wait(waits):
                    if found is self.woken:
                        self.woken.recv_bytes()
                    else:
                        self._take(next(worker for worker in busy if worker.connection is found))
        except BaseException as error:
            self.results.put(error)

    def _give(self) -> None:
        """Something to do for every process that has less than it should, the idlest first."""
        while len((worker := min(self.workers, key=lambda each: len(each.tasks))).tasks) < PENDING:
            task = self.again.popleft() if self.again else self._next()
            if task is None:
                return
            self.done_SB[task.slot.place, task.places] = 0
            worker.tasks.append(task)
            with suppress(OSError):  # it has died; the connection says so at once
                worker.connection.send((task.slot.place, task.places, task.sources))

    def _next(self) -> _Task[Tag] | None:
        """A handful of the images that come next; None if there is no room, or nothing more."""
        if self.items is None:
            return None
        slot = self.order[-1] if self.order and not self.order[-1].full else None
        if slot is None:
            if not self.idle:
                return None
            slot = _Filling(self.idle.popleft())
            self.order.append(slot)
        places, sources = [], []
        for _ in range(min(HANDFUL, self.batch_size - len(slot.tags))):
            item = next(self.items, None)
            if item is None:
                self.items = None
                break
            places.append(len(slot.tags))
            slot.tags.append(item[0])
            sources.append(item[1])
        slot.left += len(places)
        slot.full = self.items is None or len(slot.tags) == self.batch_size
        if not slot.tags:
            self.idle.append(self.order.pop().place)
        return _Task(slot, places, sources) if places else None

    def _deliver(self) -> None:
        while self.order and self.order[0].full and not self.order[0].left:
            self.results.put(self.order.popleft())

    def _take(self, worker: _Worker[Tag]) -> None:
        try:
            lost: list[tuple[int, Unreadable]] = worker.connection.recv()
        except (EOFError, OSError):
            self._replace(worker)
            return
        task = worker.tasks.popleft()
        task.slot.lost.update(lost)
        task.slot.left -= len(task.places)

    def _replace(self, worker: _Worker[Tag]) -> None:
        """A process has died: others do what it was given, and the image that it was at is tried once more, alone."""
        worker.connection.close()
        worker.process.join()
        self.workers[self.workers.index(worker)] = self._start()
        for n, task in enumerate(worker.tasks):
            undone = [i for i, place in enumerate(task.places) if not self.done_SB[task.slot.place, place]]
            if n or not undone:  # it was at another task, or had no time to say what it has done
                self.again.append(task)
            elif task.alone:
                name = image_name(task.sources[0])
                task.slot.lost[task.places[0]] = Unreadable(name, DIED.format(name))
                task.slot.left -= 1
            else:
                rest = [i for i in range(len(task.places)) if i != undone[0]]
                self.again.append(task.part(undone[:1], alone=True))
                self.again.extend([task.part(rest)] if rest else [])


def _ahead(items: Iterable[tuple[Tag, Source]], stopped: Event) -> Iterator[tuple[Tag, Source]] | None:
    """The same, read by a thread before they are wanted: an address or a disk is waited for while others decode."""
    queue: Queue[Any] = Queue(AHEAD)
    end, room = object(), BoundedSemaphore(HELD)

    def read() -> None:
        remaining = iter(items)
        item: Any = None
        while not stopped.is_set() and item is not end and not isinstance(item, BaseException):
            try:
                item = next(remaining, end)
            except BaseException as error:
                item = error
            for _ in range(_mebibytes(item)):
                while not room.acquire(timeout=PATIENCE) and not stopped.is_set():
                    pass
            while not stopped.is_set():
                with suppress(Full):
                    queue.put(item, timeout=PATIENCE)
                    break

    def give() -> Iterator[tuple[Tag, Source]]:
        while not stopped.is_set():
            try:
                item = queue.get(timeout=PATIENCE)
            except Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            if item is end:
                return
            if count := _mebibytes(item):
                room.release(count)
            yield item

    Thread(target=read, daemon=True).start()
    return give()


def _mebibytes(item: Any) -> int:
    """Of an image whose bytes are held; small ones are counted by their number."""
    held = item[1] if isinstance(item, tuple) else None
    return len(held) // MIB if isinstance(held, bytes) else 0


def _shared(shape: Sequence[int]) -> Tensor:
    made: Tensor = torch.zeros(*shape, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return made


def _pin(tensor: Tensor) -> bool:
    """Lock a tensor's pages, so that the device reads them by itself; where that fails it is only slower."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0


def _unpin(tensor: Tensor) -> None:
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    cudart.cudaHostUnregister(tensor.data_ptr())


# ---- in a process that decodes ----


def _work(connection: Connection, crops_SB3HW: Tensor, done_SB: Tensor, crops: Crops, least: int, parent: int) -> None:
    """Decode what comes, until the parent is gone; Ctrl-C is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    slots, done = crops_SB3HW.numpy(), done_SB.numpy()
    tasks: Queue[tuple[int, list[int], list[Source]]] = Queue()
    Thread(target=_receive, args=(connection, tasks, parent), daemon=True).start()
    while True:
        slot, places, sources = tasks.get()
        lost = []
        for place, source in zip(places, sources, strict=True):
            view = crop_of(source, crops, least)
            if isinstance(view, Unreadable):
                lost.append((place, view))
            else:
                slots[slot, place] = view
            done[slot, place] = 1
        connection.send(lost)


def _receive(connection: Connection, tasks: "Queue[Any]", parent: int) -> None:
    """Take work as it comes, also while an image is decoded, so that the parent never waits to give it."""
    try:
        while True:
            # Processes that were started later hold the other end of the pipe as well: its end alone says nothing.
            while not connection.poll(ALIVE):
                if hasattr(os, "getppid") and os.getppid() != parent:
                    os._exit(0)
            tasks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)
