"""The figures: curves by step, drift by transition, single cases, grids of cases. Every group has its own marker."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from perlclip.analysis.cases import AGAINST, FOR, Case, overlay
from perlclip.analysis.drift import Drift
from perlclip.analysis.trajectories import METRICS, Curve, Metric
from perlclip.text.classes import spoken
from perlclip.viz.drawing import Drawing, draw
from perlclip.viz.dynamics import QUANTILES
from perlclip.viz.style import BLUE, GREY, INK, ORANGE, PINK, VERMILION

TRANSITION_LOOKS = {
    "correct→correct": (BLUE, "o"),
    "wrong→correct": (ORANGE, "s"),
    "correct→wrong": (PINK, "D"),
    "wrong→wrong": (GREY, "^"),
}
CLASS_COLOURS = ("#00795a", "#a8467e")  # of the first and the second class of a case; maps are orange and blue


# ---- curves ----


def draw_curves(name: str, caption: str, found: Mapping[str, Curve], counts: Mapping[str, int]) -> Drawing:
    """A panel for each metric, and in the sixth the transitions' counts."""

    def paint(figure: Figure) -> None:
        axes = figure.subplots(2, 3).flatten()
        for axis, metric in zip(axes, METRICS, strict=False):
            axis.set(title=_titled(metric), xlabel="step k")
            _line(axis, found[metric.name], INK, "o")
        _bars(axes[-1], counts)

    return draw(name, caption, (10, 5.6), paint)


def draw_multiples(name: str, caption: str, rows: Mapping[str, Mapping[str, Mapping[str, Curve]]]) -> Drawing:
    """A row for each setting or set, a column for each metric, each panel with its own scale; lines as in `LINES`."""

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(rows), len(METRICS), squeeze=False, sharex=True)
        for (row, lines), axes in zip(rows.items(), grid, strict=True):
            for axis, metric in zip(axes, METRICS, strict=True):
                for line, found in lines.items():
                    _line(axis, found[metric.name], *LINES[line], label=line)
                axis.tick_params(labelsize=8)
                axis.yaxis.set_major_locator(MaxNLocator(4))
            axes[0].set_ylabel(_broken(row), rotation=0, ha="right", va="center", fontsize=9.5)
            if len(lines) > 1:
                axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8.5)
        for axis, metric in zip(grid[0], METRICS, strict=True):
            axis.set_title(_titled(metric), fontsize=9.5)
        for axis in grid[-1]:
            axis.set_xlabel("step k", fontsize=9)

    return draw(name, caption, (11.5, 1.35 * len(rows) + 0.7), paint)


LINES = {"mean": (INK, "o"), "base": (BLUE, "s"), "novel": (VERMILION, "D")}


def _line(axis: Any, curve: Curve, colour: str, marker: str, label: str = "") -> None:
    steps = range(len(curve.mean))
    axis.plot(steps, curve.mean, color=colour, marker=marker, markersize=4, label=label)
    axis.fill_between(steps, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _titled(metric: Metric) -> str:
    return metric.title + {"higher": " ↑", "lower": " ↓", "": ""}[metric.better]


def _broken(name: str, width: int = 18) -> str:
    """A long name in several lines."""
    return "\n".join(wrap(spoken(name), width))


def _bars(axis: Any, counts: Mapping[str, int]) -> None:
    axis.set(title="images by first → final answer")
    names = list(counts)
    axis.barh(names, [counts[name] for name in names], color=[TRANSITION_LOOKS[name][0] for name in names], height=0.34)
    axis.grid(False)
    axis.set(xticks=[], yticks=[], ylim=(len(names) - 0.6, -0.75))
    axis.spines[["bottom"]].set_visible(False)
    total = max(sum(counts.values()), 1)
    for i, name in enumerate(names):
        text = f" {name}: {counts[name]} ({100 * counts[name] / total:.1f} %)"
        axis.text(0, i - 0.22, text, va="bottom", fontsize=9)
    axis.set_xlim(0, max(*counts.values(), 1))


# ---- drift ----


def draw_drift(groups: Mapping[str, Sequence[Drift]], caption: str) -> Drawing:
    """KL from step 0 at each step: a box for each transition, whiskers from 5 to 95 %, on a logarithmic scale."""
    columns = min(len(groups), 3)
    rows = -(-len(groups) // columns)

    def paint(figure: Figure) -> None:
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axis, (group, found) in zip(axes, groups.items(), strict=False):
            _boxes(axis, [row for row in found if row.count], group)
        for axis in axes[len(groups) :]:
            axis.axis("off")
        for axis in axes[::columns]:
            axis.set_ylabel("KL(p₀ ‖ pₖ), nats")

    return draw("drift", caption, (max(8, 4 * columns), 3.8 * rows + 0.4), paint)


def _boxes(axis: Any, present: Sequence[Drift], title: str) -> None:
    width = 0.8 / max(len(present), 1)
    for i, row in enumerate(present):
        colour, marker = TRANSITION_LOOKS[row.transition]
        at = [k + (i - (len(present) - 1) / 2) * width for k in range(1, len(row.mean))]
        boxes = [dict(zip(_BOX, quantiles, strict=True), fliers=[]) for quantiles in row.quantiles[1:]]
        axis.bxp(
            boxes, positions=at, widths=0.78 * width, patch_artist=True, showfliers=False, manage_ticks=False,
            boxprops={"facecolor": colour, "alpha": 0.75, "edgecolor": INK, "linewidth": 0.8},
            medianprops={"color": INK, "linewidth": 1.8}, whiskerprops={"color": INK, "linewidth": 0.9},
            capprops={"color": INK, "linewidth": 0.9},
        )  # fmt: skip
        axis.plot(at, row.mean[1:], marker, color="white", markeredgecolor=INK, markersize=4.5, linestyle="none")
        axis.plot([], [], "s", color=colour, markersize=9, label=f"{row.transition} ({row.count:,})")
    axis.set_yscale("log")
    axis.set(xlabel="step k", title=title)
    axis.set_xticks(range(1, len(present[0].mean) if present else 2))
    axis.grid(False, axis="x")
    axis.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8.5)


_BOX = ("whislo", "q1", "med", "q3", "whishi")
assert len(_BOX) == len(QUANTILES)


# ---- cases ----


def draw_case(name: str, case: Case) -> Drawing:
    """Rows are steps: the maps of both classes over the image; beside them the confidence of both."""
    steps = range(len(case.maps_KMGG))

    def paint(figure: Figure) -> None:
        halves: Any = figure.subfigures(1, 2, width_ratios=(1.02, 1))
        left, right = halves
        sheet = left.subplots()
        _sheet(sheet, case, [[(k, m) for m in range(2)] for k in steps])
        _ticks(sheet, ["\n".join(title) for title in titles(case)], [f"step {k}" for k in steps], size=9.5)
        tall = right.subplots(2, 1, height_ratios=(1, 1.35))
        tall[0].imshow(case.picture, interpolation="nearest")
        tall[0].axis("off")
        tall[0].set_title(_caption(case), fontsize=10)
        _confidence(tall[1], case)
        _colour_bar(right, scale_of(case), "contribution to the logit", ax=tall[1], fraction=0.06, pad=0.04)

    return draw(name, f"{case.name}: evidence and confidence at each step.", (8.4, 1.5 * len(steps) + 0.9), paint)


def draw_grid(name: str, cases: Sequence[Case]) -> Drawing:
    """A band for each case: confidence, the image, then the maps of both classes with a column for each step."""
    steps = range(len(cases[0].maps_KMGG))

    def paint(figure: Figure) -> None:
        ratios = (2.5, 1.4, 0.84 * len(steps) + 0.5)
        parts: Any = figure.subfigures(2, 1, height_ratios=(2.3 * len(cases), 0.6))
        above, below = parts
        grid = above.subplots(len(cases), 3, squeeze=False, gridspec_kw={"width_ratios": ratios})
        for case, (curve, image, sheet) in zip(cases, grid, strict=True):
            _confidence(curve, case, small=True)
            image.imshow(case.picture, interpolation="nearest")
            image.axis("off")
            image.set_title(_caption(case), fontsize=9)
            _sheet(sheet, case, [[(k, m) for k in steps] for m in range(2)])
            _ticks(sheet, [f"k = {k}" for k in steps], [name.replace(" ", "\n") for name in case.classes], size=8.5)
            for label, colour in zip(sheet.get_yticklabels(), CLASS_COLOURS, strict=True):
                label.set_color(colour)
        place = below.add_axes((0.3, 0.7, 0.4, 0.2))
        _colour_bar(below, 1, "contribution to the logit over the case's largest", cax=place)

    return draw(name, f"Cases, {cases[0].transition}.", (4.6 + 0.84 * len(steps), 2.3 * len(cases) + 0.6), paint)


def scale_of(case: Case) -> float:
    """What is drawn in full colour: the largest contribution of either class at any step."""
    return float(case.maps_KMGG.abs().max())


def titles(case: Case) -> list[tuple[str, str]]:
    """The two classes, and what they are to the case."""
    first, final = case.answers[0], case.answers[-1]

    def role(name: str) -> str:
        if name == first == final:
            return "answer throughout" if set(case.answers) == {name} else "first and final answer"
        return "first answer" if name == first else "final answer" if name == final else "other class"

    return [(name, f"({role(name)})") for name in case.classes]


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
        axis.plot(values, color=CLASS_COLOURS[m], marker="os"[m], markersize=4.5, label=name)
    axis.set(ylim=(-0.03, 1.03), xticks=range(len(case.confidence_KM)))
    axis.set_xlabel("step k", fontsize=8.5 if small else 10)
    axis.set_ylabel("confidence", fontsize=8.5 if small else 10)
    axis.tick_params(labelsize=8 if small else 9)
    axis.legend(fontsize=8 if small else 9, loc="best")


def _colour_bar(figure: Any, scale: float, label: str, **place: Any) -> None:
    colours = [tuple(channel / 255 for channel in rgb) for rgb in (AGAINST, (255, 255, 255), FOR)]
    shades = ScalarMappable(Normalize(-scale, scale), LinearSegmentedColormap.from_list("evidence", colours))
    bar = figure.colorbar(shades, orientation="horizontal", **place)
    bar.set_label(f"{label} (against / for the class)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
