"""A table as Markdown, CSV and LaTeX, and runs as CSV."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from perlclip.bench.store import Record
from perlclip.report.tables import OUTSIDE, Cell, Column, Table, beside, number

_MARKDOWN = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
_LATEX = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
_WIDTH = 107  # characters of \scriptsize that a page of 14 cm takes
_GAP = 2  # what the space between two columns costs


def markdown(table: Table) -> str:
    """To read on GitHub and to paste."""
    rows = [
        [label, *(f"{_MARKDOWN[mark].format(main)} {rest}".rstrip() for main, rest, mark in cells)]
        for label, cells in texts(table)
    ]
    return aligned([table.head, *(column.title for column in table.columns)], rows)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any table of words as Markdown, its columns below each other."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def texts(table: Table) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Of each line its label, and of each cell the number, what is beside it, and how it is marked."""
    marks = table.marks()
    return [
        (
            line.label,
            [
                (number(cell, column), beside(cell, column), marks.get((i, c), ""))
                for c, (cell, column) in enumerate(zip(line.cells, table.columns, strict=True))
            ],
        )
        for i, line in enumerate(table.lines)
    ]


# ---- CSV ----


def plain_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Any table at full precision."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return file.getvalue()


def comma_separated(table: Table) -> str:
    """Full precision, a column for each part of a cell."""
    papers = [any(line.cells[c].paper for line in table.lines) for c in range(len(table.columns))]
    file = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for line in table.lines:
        row = line.row
        values: dict[str, object] = {"label": line.label, "method": row.method, "settings": row.setting}
        values |= {"recipe": row.recipe, "seeds": " ".join(map(str, line.seeds))}
        for cell, column, paper in zip(line.cells, table.columns, papers, strict=True):
            values |= dict(_parts(cell, column, paper))
        if writer is None:
            writer = csv.DictWriter(file, list(values), lineterminator="\n")
            writer.writeheader()
        writer.writerow(values)
    return file.getvalue()


def _parts(cell: Cell, column: Column, with_paper: bool) -> Iterator[tuple[str, object]]:
    name = column.title.replace("×", "times").replace("Δ", "delta").replace(" ", "_")
    whole = column.kind == "count" and cell.value is not None and cell.value.is_integer()
    yield name, int(cell.value or 0) if whole else cell.value
    if column.kind == "accuracy":
        yield f"{name}_std", cell.spread
    if column.kind == "difference":
        low, high = cell.span or (None, None)
        yield from ((f"{name}_low", low), (f"{name}_high", high))
    if with_paper:
        yield f"{name}_paper", cell.paper and cell.paper.printed
    if with_paper and column.kind == "accuracy":
        yield f"{name}_outside", "" if cell.paper is None or cell.spread is None else int(cell.outside)


def runs_csv(records: Sequence[Record]) -> str:
    """A line for each run at full precision: what it is, accuracy of every test and step, parameters, costs."""
    lines = [_line(record) for record in records]
    header = dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line)
    file = io.StringIO()
    writer = csv.DictWriter(file, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _line(record: Record) -> dict[str, Any]:
    settings = ";".join(f"{key}={value}" for key, value in record["run"]["settings"].items())
    line = {**record["run"], "settings": settings, "parameters": record["parameters"]}
    line |= {f"{part}_seconds": seconds for part, seconds in record["seconds"].items()} | record.get("memory", {})
    line |= {test: metrics["accuracy"] for test, metrics in record["metrics"].items()}
    for test, metrics in record["metrics"].items():
        steps = metrics.get("step_accuracy", [])
        line |= {f"{test}_k{k}": accuracy for k, accuracy in enumerate(steps) if len(steps) > 1}
    return line


# ---- LaTeX ----

_ESCAPES = str.maketrans(
    {
        "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "†": r"$\dagger$", "–": "--", "Δ": r"$\Delta$", "λ": r"$\lambda$",
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }
)  # fmt: skip


def escaped(text: str) -> str:
    """As LaTeX source."""
    return text.translate(_ESCAPES)


def latex(table: Table) -> str:
    r"""A `table` with \label{tab:NAME} that needs only booktabs; what is too wide goes on below."""
    blocks = "\n\\par\\medskip\n".join(_tabular(table, block) for block in _blocks(table))
    return _floating(table.name, " ".join([table.caption, "; ".join(_legend(table)) + "."]), blocks)


def plain_latex(name: str, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Any table of words."""
    return _floating(
        name, caption, _ruled("l" * len(header), [[escaped(cell) for cell in row] for row in (header, *rows)])
    )


def _floating(name: str, caption: str, body: str) -> str:
    return (
        "\\begin{table}[htbp]\n\\centering\n\\scriptsize\n\\setlength{\\tabcolsep}{2pt}\n"
        f"\\caption{{{escaped(caption)}}}\n\\label{{tab:{name}}}\n\\smallskip\n{body}\n\\end{{table}}\n"
    )


def _legend(table: Table) -> Iterator[str]:
    """How to read what is in the cells."""
    cells = [
        (cell, column.kind) for line in table.lines for cell, column in zip(line.cells, table.columns, strict=True)
    ]
    yield "Best bold, second best underlined"
    if any(cell.spread is not None for cell, _ in cells):
        yield "± standard deviation over seeds"
    if any(cell.span and kind == "difference" for cell, kind in cells):
        yield "[95 % interval of a paired bootstrap over images]"
    if any(cell.paper for cell, _ in cells):
        yield f"(number of the paper, {OUTSIDE} more than two standard deviations away)"


def _blocks(table: Table) -> list[list[int]]:
    """Columns that fit side by side."""
    lines = texts(table)
    room = _WIDTH - max(len(label) for label, _ in lines)
    blocks: list[list[int]] = [[]]
    used = 0
    for c, column in enumerate(table.columns):
        width = _GAP + max(len(column.title), *(len(f"{cells[c][0]} {cells[c][1]}".rstrip()) for _, cells in lines))
        if used + width > room and blocks[-1]:
            blocks.append([])
            used = 0
        blocks[-1].append(c)
        used += width
    return blocks


def _tabular(table: Table, columns: list[int]) -> str:
    rows = [[table.head, *(table.columns[c].title for c in columns)]]
    rows[0] = [escaped(title) for title in rows[0]]
    for label, cells in texts(table):
        chosen = (cells[c] for c in columns)
        rows.append(
            [
                escaped(label),
                *(f"{_LATEX[m].format(escaped(main))} {escaped(rest)}".rstrip() for main, rest, m in chosen),
            ]
        )
    alignment = "".join("r" if table.columns[c].kind in ("count", "ratio") else "l" for c in columns)
    return _ruled(f"l{alignment}", rows)


def _ruled(alignment: str, rows: Sequence[Sequence[str]]) -> str:
    """A `tabular`, its first row the header."""
    head, *body = (" & ".join(row) + r" \\" for row in rows)
    lines = [rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
