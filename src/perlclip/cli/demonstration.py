"""The demonstration: base-to-novel adaptation on drawn data with the embedded backbone.

Its runs are those of `perlclip bench base-to-novel`, kept in `OUT/runs`; running again skips what is there.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import harmonic_mean, mean
from typing import Any

import click

from perlclip.bench.machines import Machines, cuda_cards
from perlclip.bench.protocols import PROTOCOLS, Benchmark
from perlclip.bench.schedule import run_all
from perlclip.bench.store import Record, Store
from perlclip.data.suites import SUITES
from perlclip.data.toybox import load_toybox
from perlclip.errors import PerlclipError
from perlclip.files import write_files
from perlclip.report.formats import runs_csv
from perlclip.text.classes import spoken
from perlclip.viz.drawing import Drawing, draw
from perlclip.viz.markup import aligned
from perlclip.viz.style import BLUE, VERMILION

ALL_TASKS = PROTOCOLS["base-to-novel"].datasets(SUITES["toybox"])
THREE_TASKS = ("noisy_shapes", "faint_toys", "tiny_toys")
SHOTS = 16
STRIP = 6

NEXT = """
The short demo shows three sets that adaptation helps; `perlclip demo --full` runs all eleven, of which some lose.

With your own images, one folder per class:

    perlclip fit DATA --backbone openai/clip-vit-base-patch16 --shots 16 --out my-adapter
    perlclip predict my-adapter new-images/*.jpg
"""


def run_demo(
    tasks: Sequence[str], out: Path, *, seeds: Sequence[int] = (1,), modalities: Sequence[str] = ("both",),
    recipe: str = "strong",
) -> None:  # fmt: skip
    """Do what is not done yet, then print the table and draw the figure."""
    runs = Benchmark(datasets=tasks, methods=["zero-shot"]).runs()
    for side in modalities:
        settings = {} if side == "both" else {"perl": {"modalities": side}}
        grid = Benchmark(datasets=tasks, methods=["perl"], seeds=seeds, recipe=recipe, shots=[SHOTS], settings=settings)
        runs += grid.runs()
    # Small steps gain little from a second thread, and runs nothing from sharing a card.
    machines = Machines(jobs=1 if cuda_cards("auto") else min(len(runs), os.cpu_count() or 1))
    found = run_all(runs, Store(out / "runs"), machines)
    for record in found:
        if record["status"] == "failed":
            raise PerlclipError(record["error"])
    write_files({out / "runs.csv": runs_csv(found).encode()})
    records = [record for record in found if record["run"]["method"] == "perl"]
    clip = {_task(record): record for record in found if record["run"]["method"] == "zero-shot"}
    print_table(records, clip)
    write_files({out / "demo.png": draw_figure(records, clip).png})
    click.echo(f"\nfigure: {out / 'demo.png'}   runs: {out / 'runs'}\n{NEXT}")


def _task(record: Record) -> str:
    return str(record["run"]["dataset"])


def _side(record: Record) -> str:
    return str(record["config"]["modalities"])


Zero = Mapping[str, Record]  # zero-shot CLIP's, by set


def _rows(records: Sequence[Record], clip: Zero) -> list[list[Any]]:
    """A row for each set and modality, seeds averaged, then the means over sets."""
    rows = []
    for modalities in dict.fromkeys(_side(record) for record in records):
        group = [record for record in records if _side(record) == modalities]
        tasks = list(dict.fromkeys(_task(record) for record in group))
        # Of each set and half, what zero-shot CLIP reaches, and PERL.
        values = [
            [(clip[task]["metrics"][half]["accuracy"], _seed_means(group, task, half)[-1]) for half in HALVES]
            for task in tasks
        ]
        rows += [[task, modalities, *_cells(base, novel)] for task, (base, novel) in zip(tasks, values, strict=True)]
        if len(tasks) > 1:
            base, novel = ([mean(step) for step in zip(*half, strict=True)] for half in zip(*values, strict=True))
            rows.append([f"mean of {len(tasks)}", modalities, *_cells(base, novel)])
    return rows


def _seed_means(group: Sequence[Record], task: str, half: str) -> list[float]:
    """Accuracy of each step."""
    steps = (record["metrics"][half]["step_accuracy"] for record in group if _task(record) == task)
    return [mean(step) for step in zip(*steps, strict=True)]


def _cells(base: Sequence[float], novel: Sequence[float]) -> list[float]:
    return [cell for pair in zip(base, novel, strict=True) for cell in (*pair, harmonic_mean(pair))]


HEADER = ("set", "thinks", "CLIP base", "CLIP novel", "CLIP HM", "PERL base", "PERL novel", "PERL HM")


def print_table(records: Sequence[Record], clip: Zero) -> None:
    """The table as Markdown, ready to paste."""
    seeds = sorted({record["run"]["seed"] for record in records})
    click.echo(
        f"\nTest accuracy in %, {SHOTS} shots, seeds {', '.join(map(str, seeds))}; HM is of the row's base and novel.\n"
    )
    rows = [[cell if isinstance(cell, str) else f"{cell:.1f}" for cell in row] for row in _rows(records, clip)]
    click.echo(aligned(HEADER, rows), nl=False)


def draw_figure(records: Sequence[Record], clip: Zero) -> Drawing:
    """Accuracy by refinement step, above a strip of test images whose label PERL corrected."""
    shown = [record for record in records if _side(record) == _side(records[0])]
    cases = [case for record in shown for case in corrected_cases(record, clip[_task(record)])]
    corrected = cases[:: max(1, len(cases) // STRIP)][:STRIP]  # spread over sets and halves

    def paint(figure: Any) -> None:
        top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2)) if corrected else (figure, None)
        _draw_steps(top, shown, clip)
        if bottom is not None:
            _draw_strip(bottom, corrected)

    return draw("demo", "PERL's accuracy at every step, and images that it put right.", (11, 7.2), paint)


def _draw_steps(figure: Any, records: Sequence[Record], clip: Zero) -> None:
    """A small panel for each set with its own scale, and before them the means."""
    tasks = list(dict.fromkeys(_task(record) for record in records))
    halves = {half: [_seed_means(records, task, half) for task in tasks] for half in HALVES}
    panels = [(f"mean of {len(tasks)}", tasks, [[mean(step) for step in zip(*halves[h], strict=True)] for h in HALVES])]
    panels *= len(tasks) > 1
    panels += [(task, [task], [halves[half][i] for half in HALVES]) for i, task in enumerate(tasks)]
    columns = min(len(panels), 6)
    axes = figure.subplots(-(-len(panels) // columns), columns, squeeze=False, sharex=True).flatten()
    for axis, (title, shown, curves) in zip(axes, panels, strict=False):
        for curve, (half, style) in zip(curves, HALVES.items(), strict=True):
            axis.plot(curve, label=f"{half} classes", markersize=4, **style)
            zero = mean(clip[task]["metrics"][half]["accuracy"] for task in shown)
            axis.axhline(zero, label=f"zero-shot CLIP, {half}", color=style["color"], linestyle=":", linewidth=1)
        axis.set_title(spoken(title), fontsize=9.5, fontweight="bold" if title.startswith("mean") else None)
        axis.tick_params(labelsize=8)
        axis.set_xticks(range(len(curves[0])))
    for axis in axes[len(panels) :]:
        axis.axis("off")
    figure.supxlabel("refinement step k", fontsize=9.5)
    figure.supylabel("test accuracy, %", fontsize=9.5)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)


HALVES: dict[str, dict[str, Any]] = {
    "base": {"color": BLUE, "marker": "o"},
    "novel": {"color": VERMILION, "marker": "s"},
}


@dataclass(frozen=True)
class Corrected:
    """A test image that zero-shot CLIP gets wrong and PERL right: where it is, and its label before and after."""

    task: str
    half: str
    index: int
    before: int
    after: int


def corrected_cases(record: Record, zero: Record) -> list[Corrected]:
    """The first few of each half."""
    found = []
    for half, answers in record["predictions"].items():
        rows = zip(answers["labels"], zero["predictions"][half]["last"], answers["last"], strict=True)
        cases = [Corrected(_task(record), half, i, b, a) for i, (label, b, a) in enumerate(rows) if b != label == a]
        found += cases[:STRIP]
    return found


def _draw_strip(figure: Any, cases: Sequence[Corrected]) -> None:
    figure.suptitle("test images that zero-shot CLIP got wrong and PERL got right", fontsize=11)
    for axis, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        test = load_toybox(case.task).test
        half = test.base() if case.half == "base" else test.novel()
        axis.imshow(half.images[case.index])
        axis.set_title(f"{half.class_names[case.before]} ✗\n→ {half.class_names[case.after]}", fontsize=8)
        axis.axis("off")
