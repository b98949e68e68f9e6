"""Plain tables as Markdown and CSV, and text that stays text in Markdown."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MISSING = "–"

# What Markdown, or GitHub's mathematics in it, would take for its own. An underscore inside a word is none of it.
_SPECIAL = re.compile(r"[\\`*\[\]<>|~$]|&(?=[#\w]+;)|(?<!\w)_|_(?!\w)")


def markdown_text(text: str) -> str:
    """Any text as Markdown that shows it, on one line: names, paths and settings are the user's."""
    return _SPECIAL.sub(r"\\\g<0>", " ".join(text.split()))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of words as Markdown, its columns below each other."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def csv_text(header: Sequence[str], rows: Iterable[Iterable[Any]], digits: int | None = None) -> str:
    """A CSV file; numbers at full precision unless a number of digits is given."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow(f"{cell:.{digits}g}" if digits and isinstance(cell, float) else cell for cell in row)
    return file.getvalue()


def csv_lines(lines: Sequence[Mapping[str, Any]]) -> str:
    """A CSV file with the columns that any of the lines has, those of the longest line first."""
    header = list(dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line))
    return csv_text(header, ([line.get(key) for key in header] for line in lines))
