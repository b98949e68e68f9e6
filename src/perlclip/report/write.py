"""`write_report`: from folders of runs to a folder with Markdown, tables, figures and a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path

from perlclip.files import write_files
from perlclip.report.collect import Chapter, Collected, chapters, collect, name_of
from perlclip.report.formats import comma_separated, latex, latex_of_the_paper, markdown, plain_latex, runs_csv
from perlclip.report.paper import slips
from perlclip.report.plots import drawings
from perlclip.report.sections import Section, section
from perlclip.report.tables import OUTSIDE
from perlclip.viz.drawing import Drawing
from perlclip.viz.dynamics import LONG, LONG_DRIFT
from perlclip.viz.markup import MISSING, aligned, csv_text, markdown_text
from perlclip.viz.pages import page

Parts = Sequence[tuple[Section, Sequence[Drawing]]]


@dataclass(frozen=True)
class Written:
    """What was written, and the summary to print."""

    files: list[Path]
    summary: str


def write_report(folders: Sequence[Path], out: Path, *, analysis: Sequence[Path] = ()) -> Written:
    """Report on all runs below the folders, with what `analyze_store` wrote. The same files give the same bytes."""
    found, analyses = collect(folders), chapters(analysis)
    sections = [section(study) for study in found.studies]
    parts = [(one, drawings(one)) for one in sections]
    contents: dict[Path, str | bytes] = {}
    for one in sections:
        for table in one.tables:
            contents[out / "tables" / f"{table.name}.csv"] = comma_separated(table)
            contents[out / "tables" / f"{table.name}.tex"] = latex(table)
        if one.layout:
            contents[out / "latex" / f"{one.layout.name}.tex"] = latex_of_the_paper(one.layout)
    for chapter in analyses:
        name, numbers = chapter.name, chapter.found
        contents[out / "tables" / f"{name}.csv"] = csv_text(LONG, numbers.long())
        contents[out / "tables" / f"{name}.tex"] = plain_latex(
            name, f"{chapter.title}. {numbers.note}", numbers.head, numbers.rows
        )
        if numbers.drift:
            caption = f"{chapter.title}: median drift KL(p0 || pk) in nats by transition. {numbers.note}"
            contents[out / "tables" / f"{name}-drift.csv"] = csv_text(LONG_DRIFT, numbers.long_drift())
            contents[out / "tables" / f"{name}-drift.tex"] = plain_latex(
                f"{name}-drift", caption, numbers.drift_head, numbers.drift_rows
            )
    for drawing in chain(*(figures for _, figures in parts), *(chapter.drawings for chapter in analyses)):
        contents |= drawing.files(out / "figures")
    contents[out / "runs.csv"] = runs_csv(found.complete)
    contents[out / "report.md"] = _markdown(found, parts, analyses)
    contents[out / "index.html"] = _html(found, parts, analyses)
    write_files({path: text.encode() if isinstance(text, str) else text for path, text in contents.items()})
    return Written(list(contents), "\n".join([*map(_head, sections), _counts(found)]))


def _head(one: Section) -> str:
    """The averages, without the tables of single sets."""
    shown = [table for table in (one.summary, *(table for _, table in one.ablations)) if table.lines]
    tables = (f"### {markdown_text(table.title)}\n\n{markdown(table)}" for table in shown)
    return "\n".join([f"## {markdown_text(one.title)}\n", *tables])


def _counts(found: Collected) -> str:
    return f"{len(found.complete):,} complete runs, {len(found.failed)} failed, {len(found.damaged)} damaged records."


def _troubles(found: Collected) -> list[str]:
    """Failed and damaged records one by one, and what else has to be said first."""
    failed = [f"failed: {name_of(record)}: {' '.join(str(record['error']).split())}" for record in found.failed]
    return [*failed, *(f"damaged: {problem}" for problem in found.damaged), *found.notes]


def _slips(parts: Parts) -> list[list[str]]:
    """Of the paper's tables, where its numbers are shown."""
    if not any(one.study.condition.has_paper for one, _ in parts):
        return []
    return [
        [s.table, f"{s.method} {s.settings}".strip(), s.dataset, s.metric, s.printed, s.expected, s.why]
        for s in slips()
    ]


SLIPS = ("table", "method", "set", "metric", "printed", "expected", "why")
ABOUT_SLIPS = "Cells of the paper's tables that contradict others; beside our numbers they stand as printed."


def _markdown(found: Collected, parts: Parts, analyses: Sequence[Chapter]) -> str:
    text, lines = markdown_text, ["# Results", _counts(found)]
    lines += ["\n".join(f"- {text(trouble)}" for trouble in _troubles(found))] * bool(_troubles(found))
    for one, figures in parts:
        lines += [f"## {text(one.title)}", text(" ".join(one.sentences)), *map(text, one.notes)]
        if one.summary.lines:
            lines += [f"### {text(one.summary.title)}", markdown(one.summary).rstrip()]
        lines += [f"![{text(drawing.caption)}](figures/{drawing.name}.png)" for drawing in figures]
        for _, table in one.ablations:
            lines += [f"### {text(table.title)}", markdown(table).rstrip()]
        alone = len(one.sets) == 1
        for table in one.sets:
            lines += [f"### {text(table.title)}" if alone else f"<details><summary>{escape(table.title)}</summary>"]
            lines += [markdown(table).rstrip(), *(["</details>"] * (not alone))]
    for chapter in analyses:
        lines.append(chapter.found.markdown(chapter.title, f"figures/{chapter.name}-"))
    slipped = _slips(parts)
    if slipped:
        shown = [[text(word) for word in row] for row in slipped]
        lines += ["## Slips in the paper", ABOUT_SLIPS, aligned(SLIPS, shown).rstrip()]
    return "\n\n".join(lines) + "\n"


def _html(found: Collected, parts: Parts, analyses: Sequence[Chapter]) -> str:
    return page(
        "report.html", title="perlclip: results", counts=_counts(found), troubles=_troubles(found), parts=parts,
        chapters=analyses, slips=_slips(parts), slips_head=SLIPS, about_slips=ABOUT_SLIPS, missing=MISSING,
        outside=OUTSIDE,
    )  # fmt: skip
