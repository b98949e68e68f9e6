"""Rows of different requests become batches: what is there when the engine is free, or comes within a moment.

Nothing piles up: `reserve` refuses what would wait too long, before an image is decoded.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread

from perlclip.errors import PerlclipError
from perlclip.inference.judging import Prediction
from perlclip.serve.engine import Engine, ImageRow
from perlclip.serve.guard import busy
from perlclip.thinking.limits import clock

log = logging.getLogger("perlclip.serve")
Found = Prediction | PerlclipError


@dataclass(eq=False)
class _Job:
    """The rows of one request."""

    rows: Sequence[ImageRow]
    done: asyncio.Future[list[Found]]
    loop: asyncio.AbstractEventLoop
    came: float = field(default_factory=clock)
    answers: dict[int, Found] = field(default_factory=dict)

    def finish(self) -> None:
        if not self.done.done():  # it may have been given up meanwhile
            self.done.set_result([self.answers[i] for i in range(len(self.rows))])


class Batcher:
    """A thread that answers batches of at most `batch_size` rows, each begun at most `max_wait_ms` after its first.

    Before it is `ready` it does what is to be done `first`; whoever asks meanwhile waits.
    """

    def __init__(
        self, engine: Engine, *, batch_size: int = 32, max_wait_ms: float = 2.0, max_rows: int = 1024,
        first: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        if batch_size < 1 or max_rows < 1 or not 0 <= max_wait_ms <= 1000:
            raise PerlclipError("a batch and the queue have at least 1 row, and it waits for 0 to 1000 ms")
        self.engine, self.batch_size, self.max_wait = engine, batch_size, max_wait_ms / 1000
        self.max_rows, self.reserved = max_rows, 0
        self.sizes: deque[int] = deque(maxlen=1000)  # of the last batches
        self.batches = self.rows = 0
        self._waiting: deque[tuple[_Job, int]] = deque()
        self._wake = Condition()
        self._ending = self.ready = False
        self._first = first
        self._thread = Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it answers."""
        return self._thread.is_alive() and not self._ending

    @contextmanager
    def reserve(self, rows: int) -> Iterator[None]:
        """A place in the queue for so many rows, taken before the work on them begins; for the event loop's thread."""
        if rows > self.max_rows:
            raise PerlclipError(f"a request asks for at most {self.max_rows} answers at once, not {rows}")
        if self.reserved + rows > self.max_rows:
            raise busy("too many images are waiting; come back in a second")
        self.reserved += rows
        try:
            yield
        finally:
            self.reserved -= rows

    async def answer(self, rows: Sequence[ImageRow]) -> list[Found]:
        """The rows' answers, in their order; an error in the place of one that has none."""
        loop = asyncio.get_running_loop()
        job = _Job(rows, loop.create_future(), loop)
        with self._wake:
            self._waiting.extend((job, i) for i in range(len(rows)))
            self._wake.notify()
        return await job.done

    def close(self) -> None:
        """What waits is answered, then the thread ends."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._first()
        except Exception:  # whoever asks is told what is wrong
            log.exception("could not warm up")
        self.ready = True
        while batch := self._next():
            rows = [job.rows[i] for job, i in batch]
            for (job, i), found in zip(batch, self._answer(rows), strict=True):
                job.answers[i] = found
            self.batches, self.rows = self.batches + 1, self.rows + len(rows)
            self.sizes.append(len(rows))
            for job in {id(job): job for job, _ in batch}.values():
                if len(job.answers) == len(job.rows) and not job.loop.is_closed():
                    job.loop.call_soon_threadsafe(job.finish)

    def _next(self) -> list[tuple[_Job, int]]:
        """The next batch; none at the end."""
        with self._wake:
            while True:
                while not self._waiting:
                    if self._ending:
                        return []
                    self._wake.wait()
                until = self._waiting[0][0].came + self.max_wait
                while len(self._waiting) < self.batch_size and not self._ending and (left := until - clock()) > 0:
                    self._wake.wait(left)
                batch: list[tuple[_Job, int]] = []
                while self._waiting and len(batch) < self.batch_size:
                    job, i = self._waiting.popleft()
                    if not job.done.cancelled():  # whoever asked has gone
                        batch.append((job, i))
                if batch:
                    return batch

    def _answer(self, rows: Sequence[ImageRow]) -> Sequence[Found]:
        """If a batch fails as a whole, as for want of memory, its halves are tried."""
        try:
            return self.engine.answer(rows)
        except PerlclipError as error:
            if len(rows) == 1:
                return [error]
        except Exception:
            log.exception("a batch of %d rows failed", len(rows))
            if len(rows) == 1:
                return [PerlclipError("the service failed to answer; its log says why")]
        middle = len(rows) // 2
        return [*self._answer(rows[:middle]), *self._answer(rows[middle:])]
