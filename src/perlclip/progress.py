"""Progress bars on stderr: there for people, silent in pipes and logs."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Bar:
    """A bar that can be advanced; without a drawing behind it, it does nothing."""

    def __init__(self, advance: Callable[[int, str], None] | None = None) -> None:
        self._advance = advance

    def __call__(self, amount: int = 1, note: str = "") -> None:
        if self._advance:
            self._advance(amount, note)


@contextmanager
def progress_bar(title: str, total: int, *, show: bool = True, done: int = 0) -> Iterator[Bar]:
    """A bar of `total` units; drawn only on a terminal."""
    if not (show and sys.stderr.isatty()):
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total, completed=done, note="")
        yield Bar(lambda amount, note: progress.update(task, advance=amount, note=note))
