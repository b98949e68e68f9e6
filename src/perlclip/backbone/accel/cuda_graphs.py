"""CUDA graphs: work of one shape recorded once and replayed, without Python or a launch per kernel.

A frozen CLIP that thinks is hundreds of small kernels; at a batch of one or four the card waits for the next launch
most of the time. A recorded graph has all of them in one launch. The numbers are those of the kernels recorded.
"""

import gc
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from perlclip.errors import PerlclipError, first_line, unknown_name

MODES = ("auto", "on", "off")
SMALL = 256  # images: a larger batch keeps the card busy while the next kernels are launched
FINE = 64  # images from which on sizes are multiples of a quarter of that, or of all of it, and no powers of two
WARM_UPS = 2  # runs before recording, in which libraries choose their kernels
Work = Callable[..., Sequence[Tensor]]


_recording = [0]  # for all threads, as backward passes have their own
_one = RLock()  # recording at a time


def recording() -> bool:
    """Whether what runs now is on its way into a graph, so that launching a kernel will cost nothing."""
    return _recording[0] > 0


@contextmanager
def _record() -> Iterator[None]:
    here = torch.cuda.current_stream()
    with _one:
        _recording[0] += 1
        try:
            yield
        finally:
            _recording[0] -= 1
            torch.cuda.set_stream(here)  # which a recording that fails does not see to


def graph_size(count: int, *, coarse: bool = False) -> int:
    """Images of the graph that takes so many: there are graphs for few sizes, the rest of a batch is padding."""
    if count <= FINE:
        return 1 << (count - 1).bit_length()
    step = FINE if coarse else FINE // 4
    return -(-count // step) * step


class Recorded:
    """A function of tensors as a CUDA graph. What it returns is overwritten by the next call.

    Graphs that are replayed one after the other may share a `pool`: the memory of what each of them makes meanwhile.
    """

    def __init__(self, work: Work, inputs: Sequence[Tensor], pool: Any = None) -> None:
        with torch.inference_mode(False):  # they are written to from wherever it is called
            self.inputs = [tensor.clone() for tensor in inputs]
        gc.collect()  # what is left of earlier backward passes would tie the recording to their stream
        with _on_device_of(self.inputs), _record():
            self._warm_up(work)
            self.graph = torch.cuda.CUDAGraph()
            # Other threads, those that pin the next batch, may go on meanwhile.
            with torch.cuda.graph(self.graph, pool, stream=_stream(None), capture_error_mode="thread_local"):
                self.outputs = work(*self.inputs)
            self.pool = self.graph.pool()

    def _warm_up(self, work: Work) -> None:
        here, side = torch.cuda.current_stream(), _stream(None)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                work(*self.inputs)
        here.wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph has memory of its own

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine.copy_(given, non_blocking=True)
        with _on_device_of(self.inputs):
            self.graph.replay()
        return self.outputs


class Compiled:
    """A function of tensors that is recorded for each shape, at its call number `after`, where that is possible.

    `mode` is "auto" (on for CUDA, off elsewhere), "on" or "off". If recording fails, a warning says why and the
    function runs as it is for that shape. `seconds` is what recording has cost so far.
    """

    def __init__(self, work: Work, device: torch.device, mode: str = "auto", *, after: int = 2) -> None:
        self.work, self.after = work, after
        self.on = is_on(mode, device)
        self.seconds = 0.0
        self._pool: Any = None
        self._calls: Counter[Any] = Counter()
        self._recorded: dict[Any, Recorded | Work] = {}

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if not self.on:
            return self.work(*inputs)
        key = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        self._calls[key] += 1
        if self._calls[key] < self.after:
            return self.work(*inputs)
        if key not in self._recorded:
            began = time.perf_counter()
            self._recorded[key] = self._record(inputs)
            self.seconds += time.perf_counter() - began
        return self._recorded[key](*inputs)

    def _record(self, inputs: Sequence[Tensor]) -> "Recorded | Work":
        try:
            recorded = Recorded(self.work, inputs, self._pool)
            self._pool = recorded.pool
            return recorded
        except PerlclipError:
            raise
        except Exception as error:  # CUDA's, Triton's, or the work's own, which it will then raise again
            reason = first_line(error.__context__ or error)
        gc.collect()  # what the failed recording held
        torch.cuda.empty_cache()
        warnings.warn(f"not compiled, going on without: {reason}", RuntimeWarning, stacklevel=3)
        return self.work

    @property
    def failed(self) -> bool:
        """Whether something could not be recorded."""
        return any(each is self.work for each in self._recorded.values())

    def forget(self) -> None:
        """What was recorded holds no longer; the next call records anew."""
        self._recorded.clear()
        self._calls.clear()


def is_on(mode: str, device: torch.device) -> bool:
    """Whether `compile=mode` means CUDA graphs on this device."""
    if mode not in MODES:
        raise unknown_name("value of compile:", mode, MODES)
    if mode == "on" and device.type != "cuda":
        raise PerlclipError(f"compile='on' needs a CUDA device, not {device.type}; 'auto' is on where it can be")
    return mode != "off" and device.type == "cuda"


class Beside:
    """Work that nothing waits for until `join`: in a recorded graph it runs at the same time as what follows."""

    def __init__(self, device: torch.device) -> None:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self.here = torch.cuda.current_stream(device) if capturing else None
        self.side = _stream(device) if capturing else None
        self.context: AbstractContextManager[Any] = torch.cuda.stream(self.side) if capturing else nullcontext()

    def __enter__(self) -> "Beside":
        if self.side is not None and self.here is not None:
            self.side.wait_stream(self.here)
        self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def join(self) -> None:
        """Wait for it."""
        if self.side is not None and self.here is not None:
            self.here.wait_stream(self.side)


def _stream(device: torch.device | None) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _on_device_of(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Streams and graphs belong to the current device, which need not be that of the tensors."""
    return torch.cuda.device(tensors[0].device) if tensors else nullcontext()
