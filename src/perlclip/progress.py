"""Progress on stderr: a bar for people; in a pipe or a log a plain line now and then.

The first line comes after ten seconds, so that what is quick says nothing. The time between two lines doubles from
there to five minutes: an hour's work leaves fifteen lines.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

FIRST, LONGEST = 10.0, 300.0  # seconds between two lines of a log
Listener = Callable[[str, int, int, str], None]  # title, units done, all units, a note
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


class Bar:
    """A bar that can be advanced; without a drawing behind it, it does nothing."""

    def __init__(self, advance: Callable[[int, str, int | None], None] | None = None) -> None:
        self._advance = advance

    def __call__(self, amount: int = 1, note: str = "", total: int | None = None) -> None:
        """So much is done; `total` is for who knows better now how much there is."""
        if self._advance:
            self._advance(amount, note, total)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Bars that this thread opens meanwhile are not drawn but told to a listener; what it raises ends the work."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def progress_bar(title: str, total: int, *, show: bool = True, done: int = 0) -> Iterator[Bar]:
    """A bar of `total` units on a terminal, lines elsewhere."""
    listener = _listener.get()
    if not show:
        yield Bar()
    elif listener:
        yield _told(listener, title, total, done)
    elif not sys.stderr.isatty():
        lines = _Lines(title, total, done)
        yield Bar(lines.advance)
        lines.end()
    else:
        with _drawn(title, total, done) as bar:
            yield bar


@contextmanager
def _drawn(title: str, total: int, done: int) -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")
        yield Bar(lambda amount, note, total: progress.update(task, advance=amount, note=note, total=total))


def _told(listener: Listener, title: str, total: int, done: int) -> Bar:
    def advance(amount: int, note: str, now: int | None) -> None:
        nonlocal done, total
        done, total = done + amount, total if now is None else now
        listener(title, done, total, note)

    return Bar(advance)


class _Lines:
    """`fit: 120 of 500, loss 0.1234, 3 min left`, every so often."""

    def __init__(self, title: str, total: int, done: int) -> None:
        self.title, self.total, self.done, self.before = title, total, done, done
        self.started = self.said = time.monotonic()
        self.pause = FIRST

    def advance(self, amount: int, note: str, total: int | None) -> None:
        self.done += amount
        self.total = self.total if total is None else total
        now = time.monotonic()
        if now - self.said < self.pause or self.done >= self.total:
            return
        self.said, self.pause = now, min(2 * self.pause, LONGEST)
        made = self.done - self.before
        left = (now - self.started) * (self.total - self.done) / made if made > 0 else 0.0
        words = [f"{self.title}: {self.done:,} of {self.total:,}", note, f"{_duration(left)} left"]
        self.say(", ".join(word for word in words if word))

    def end(self) -> None:
        """Who has seen it begin shall see it end."""
        if self.said > self.started:
            self.say(f"{self.title}: {self.done:,} done in {_duration(time.monotonic() - self.started)}")

    def say(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
