"""The demonstration: base-to-novel adaptation on drawn data with the embedded backbone.

Each run is one JSON file in `OUT/runs`, written when it is complete; running again skips what is there.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import click

from perlclip.backbone import Backbone, load_backbone
from perlclip.data.sets import ImageSet
from perlclip.data.toybox import load_toybox, toybox_names
from perlclip.evaluation import Evaluation, evaluate
from perlclip.files import require_writable, write_files
from perlclip.methods import create_method
from perlclip.recipes import recipe as recipe_by_name
from perlclip.train import fit

ALL_TASKS = toybox_names()[:11]
THREE_TASKS = ("noisy_shapes", "faint_toys", "tiny_toys")
SHOTS = 16
STRIP = 6

NEXT = """
The short demo shows three sets that adaptation helps; `perlclip demo --full` runs all eleven, of which some lose.

With your own images, one folder per class:

    perlclip fit DATA --backbone openai/clip-vit-base-patch16 --shots 16 --out my-adapter
    perlclip predict my-adapter new-images/*.jpg
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training of PERL on the base half of a toybox set."""

    task: str
    seed: int
    modalities: str
    recipe: str

    @property
    def name(self) -> str:
        """File name of the run."""
        return f"{self.task}-{self.modalities}-{self.recipe}-seed{self.seed}"


def run_all(grid: Sequence[Run], out: Path) -> None:
    """Do what is not done yet, then print the table and draw the figure."""
    require_writable(out / "runs")
    backbone = load_backbone("tiny")
    records = []
    for number, run in enumerate(grid, start=1):
        path = out / "runs" / f"{run.name}.json"
        record = stored(path, run, backbone)
        if record is None:
            click.echo(f"[{number}/{len(grid)}] {run.name}", err=True)
            record = perform(run, backbone)
            write_files({path: (json.dumps(record) + "\n").encode()})
        records.append(record)
    write_files({out / "table.csv": _csv(records).encode()})
    print_table(records)
    draw_figure(records, out / "demo.png")
    click.echo(f"\nfigure: {out / 'demo.png'}   runs: {out / 'runs'}\n{NEXT}")


def stored(path: Path, run: Run, backbone: Backbone) -> dict[str, Any] | None:
    """A run's record, if it is there, whole, and made with this backbone and this recipe."""
    try:
        record: dict[str, Any] = json.loads(path.read_bytes())
        settings = record["settings"]
        current = json.loads(json.dumps(asdict(recipe_by_name("perl", run.recipe, backbone.name))))
        same = settings["backbone"] == backbone.fingerprint and settings["recipe"] == current
        return record if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def perform(run: Run, backbone: Backbone) -> dict[str, Any]:
    """Train on 16 shots of each base class; test on base and on novel classes."""
    data = load_toybox(run.task)
    shots = data.train.few_shot(SHOTS, Random(run.seed)).base()
    method = create_method("perl", backbone, seed=run.seed, modalities=run.modalities)
    result = fit(method, shots, recipe=run.recipe, seed=run.seed)
    base_set, novel_set = data.test.base(), data.test.novel()
    base, novel = evaluate(method, base_set), evaluate(method, novel_set)
    return {
        **asdict(run),
        "base": base.step_accuracy,
        "novel": novel.step_accuracy,
        "parameters": method.num_trainable,
        "seconds": round(result.seconds, 1),
        "corrected": _corrected(run.task, "base", base_set, base) + _corrected(run.task, "novel", novel_set, novel),
        "settings": result.settings,
    }


def _corrected(task: str, half: str, images: ImageSet, result: Evaluation) -> list[dict[str, Any]]:
    """Images wrong at step 0 and right at step K: where they are, and the label before and after."""
    first, last = result.predictions_KB[0], result.predictions_KB[-1]
    found = ((first != result.labels_B) & (last == result.labels_B)).nonzero().flatten().tolist()
    names = images.class_names
    return [
        {"task": task, "half": half, "index": i, "before": names[int(first[i])], "after": names[int(last[i])]}
        for i in found[:STRIP]
    ]


def harmonic(base: float, novel: float) -> float:
    """Harmonic mean of the two accuracies."""
    return 2 * base * novel / (base + novel) if base + novel else 0.0


def _rows(records: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """A row for each set and modality, seeds averaged, then the means over sets."""
    rows = []
    for modalities in dict.fromkeys(record["modalities"] for record in records):
        group = [record for record in records if record["modalities"] == modalities]
        tasks = list(dict.fromkeys(record["task"] for record in group))
        values = [[_seed_means(group, task, half) for half in ("base", "novel")] for task in tasks]
        rows += [[task, modalities, *_cells(base, novel)] for task, (base, novel) in zip(tasks, values, strict=True)]
        if len(tasks) > 1:
            base, novel = ([mean(step) for step in zip(*half, strict=True)] for half in zip(*values, strict=True))
            rows.append([f"mean of {len(tasks)}", modalities, *_cells(base, novel)])
    return rows


def _seed_means(group: Sequence[dict[str, Any]], task: str, half: str) -> list[float]:
    return [mean(step) for step in zip(*(r[half] for r in group if r["task"] == task), strict=True)]


def _cells(base: Sequence[float], novel: Sequence[float]) -> list[float]:
    zero_shot = [base[0], novel[0], harmonic(base[0], novel[0])]
    return [*zero_shot, base[-1], novel[-1], harmonic(base[-1], novel[-1])]


HEADER = ("set", "thinks", "CLIP base", "CLIP novel", "CLIP HM", "PERL base", "PERL novel", "PERL HM")


def print_table(records: Sequence[dict[str, Any]]) -> None:
    """The table as Markdown, ready to paste."""
    seeds = sorted({record["seed"] for record in records})
    click.echo(
        f"\nTest accuracy in %, {SHOTS} shots, seeds {', '.join(map(str, seeds))}; HM is of the row's base and novel.\n"
    )
    rows = [[str(c) if isinstance(c, str) else f"{c:.1f}" for c in row] for row in _rows(records)]
    widths = [max(len(row[i]) for row in [list(HEADER), *rows]) for i in range(len(HEADER))]
    lines = [list(HEADER), ["-" * width for width in widths], *rows]
    for line in lines:
        click.echo("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def _csv(records: Sequence[dict[str, Any]]) -> str:
    """Every run at full precision, one line each."""
    steps = range(len(records[0]["base"]))
    header = ["task", "modalities", "recipe", "seed", *(f"{half}_k{k}" for half in ("base", "novel") for k in steps)]
    lines = [[str(r[key]) for key in header[:4]] + [f"{a:.4f}" for a in r["base"] + r["novel"]] for r in records]
    return "\n".join(",".join(line) for line in [header, *lines]) + "\n"


def draw_figure(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy by refinement step, above a strip of test images whose label PERL corrected."""
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [r for r in records if r["modalities"] == records[0]["modalities"]]
    corrected = _pick([case for record in shown for case in record["corrected"]], STRIP)
    figure = plt.figure(figsize=(11, 6.4), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2)) if corrected else (figure, None)
    _draw_steps(top.subplots(1, 2, sharey=True), shown)
    if bottom is not None:
        _draw_strip(bottom, corrected)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=140, format="png")
    plt.close(figure)
    write_files({path: buffer.getvalue()})


def _draw_steps(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    tasks = list(dict.fromkeys(record["task"] for record in records))
    for axis, half, colour in zip(axes, ("base", "novel"), ("#0072b2", "#d55e00"), strict=True):
        curves = [_seed_means(records, task, half) for task in tasks]
        for task, curve in zip(tasks, curves, strict=True):
            axis.plot(curve, color=colour, alpha=0.3, linewidth=1)
            axis.annotate(task, (len(curve) - 1, curve[-1]), (4, -2), textcoords="offset points", fontsize=6, alpha=0.7)
        average = [mean(step) for step in zip(*curves, strict=True)]
        axis.plot(average, color=colour, marker="o", linewidth=2.5, label=f"mean of {len(tasks)} sets")
        axis.set(title=f"{half} classes", xlabel="refinement step k (0 = zero-shot CLIP)", xticks=range(len(average)))
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("test accuracy, %")


def _pick(cases: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Spread the choice over sets and halves."""
    step = max(1, len(cases) // count)
    return cases[::step][:count]


def _draw_strip(figure: Any, cases: Sequence[dict[str, Any]]) -> None:
    figure.suptitle("test images that zero-shot CLIP got wrong and PERL got right", fontsize=11)
    for axis, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        test = load_toybox(case["task"]).test
        half = test.base() if case["half"] == "base" else test.novel()
        axis.imshow(half.images[case["index"]])
        axis.set_title(f"{case['before']} ✗\n→ {case['after']}", fontsize=8)
        axis.axis("off")
