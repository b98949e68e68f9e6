"""The figures: curves by step, drift by transition, single cases, grids of cases.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and every group has a marker of its own. The
same numbers give the same bytes.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from perlclip.analysis.cases import AGAINST, FOR, Case, overlay
from perlclip.analysis.drift import QUANTILES, Drift
from perlclip.analysis.trajectories import METRICS, Curve

INK, SOFT = "#1c2330", "#8a93a2"
LOOKS = {
    "correct→correct": ("#0072b2", "o"),
    "wrong→correct": ("#e69f00", "s"),
    "correct→wrong": ("#cc79a7", "D"),
    "wrong→wrong": ("#7f7f7f", "^"),
}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKERS = "osD^vPX*"
STYLE = {
    "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.edgecolor": SOFT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": SOFT, "grid.alpha": 0.25, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "axes.titlesize": 10.5, "svg.fonttype": "none", "font.family": "sans-serif",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure as files."""

    name: str
    png: bytes
    svg: bytes

    @property
    def inline(self) -> str:
        """The SVG element in the page's own ink, without a ground."""
        text = re.sub(r"<metadata>.*?</metadata>", "", self.svg.decode(), flags=re.DOTALL)
        element = text[text.index("<svg") :].replace(INK, "currentColor").replace("fill: #ffffff", "fill: none")
        return element.replace("<svg ", '<svg role="img" ', 1)


def drawing(name: str, figure: Figure) -> Drawing:
    """Without dates and versions, which would make every file differ."""
    png, svg = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
        figure.set_layout_engine("none")  # it is laid out now
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name, png.getvalue(), svg.getvalue())


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


# ---- curves ----


def draw_curves(
    name: str, groups: Mapping[str, Mapping[str, Curve]], counts: Mapping[str, int] | None = None
) -> Drawing:
    """A panel for each metric with a line for each group; in the sixth the transitions' counts, or the names."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(10, 5.6)
        axes = figure.subplots(2, 3).flatten()
        for axis, metric in zip(axes, METRICS, strict=False):
            arrow = {"higher": " ↑", "lower": " ↓", "": ""}[metric.better]
            axis.set(title=metric.title + arrow, xlabel="step k")
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            for i, (group, found) in enumerate(groups.items()):
                if metric.name in found:
                    _line(axis, found[metric.name], i, group)
        if counts is None:
            axes[-1].axis("off")
            handles, labels = axes[0].get_legend_handles_labels()
            axes[-1].legend(handles, labels, loc="center left", frameon=False, fontsize=9.5)
        else:
            _bars(axes[-1], counts)
        return drawing(name, figure)


def _line(axis: Any, curve: Curve, i: int, label: str) -> None:
    steps, colour = range(len(curve.mean)), COLOURS[i % len(COLOURS)]
    style = "-" if i < len(COLOURS) else "--"
    axis.plot(steps, curve.mean, style, color=colour, marker=MARKERS[i % len(MARKERS)], markersize=5, label=label)
    axis.fill_between(steps, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)


def _bars(axis: Any, counts: Mapping[str, int]) -> None:
    axis.set(title="images by first → final answer")
    names = list(counts)
    axis.barh(names, [counts[name] for name in names], color=[LOOKS[name][0] for name in names], height=0.34)
    axis.grid(False)
    axis.set(xticks=[], yticks=[], ylim=(len(names) - 0.6, -0.75))
    axis.spines[["bottom"]].set_visible(False)
    total = max(sum(counts.values()), 1)
    for i, name in enumerate(names):
        text = f" {name}: {counts[name]} ({100 * counts[name] / total:.1f} %)"
        axis.text(0, i - 0.22, text, va="bottom", fontsize=9)
    axis.set_xlim(0, max(*counts.values(), 1))


# ---- drift ----


def draw_drift(rows: Sequence[Drift]) -> Drawing:
    """KL from step 0 at each step: a box for each transition, whiskers from 5 to 95 %, on a logarithmic scale."""
    present = [row for row in rows if row.count]
    with matplotlib.rc_context(STYLE):
        figure = _figure(8, 4.2)
        axis = figure.subplots()
        width = 0.8 / max(len(present), 1)
        for i, row in enumerate(present):
            colour, marker = LOOKS[row.transition]
            at = [k + (i - (len(present) - 1) / 2) * width for k in range(1, len(row.mean))]
            boxes = [dict(zip(_BOX, quantiles, strict=True), fliers=[]) for quantiles in row.quantiles[1:]]
            axis.bxp(
                boxes, positions=at, widths=0.78 * width, patch_artist=True, showfliers=False, manage_ticks=False,
                boxprops={"facecolor": colour, "alpha": 0.75, "edgecolor": INK, "linewidth": 0.8},
                medianprops={"color": INK, "linewidth": 1.8}, whiskerprops={"color": INK, "linewidth": 0.9},
                capprops={"color": INK, "linewidth": 0.9},
            )  # fmt: skip
            axis.plot(at, row.mean[1:], marker, color="white", markeredgecolor=INK, markersize=4.5, linestyle="none")
            axis.plot([], [], "s", color=colour, markersize=9, label=f"{row.transition} ({row.count})")
        axis.set_yscale("log")
        axis.set(xlabel="step k", ylabel="KL(p₀ ‖ pₖ), nats")
        axis.set_xticks(range(1, len(present[0].mean) if present else 2))
        axis.grid(False, axis="x")
        axis.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.2), fontsize=9.5)
        return drawing("drift", figure)


_BOX = ("whislo", "q1", "med", "q3", "whishi")
assert len(_BOX) == len(QUANTILES)


# ---- cases ----


def draw_case(case: Case, name: str = "case") -> Drawing:
    """Rows are steps: the maps of both classes over the image; beside them the confidence of both."""
    steps = range(len(case.maps_KMGG))
    with matplotlib.rc_context(STYLE):
        figure = _figure(8.4, 1.5 * len(steps) + 0.9)
        halves: Any = figure.subfigures(1, 2, width_ratios=(1.02, 1))
        left, right = halves
        sheet = left.subplots()
        _sheet(sheet, case, [[(k, m) for m in range(2)] for k in steps])
        _ticks(sheet, titles(case), [f"step {k}" for k in steps], size=9.5)
        tall = right.subplots(2, 1, height_ratios=(1, 1.35))
        tall[0].imshow(case.picture, interpolation="nearest")
        tall[0].axis("off")
        tall[0].set_title(_caption(case), fontsize=10)
        _confidence(tall[1], case)
        _colour_bar(right, tall[1], scale_of(case))
        return drawing(name, figure)


def draw_grid(name: str, cases: Sequence[Case]) -> Drawing:
    """A band for each case: confidence, the image, then the maps of both classes with a column for each step."""
    steps = range(len(cases[0].maps_KMGG))
    with matplotlib.rc_context(STYLE):
        figure = _figure(4.6 + 0.84 * len(steps), 2.3 * len(cases))
        grid = figure.subplots(
            len(cases), 3, squeeze=False, gridspec_kw={"width_ratios": (2.5, 1.4, 0.84 * len(steps) + 0.5)}
        )
        for case, (curve, image, sheet) in zip(cases, grid, strict=True):
            _confidence(curve, case, small=True)
            image.imshow(case.picture, interpolation="nearest")
            image.axis("off")
            image.set_title(_caption(case), fontsize=9)
            _sheet(sheet, case, [[(k, m) for k in steps] for m in range(2)])
            _ticks(sheet, [f"k = {k}" for k in steps], [name.replace(" ", "\n") for name in case.classes], size=8.5)
            for m, label in enumerate(sheet.get_yticklabels()):
                label.set_color(_CASE[m])
        return drawing(name, figure)


_CASE = ("#0072b2", "#d55e00")  # the first and the second class of a case


def scale_of(case: Case) -> float:
    """What is drawn in full colour: the largest contribution of either class at any step."""
    return float(case.maps_KMGG.abs().max())


def titles(case: Case) -> tuple[str, str]:
    """What the two classes are to the case."""
    first, final = case.answers[0], case.answers[-1]

    def role(name: str) -> str:
        if name == first == final:
            return "answer throughout" if set(case.answers) == {name} else "first and final answer"
        return "first answer" if name == first else "final answer" if name == final else "other class"

    return f"{case.classes[0]}\n({role(case.classes[0])})", f"{case.classes[1]}\n({role(case.classes[1])})"


def _caption(case: Case) -> str:
    return f"{case.transition}\nlabel: {case.label}" if case.transition else case.name


def _sheet(axis: Any, case: Case, cells: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Maps in rows and columns as one picture; a map is one unit wide and high, with a gap of white around it."""
    scale, (width, height) = scale_of(case), case.picture.size
    pale = case.picture.convert("L").point([60 + round(0.68 * grey) for grey in range(256)]).convert("RGBA")
    gap = max(1, width // 16)
    sheet = Image.new("RGBA", ((width + gap) * len(cells[0]), (height + gap) * len(cells)), "white")
    for row, line in enumerate(cells):
        for column, (k, m) in enumerate(line):
            patches = overlay(case.maps_KMGG[k, m], scale).resize((width, height), Image.Resampling.NEAREST)
            place = column * (width + gap) + gap // 2, row * (height + gap) + gap // 2
            sheet.paste(Image.alpha_composite(pale, patches), place)
    axis.imshow(sheet.convert("RGB"), interpolation="nearest", extent=(0, len(cells[0]), len(cells), 0))


def _ticks(axis: Any, columns: Sequence[str], rows: Sequence[str], size: float) -> None:
    """Names of a sheet's columns above it and of its rows beside it."""
    axis.set_xticks([i + 0.5 for i in range(len(columns))], columns, fontsize=size)
    axis.set_yticks([i + 0.5 for i in range(len(rows))], rows, fontsize=size)
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)


def _confidence(axis: Any, case: Case, *, small: bool = False) -> None:
    for m, name in enumerate(case.classes):
        values = case.confidence_KM[:, m].tolist()
        axis.plot(values, color=_CASE[m], marker="os"[m], markersize=4.5, label=name)
    axis.set(ylim=(-0.03, 1.03), xticks=range(len(case.confidence_KM)))
    axis.set_xlabel("step k", fontsize=8.5 if small else 10)
    axis.set_ylabel("confidence", fontsize=8.5 if small else 10)
    axis.tick_params(labelsize=8 if small else 9)
    axis.legend(frameon=False, fontsize=8 if small else 9, loc="best")


def _colour_bar(figure: Any, axis: Any, scale: float) -> None:
    colours = [tuple(channel / 255 for channel in rgb) for rgb in (AGAINST, (255, 255, 255), FOR)]
    shades = ScalarMappable(Normalize(-scale, scale), LinearSegmentedColormap.from_list("evidence", colours))
    bar = figure.colorbar(shades, ax=axis, orientation="horizontal", fraction=0.06, pad=0.04)
    bar.set_label("contribution to the logit (against / for the class)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
