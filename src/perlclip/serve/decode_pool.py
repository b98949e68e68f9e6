"""Images are decoded in processes of their own, which may die: a damaged file takes down its decoder, nothing else.

A decoder gets an image file's bytes through a pipe and gives back the backbone's view of it, or a sentence; no pickle.
It has a bound on memory and on time. One that has died or takes too long is replaced by the next.
"""

import asyncio
import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
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
        self._make_of = views, max_pixels
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
            reply = decoder.ask(data, self.seconds, 1 + 12 * self.size**2 + LONGEST)
            if reply[:1] != SENTENCE and len(reply) != 1 + 12 * self.size**2:
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
        if reply[:1] == SENTENCE:
            raise Refusal(422, reply[1:].decode(errors="replace"))
        view = torch.from_numpy(np.frombuffer(bytearray(reply[1:]), np.float32).reshape(3, self.size, self.size))
        if self._stream is None:
            return view.to(self.device)
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

    def __init__(self, context: Any, views: Views, max_pixels: int) -> None:
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, views, max_pixels), daemon=True, name="decoder")
        self.process.start()
        theirs.close()

    def ask(self, data: bytes, seconds: float, most: int) -> bytes:
        """Its reply, of at most so many bytes: an OSError or EOFError from one that is not to be asked again."""
        self.channel.send_bytes(data)
        if not self.channel.poll(seconds):
            raise TimeoutError
        reply: bytes = self.channel.recv_bytes(most)
        return reply

    def end(self) -> None:
        self.channel.close()
        self.process.kill()
        self.process.join()
        self.process.close()


def _work(channel: Connection, views: Views, max_pixels: int) -> None:
    """The process: until the service is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C; the service ends it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    images.MAX_PIXELS = min(images.MAX_PIXELS, max_pixels)  # this process has no other use for it
    _bound_memory()
    while True:
        try:
            data = channel.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            view = views.test_view(read_image(data)).float().contiguous()
            reply = PIXELS + view.numpy().tobytes()
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
