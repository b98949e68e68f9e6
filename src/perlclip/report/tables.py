"""A table as data: what `formats`, `plots` and the page show, so that all of them show the same numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perlclip.report.comparison import Row
from perlclip.report.paper import Published
from perlclip.viz.markup import MISSING

OUTSIDE = "†"
SAME = 0.2  # points that an untrained CLIP may differ by, for its number format and the resizing of images


@dataclass(frozen=True)
class Cell:
    """A number, or a word instead, with what belongs beside it."""

    value: float | None = None
    spread: float | None = None  # standard deviation over seeds
    span: tuple[float, float] | None = None  # interval of a difference, range of a count
    paper: Published | None = None
    word: str = ""
    untrained: bool = False  # so that it has no spread

    @property
    def limit(self) -> float | None:
        """How far the paper's number may be away; a single seed cannot tell."""
        return SAME if self.untrained else None if self.spread is None else 2 * self.spread

    @property
    def outside(self) -> bool:
        """Whether it is further away."""
        if self.value is None or self.limit is None or self.paper is None:
            return False
        return abs(self.value - self.paper.value) > self.limit


@dataclass(frozen=True)
class Column:
    """`kind` is one of `NUMBERS`."""

    title: str
    kind: str = "accuracy"


@dataclass(frozen=True)
class Line:
    """A row of the table; `setting` is the value that an ablation gives to what it varies."""

    row: Row
    label: str
    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]
    setting: Any = None


@dataclass(frozen=True)
class Shown:
    """A cell in words: the number, what stands beside it, and whether it is `best` or `second` of its column."""

    number: str
    beside: list[str]
    mark: str
    value: float | None
    kind: str

    def __str__(self) -> str:
        return " ".join([self.number, *self.beside])


@dataclass(frozen=True)
class Table:
    """`name` is its file's, `caption` a sentence that stands alone, `head` the title of the labels."""

    name: str
    title: str
    caption: str
    head: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]

    def column(self, title: str) -> list[Cell]:
        """The cells of one column."""
        index = [column.title for column in self.columns].index(title)
        return [line.cells[index] for line in self.lines]

    def marks(self) -> dict[tuple[int, int], str]:
        """(line, column) of `best` and `second` accuracies; what is printed the same is marked the same.

        Where all are the same, or there is one alone, nothing is best.
        """
        found: dict[tuple[int, int], str] = {}
        for c, column in enumerate(self.columns):
            cells = enumerate(line.cells[c] for line in self.lines)
            ranked = {
                i: number(cell, column) for i, cell in cells if column.kind == "accuracy" and cell.value is not None
            }
            texts = sorted(set(ranked.values()), key=float)[::-1]
            for mark, text in zip(("best", "second"), texts if len(texts) > 1 else (), strict=False):
                found |= {(i, c): mark for i, other in ranked.items() if other == text}
        return found

    def texts(self) -> list[tuple[Line, list[Shown]]]:
        """Of each line its cells in words."""
        marks = self.marks()
        return [
            (
                line,
                [
                    Shown(number(cell, column), beside(cell, column), marks.get((i, c), ""), cell.value, column.kind)
                    for c, (cell, column) in enumerate(zip(line.cells, self.columns, strict=True))
                ],
            )
            for i, line in enumerate(self.lines)
        ]


NUMBERS: dict[str, Callable[[Any], str]] = {
    "accuracy": lambda cell: f"{cell.value:.2f}",
    "difference": lambda cell: signed(cell.value),
    "ratio": lambda cell: f"{cell.value:,.0f}×" if cell.value >= 9.5 else f"{float(f'{cell.value:.2g}'):g}×",
    "count": lambda cell: "–".join(f"{count:,.0f}" for count in cell.span or (cell.value,)),
}


def signed(value: float) -> str:
    """With a sign as typography has it, and none for nothing."""
    text = f"{value:+.2f}".replace("-", "−")
    return text if text[1:] != "0.00" else "0.00"


def number(cell: Cell, column: Column) -> str:
    """The number alone, or what stands for it."""
    return MISSING if cell.value is None and not cell.word else cell.word or NUMBERS[column.kind](cell)


def beside(cell: Cell, column: Column) -> list[str]:
    """What follows the number: ± spread, [interval], (the paper's)."""
    parts = []
    if cell.spread is not None:
        parts.append(f"± {cell.spread:.2f}")
    if cell.span and column.kind == "difference":
        parts.append(f"[{signed(cell.span[0])}, {signed(cell.span[1])}]")
    if cell.paper:
        times = "×" * (column.kind == "ratio")
        parts.append(f"({cell.paper.printed.replace('-', '−')}{times}{OUTSIDE * cell.outside})")
    return parts
