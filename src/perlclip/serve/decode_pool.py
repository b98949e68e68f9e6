"""Images are decoded in processes of their own, which may die: a damaged file takes down its decoder, nothing else.

A decoder gets an image file's bytes through a pipe and gives back the backbone's view of it, in memory that both have,
or a sentence; no pickle. It has a bound on memory and on time. One that has died or takes too long is replaced by the
next.
"""

import asyncio
import mmap
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver, reduction
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from perlclip.data import images
from perlclip.data.images import read_image
from perlclip.data.loading import Views
from perlclip.errors import PerlclipError
from perlclip.files import MIB
from perlclip.serve.guard import Refusal, busy

MEMORY = 2048 * MIB  # that a decoder may take beyond what it starts with
PIXELS, SENTENCE = b"+", b"-"
LONGEST = 4096  # bytes of a sentence
CPU = torch.device("cpu")


class Decoders:
    """So many decoding processes; `deaths` counts those that had to be replaced."""

    def __init__(
        self, views: Views, size: int, *, device: torch.device = CPU, workers: int = 2,
        max_pixels: int = 50_000_000, seconds: float = 10.0,
    ) -> None:  # fmt: skip
        self.size, self.device, self.seconds, self.deaths = size, device, seconds, 0
        self._context = _forkserver()
        self._make_of = views, size, max_pixels
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decoder")
        self._idle: SimpleQueue[_Decoder] = SimpleQueue()
        for _ in range(workers):
            self._idle.put(_Decoder(self._context, *self._make_of))

    async def decode(self, data: bytes) -> Tensor:
        """The view of an image file; a `Refusal` that says why there is none."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.decode_now, data)

    def decode_now(self, data: bytes) -> Tensor:
        """The same, waiting."""
        decoder = self._idle.get()
        try:
            reply = decoder.ask(data, self.seconds)
            if reply == PIXELS:
                return self._taken(decoder.view)
            if reply[:1] != SENTENCE:
                raise EOFError
        except (OSError, EOFError) as error:
            self.deaths += 1
            decoder.end()
            decoder = _Decoder(self._context, *self._make_of)
            if isinstance(error, TimeoutError):
                raise Refusal(422, f"decoding an image took longer than {self.seconds:g} seconds") from error
            raise busy("the process that decoded an image has ended; it is replaced") from error
        finally:
            self._idle.put(decoder)
        raise Refusal(422, reply[1:].decode(errors="replace"))

    def _taken(self, view: Tensor) -> Tensor:
        """A copy for the engine: the decoder's next image comes to the same place."""
        if self._stream is None:
            return view.clone().to(self.device)
        # Here, one by one, as a batch of them would keep the engine waiting; and beside the engine's own stream, or
        # each copy would wait for all that the engine has begun.
        with torch.cuda.stream(self._stream):
            view = view.to(self.device)
        # So that its memory is not taken for another image before the engine has read it.
        view.record_stream(torch.cuda.current_stream(self.device))
        return view

    def pids(self) -> list[int]:
        """Of the decoders that have nothing to do right now."""
        found = [self._idle.get() for _ in range(self._idle.qsize())]
        for decoder in found:
            self._idle.put(decoder)
        return [decoder.process.pid or 0 for decoder in found]

    def close(self) -> None:
        """End them."""
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().end()


def _forkserver() -> Any:
    """Decoders are forked from a process that has only imported what is needed.

    One with threads or CUDA cannot be forked, and a fresh one would take seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.models.clip.image_processing_pil_clip"])
    return context


def prepare_decoders() -> None:
    """Have that process import what it needs already, while this one loads a backbone."""
    _forkserver()
    forkserver.ensure_running()


class _Decoder:
    """One process, as seen from the service."""

    def __init__(self, context: Any, views: Views, size: int, max_pixels: int) -> None:
        self.channel, theirs = context.Pipe()
        self.process = context.Process(
            target=_work, args=(theirs, views, size, max_pixels), daemon=True, name="decoder"
        )
        self.process.start()
        theirs.close()
        with _memory_file() as file:
            self.view = _view_of(file.fileno(), size, grow=True)
            with suppress(OSError):  # of one that has died already, as who asks it will find
                reduction.send_handle(self.channel, file.fileno(), self.process.pid)

    def ask(self, data: bytes, seconds: float) -> bytes:
        """Its reply: an OSError or EOFError from one that is not to be asked again."""
        self.channel.send_bytes(data)
        if not self.channel.poll(seconds):
            raise TimeoutError
        reply: bytes = self.channel.recv_bytes(1 + LONGEST)
        return reply

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _memory_file() -> Any:
    """A file without a name, in memory where there is such a thing."""
    return os.fdopen(os.memfd_create("view"), "r+b") if hasattr(os, "memfd_create") else TemporaryFile()


def _view_of(file: int, size: int, *, grow: bool = False) -> Tensor:
    """The pixels of a view, (3, size, size), in a file's memory."""
    if grow:
        os.truncate(file, 12 * size**2)
    return torch.frombuffer(mmap.mmap(file, 12 * size**2), dtype=torch.float32).reshape(3, size, size)


def _work(channel: Connection, views: Views, size: int, max_pixels: int) -> None:
    """The process: until the service is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C; the service ends it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    images.MAX_PIXELS = min(images.MAX_PIXELS, max_pixels)  # this process has no other use for it
    try:
        file = reduction.recv_handle(channel)
    except (EOFError, OSError, RuntimeError):  # the service has gone already
        return
    shared = _view_of(file, size)
    os.close(file)
    _bound_memory()
    while True:
        try:
            data = channel.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            shared.copy_(views.test_view(read_image(data)))
            reply = PIXELS
        except PerlclipError as error:
            reply = SENTENCE + str(error)[: LONGEST // 4].encode(errors="replace")
        except Exception as error:  # of the preprocessing, such as MemoryError
            reply = SENTENCE + f"an image cannot be prepared: {type(error).__name__}".encode()
        channel.send_bytes(reply)


def _bound_memory() -> None:
    """On Linux; elsewhere there is no such bound."""
    try:
        import resource

        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):
        pass
