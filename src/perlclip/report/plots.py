"""The figures: novel accuracy against parameters, and accuracy against depth J, steps K and shots.

Drawn from the tables. Every method has a colour and a marker of its own, PERL is a large star and what is untrained a
dashed line; legends list what they name from top to bottom.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullLocator

from perlclip.report.sections import VARIED, Section
from perlclip.report.tables import Cell, Line, Table
from perlclip.viz.drawing import Drawing, draw
from perlclip.viz.style import BLUE, GREEN, GREY, SOFT, VERMILION, look

DRAWN = ("vision_depth", "text_depth", "depth", "steps", "rank", "anchor")  # settings whose ablation is a curve
Look = dict[str, Any]
Points = Sequence[tuple[float, Cell]]


def drawings(section: Section) -> list[Drawing]:
    """Those of a study that there are runs for."""
    protocol, name, table = section.study.condition.protocol, section.study.name, section.summary
    found = [parameters_figure(f"{name}-parameters", table)] if protocol == "base-to-novel" else []
    varied = section.ablations if protocol == "base-to-novel" else []
    found += [_ablation(key, table) for key, table in varied if key in DRAWN]
    found += [shots_figure(f"{name}-shots", table)] if protocol == "few-shot" else []
    return [drawing for drawing in found if drawing is not None]


def looks(table: Table) -> list[tuple[Line, float | None, Look]]:
    """Of each line its parameters and how it is drawn: PERL is set off, what is untrained stands back."""
    found, others, perls = [], 0, 0
    for line, cell in zip(table.lines, table.column("parameters"), strict=True):
        if not cell.value:
            one: Look = {"color": GREY, "linestyle": "--", "linewidth": 1.2}
        elif line.row.method == "perl":
            one = {"color": VERMILION, "marker": "*ph"[perls % 3], "markersize": 13, "linewidth": 2.4, "zorder": 4}
            one |= {"markerfacecolor": "white", "linestyle": "-."} if perls else {}
            perls += 1
        else:
            one = look(others)
            others += 1
        found.append((line, cell.value, one))
    return found


def _legend(figure: Figure, axis: Any, heights: Mapping[str, float]) -> None:
    """Beside the axis, its entries in the order of the heights, PERL's in bold."""
    handles, labels = axis.get_legend_handles_labels()
    entries = sorted(zip(handles, labels, strict=True), key=lambda entry: -heights[entry[1]])
    legend = figure.legend(*zip(*entries, strict=True), loc="outside right upper", handlelength=2.6)
    for text in legend.get_texts():
        if text.get_text().startswith("perl"):
            text.set(color=VERMILION, fontweight="bold")


# ---- accuracy against parameters ----


def parameters_figure(name: str, table: Table) -> Drawing | None:
    """What is cheap and good stands at the upper left."""
    found = [(cell.value, cell.spread) for cell in table.column("novel")]
    points = [(*one, y, spread) for one, (y, spread) in zip(looks(table), found, strict=True) if y is not None]
    counts = [count for _, count, *_ in points if count]
    if not counts:
        return None

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        axis.set(xscale="log", xlabel="trainable parameters", ylabel="accuracy on novel classes, %")
        axis.set_xlim(min(counts) / 2, 2 * max(counts))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        for line, count, shown, y, spread in points:
            if count:
                size = max(8, shown["markersize"])
                axis.plot(count, y, label=line.label, **{**shown, "linestyle": "none", "markersize": size})
                axis.vlines(count, y - (spread or 0), y + (spread or 0), color=SOFT, linewidth=1.2, zorder=1)
            else:
                axis.axhline(y, label=line.label, **shown)
        _legend(figure, axis, {line.label: y for line, _, _, y, _ in points})

    return draw(name, f"Novel accuracy against trainable parameters. {table.caption}", (7, 4.2), paint)


# ---- accuracy against a setting or shots ----


def _ablation(key: str, table: Table) -> Drawing | None:
    """Base, novel and harmonic mean; only of settings that are one number."""
    halves = {"base": (BLUE, "o"), "novel": (VERMILION, "s"), "mean of HMs": (GREEN, "D")}
    curves = {}
    for title, (colour, marker) in halves.items():
        lines = zip(table.lines, table.column(title), strict=True)
        points = [(float(line.setting), cell) for line, cell in lines if isinstance(line.setting, int | float)]
        curves[title] = points, {"color": colour, "marker": marker}
    what = " ".join(VARIED[key])
    return _curves(table.name, f"Accuracy against {what}. {table.caption}", (6.4, 3.8), curves, xlabel=what)


def shots_figure(name: str, table: Table) -> Drawing | None:
    """A curve for each row of a few-shot summary."""
    shots = [column.title for column in table.columns if column.kind == "accuracy"]
    curves = {}
    for i, (line, _, shown) in enumerate(looks(table)):
        curves[line.label] = [(float(title.split()[0]), table.column(title)[i]) for title in shots], shown
    caption = f"Accuracy against shots. {table.caption}"
    return _curves(name, caption, (7, 4.6), curves, xlabel="shots of each class", xscale="log")


def _curves(
    name: str, caption: str, size: tuple[float, float], curves: Mapping[str, tuple[Points, Look]], **axes: str
) -> Drawing | None:
    found = {
        label: [(x, cell.value, cell.spread or 0) for x, cell in points if cell.value is not None]
        for label, (points, _) in curves.items()
    }
    xs = sorted({x for points in found.values() for x, *_ in points})
    if len(xs) < 2:
        return None

    def paint(figure: Figure) -> None:
        axis = figure.subplots()
        axis.set(ylabel="test accuracy, %", **axes)
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticks(xs, [f"{x:g}" for x in xs])
        ends = {}
        for label, points in found.items():
            if points:
                x, y, spread = np.array(points).T
                axis.plot(x, y, label=label, **{"linewidth": 1.6, **curves[label][1]})
                axis.vlines(x, y - spread, y + spread, color=curves[label][1]["color"], linewidth=1)
                ends[label] = y[-1]
        _legend(figure, axis, ends)

    return draw(name, caption, size, paint)
