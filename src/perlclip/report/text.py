"""A table as Markdown, CSV and LaTeX."""

import csv
import io
from collections.abc import Iterator

from perlclip import tables
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
    return tables.markdown([table.head, *(column.title for column in table.columns)], rows)


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
    caption = escaped(" ".join([table.caption, "; ".join(_legend(table)) + "."]))
    return (
        "\\begin{table}[htbp]\n\\centering\n\\scriptsize\n\\setlength{\\tabcolsep}{2pt}\n"
        f"\\caption{{{caption}}}\n\\label{{tab:{table.name}}}\n\\smallskip\n{blocks}\n\\end{{table}}\n"
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
    head, *body = (" & ".join(row) + r" \\" for row in rows)
    aligned = "".join("r" if table.columns[c].kind in ("count", "ratio") else "l" for c in columns)
    lines = [rf"\begin{{tabular}}{{@{{}}l{aligned}@{{}}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
