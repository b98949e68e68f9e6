"""What all tables of the documents are made with.

Everything is read from docs/results, which is committed.
"""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
HALVES = ("base", "novel")
Row = dict[str, str]


class MissingError(Exception):
    """The results that a table is made of have not been made yet."""


@cache
def read(path: Path) -> list[Row]:
    """A CSV file of the results."""
    if not (ROOT / path).exists():
        raise MissingError(path)
    with (ROOT / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As the documents have it."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))
