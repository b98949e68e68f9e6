"""A table as Markdown, CSV and LaTeX, and runs as CSV."""

from collections.abc import Iterator, Sequence
from typing import Any

from perlclip.bench.store import UNTRAINED, Record
from perlclip.report.paper import CALLED, NAMES
from perlclip.report.tables import OUTSIDE, SAME, Cell, Column, Line, Shown, Table
from perlclip.viz.markup import aligned, csv_lines, markdown_text

_MARKDOWN = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
_LATEX = {"best": r"\textbf{{{}}}", "second": r"\underline{{{}}}", "": "{}"}
_WIDTH = 107  # characters of \scriptsize that a page of 14 cm takes
_GAP = 2  # what the space between two columns costs


def markdown(table: Table) -> str:
    """To read on GitHub and to paste."""
    rows = [
        [
            markdown_text(line.label),
            *(" ".join([_MARKDOWN[cell.mark].format(cell.number), *cell.beside]) for cell in cells),
        ]
        for line, cells in table.texts()
    ]
    return aligned([markdown_text(title) for title in (table.head, *(column.title for column in table.columns))], rows)


# ---- CSV ----


def comma_separated(table: Table) -> str:
    """Full precision, a column for each part of a cell."""
    papers = [any(line.cells[c].paper for line in table.lines) for c in range(len(table.columns))]
    lines = []
    for line in table.lines:
        row = line.row
        values: dict[str, object] = {"label": line.label, "method": row.method, "settings": row.setting}
        values |= {"recipe": row.recipe, "seeds": " ".join(map(str, line.seeds))}
        for cell, column, paper in zip(line.cells, table.columns, papers, strict=True):
            values |= dict(_parts(cell, column, paper))
        lines.append(values)
    return csv_lines(lines)


def _parts(cell: Cell, column: Column, with_paper: bool) -> Iterator[tuple[str, object]]:
    name = column.title.replace("×", "times").replace("Δ", "delta").replace(" ", "_")
    whole = column.kind == "count" and cell.value is not None and cell.value.is_integer()
    yield name, cell.word if column.kind == "word" else int(cell.value or 0) if whole else cell.value
    if column.kind == "accuracy":
        yield f"{name}_std", cell.spread
    if column.kind == "difference":
        low, high = cell.span or (None, None)
        yield from ((f"{name}_low", low), (f"{name}_high", high))
    if with_paper:
        yield f"{name}_paper", cell.paper and cell.paper.printed
    if with_paper and column.kind == "accuracy":
        yield f"{name}_outside", "" if cell.paper is None or cell.limit is None else int(cell.outside)


def runs_csv(records: Sequence[Record]) -> str:
    """A line for each run at full precision: what it is, accuracy of every test and step, parameters, costs."""
    return csv_lines([_line(record) for record in records])


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
        "→": r"$\to$",
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
        ">": r"\textgreater{}", "|": r"\textbar{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }
)  # fmt: skip


def escaped(text: str) -> str:
    """As LaTeX source."""
    return " ".join(text.split()).translate(_ESCAPES)


def latex(table: Table) -> str:
    r"""A `table` with \label{tab:NAME} that needs only booktabs; what is too wide goes on below."""
    blocks = "\n\\par\\medskip\n".join(_tabular(table, block) for block in _blocks(table))
    legend = "; ".join(_legend(table))
    return _floating(table.name, " ".join([table.caption, *([legend + "."] if legend else [])]), blocks)


_UPRIGHT = r"\rotatebox{{90}}{{{}}}"  # a data set's name above its column


def latex_of_the_paper(table: Table) -> str:
    r"""One `table` as the paper has it, needing booktabs and graphicx: means alone, a line for each method.

    What is untrained stands above the first rule and PERL below the last.
    """
    upright = [column.kind == "accuracy" and column.title not in CALLED.values() for column in table.columns]
    titles = [escaped(_title(column)) for column in table.columns]
    heads = ["Method", *(_UPRIGHT.format(title) if up else title for title, up in zip(titles, upright, strict=True))]
    lines = [rf"\begin{{tabular}}{{@{{}}l{'r' * len(table.columns)}@{{}}}}", r"\toprule", " & ".join(heads) + r" \\"]
    last = None
    for line, cells in table.texts():
        group = (line.row.recipe != UNTRAINED) + (line.row.method == "perl")
        lines += [r"\midrule"] * (group != last)
        last = group
        words = [_LATEX[cell.mark].format(escaped(_short(cell))) for cell in cells]
        lines.append(" & ".join([escaped(_label(line)), *words]) + r" \\")
    body = "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
    return _floating(table.name, table.caption, f"\\resizebox{{\\textwidth}}{{!}}{{%\n{body}}}")


def _short(cell: Shown) -> str:
    """Counts as the paper has them: 813K, 4.9M."""
    if cell.kind != "count" or not cell.value:
        return cell.number
    for size, letter in ((1e6, "M"), (1e3, "K")):
        if cell.value >= size:
            return f"{cell.value / size:.{int(size == 1e6)}f}{letter}"
    return cell.number


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


def _label(line: Line) -> str:
    """With the method's published name."""
    method = line.row.method
    return NAMES.get(method, method) + line.label.removeprefix(method) if line.label.startswith(method) else line.label


def _title(column: Column) -> str:
    """With the data set's published name."""
    return NAMES.get(column.title, column.title)


def _legend(table: Table) -> Iterator[str]:
    """How to read what is in the cells."""
    cells = [
        (cell, column.kind) for line in table.lines for cell, column in zip(line.cells, table.columns, strict=True)
    ]
    if table.marks():
        yield "Best bold, second best underlined"
    if any(cell.spread is not None for cell, _ in cells):
        yield "± standard deviation over seeds"
    if any(cell.span and kind == "difference" for cell, kind in cells):
        yield "[95 % interval of a paired bootstrap over images]"
    if any(cell.paper for cell, _ in cells):
        yield f"(number of the paper, {OUTSIDE} more than two standard deviations away, or {SAME} points if untrained)"


def _blocks(table: Table) -> list[list[int]]:
    """Columns that fit side by side."""
    lines = table.texts()
    room = _WIDTH - max(len(_label(line)) for line, _ in lines)
    blocks: list[list[int]] = [[]]
    used = 0
    for c, column in enumerate(table.columns):
        width = _GAP + max(len(_title(column)), *(len(str(cells[c])) for _, cells in lines))
        if used + width > room and blocks[-1]:
            blocks.append([])
            used = 0
        blocks[-1].append(c)
        used += width
    return blocks


def _tabular(table: Table, columns: list[int]) -> str:
    rows = [[escaped(title) for title in (table.head, *(_title(table.columns[c]) for c in columns))]]
    for line, cells in table.texts():
        marked = [(_LATEX[cells[c].mark].format(escaped(cells[c].number)), cells[c].beside) for c in columns]
        rows.append([escaped(_label(line)), *(" ".join([main, *map(escaped, rest)]) for main, rest in marked)])
    alignment = "".join("r" if table.columns[c].kind in ("count", "ratio") else "l" for c in columns)
    return _ruled(f"l{alignment}", rows)


def _ruled(alignment: str, rows: Sequence[Sequence[str]]) -> str:
    """A `tabular`, its first row the header."""
    head, *body = (" & ".join(row) + r" \\" for row in rows)
    lines = [rf"\begin{{tabular}}{{@{{}}{alignment}@{{}}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])
