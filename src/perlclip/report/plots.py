"""The figures: novel accuracy against parameters, and accuracy against depth J, steps K and shots.

Drawn from the tables, in colours that colour-blind readers can tell apart (Okabe and Ito), with labels at the points
and curves instead of legends. The same records give the same bytes.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from matplotlib.transforms import Bbox

from perlclip.report.sections import SETTINGS, Section
from perlclip.report.tables import Cell, Table

BLUE, VERMILION, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#777777"
COLOURS = (BLUE, GREEN, "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
STYLE = {
    "svg.hashsalt": "perlclip", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure as files, and what it shows."""

    name: str
    caption: str
    png: bytes
    svg: bytes


def drawings(section: Section) -> list[Drawing]:
    """Those of a study that there are runs for."""
    protocol, name = section.study.condition.protocol, section.study.name
    found = []
    with matplotlib.rc_context(STYLE):
        if protocol == "base-to-novel":
            caption = f"Novel accuracy against trainable parameters. {section.summary.caption}"
            found.append(_saved(f"{name}-parameters", caption, _parameters(section.summary)))
        for key, table in section.ablations:
            if key in ("depth", "steps"):
                caption = f"Accuracy against {' '.join(SETTINGS[key])}. {table.caption}"
                found.append(_saved(table.name, caption, _settings(key, table)))
        if protocol == "few-shot":
            found.append(
                _saved(f"{name}-shots", f"Accuracy against shots. {section.summary.caption}", _shots(section.summary))
            )
    return [drawing for drawing in found if drawing is not None]


def _saved(name: str, caption: str, figure: Figure | None) -> Drawing | None:
    """Without dates and versions, which would make every file differ."""
    if figure is None:
        return None
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name, caption, png.getvalue(), svg.getvalue())


def _axes(size: tuple[float, float]) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


# ---- accuracy against parameters ----


def _parameters(table: Table) -> Figure | None:
    counts, novel = table.column("parameters"), table.column("novel")
    points = [
        (line, count.value, cell.value, cell.spread)
        for line, count, cell in zip(table.lines, counts, novel, strict=True)
        if count.value is not None and cell.value is not None
    ]
    trained = [point for point in points if point[1]]
    if not trained:
        return None
    figure, axis = _axes((7, 4.4))
    axis.set(xscale="log", xlabel="trainable parameters", ylabel="accuracy on novel classes, %")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.margins(x=0.1, y=0.12)
    for line, count, value, spread in trained:
        perl = line.row.method == "perl"
        axis.errorbar(
            count, value, spread, fmt="*" if perl else "o", markersize=15 if perl else 7, zorder=3,
            color=VERMILION if perl else BLUE, ecolor="#bbbbbb", elinewidth=1.2,
        )  # fmt: skip
    for line, _, value, _ in (point for point in points if not point[1]):
        axis.axhline(value, color=GREY, linestyle="--", linewidth=1.2)
        axis.text(1.01, value, line.label, transform=axis.get_yaxis_transform(), color=GREY, va="center", fontsize=9)
    trained.sort(key=lambda point: point[0].row.method != "perl")
    _label(figure, axis, [(line.label, count, value, spread or 0) for line, count, value, spread in trained])
    return figure


# Places for a label around its point, the best first: direction, then alignment.
_AROUND = [
    (1, 0, "left", "center"), (-1, 0, "right", "center"), (0, 1, "center", "bottom"), (0, -1, "center", "top"),
    (0.7, 0.7, "left", "bottom"), (0.7, -0.7, "left", "top"), (-0.7, 0.7, "right", "bottom"),
    (-0.7, -0.7, "right", "top"),
]  # fmt: skip


def _label(figure: Figure, axis: Any, points: Sequence[tuple[str, float, float, float]]) -> None:
    """Each label where it covers least of points, their spreads, the dashed line and other labels."""
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    inside = axis.get_window_extent(renderer)
    taken = [line.get_window_extent(renderer).padded(2) for line in axis.lines if line.get_linestyle() == "--"]
    for _, x, value, spread in points:
        (left, low), (_, middle), (_, high) = axis.transData.transform([(x, value + s) for s in (-spread, 0, spread)])
        taken += [Bbox.from_extents(left - 2, low, left + 2, high)]
        taken += [Bbox.from_extents(left - 9, middle - 9, left + 9, middle + 9)]
    for label, x, value, _ in points:
        perl = label.startswith("perl")
        text = axis.annotate(label, (x, value), (0, 0), textcoords="offset points", fontsize=11 if perl else 9)
        text.set(in_layout=False, color=VERMILION if perl else "black", fontweight="bold" if perl else "normal")

        def place(distance: float, dx: float, dy: float, ha: str, va: str, text: Any = text) -> tuple[float, Bbox]:
            text.set(position=(distance * dx, distance * dy), ha=ha, va=va)
            box = text.get_window_extent(renderer)
            outside = box.width * box.height - _overlap(box, inside)
            return outside + sum(_overlap(box, other) for other in taken), box

        options = [(distance, *around) for distance in (10, 15, 20, 28) for around in _AROUND]
        best = min(options, key=lambda option: place(*option)[0])
        taken.append(place(*best)[1])


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return float(both.width * both.height) if both is not None else 0.0


# ---- accuracy against a setting or shots ----


@dataclass(frozen=True)
class Curve:
    """Points with their spread, and how to draw them."""

    label: str
    points: Sequence[tuple[float, Cell]]
    look: dict[str, Any]


def _settings(key: str, table: Table) -> Figure | None:
    """Base, novel and harmonic mean; only of settings that are one number."""
    looks = {"base": (BLUE, "o"), "novel": (VERMILION, "s"), "mean of HMs": (GREEN, "D")}
    curves = []
    for title, (colour, marker) in looks.items():
        points = [
            (float(line.setting), cell)
            for line, cell in zip(table.lines, table.column(title), strict=True)
            if isinstance(line.setting, int)
        ]
        curves.append(Curve(title, points, {"color": colour, "marker": marker}))
    what, symbol = SETTINGS[key]
    return _curves(curves, (5.4, 3.8), xlabel=f"{what} {symbol}")


def _shots(table: Table) -> Figure | None:
    shots = [column.title for column in table.columns if column.kind == "accuracy"]
    trained = [line for line, count in zip(table.lines, table.column("parameters"), strict=True) if count.value]
    others = [line for line in trained if line.row.method != "perl"]
    curves = []
    for i, line in enumerate(table.lines):
        points = [(float(title.split()[0]), table.column(title)[i]) for title in shots]
        if line in others:
            look = _look(others.index(line))
        elif line in trained:
            look = {"color": VERMILION, "marker": "*", "markersize": 11, "linewidth": 2.4, "zorder": 4}
        else:
            look = {"color": GREY, "linestyle": "--"}
        curves.append(Curve(line.label, points, look))
    return _curves(curves, (7, 4.8), xlabel="shots of each class", logarithmic=True)


def _look(rank: int) -> dict[str, Any]:
    """A colour and a marker; when the colours are used up, again with open markers."""
    colour, again = COLOURS[rank % len(COLOURS)], rank >= len(COLOURS)
    look = {"color": colour, "marker": MARKERS[rank % len(MARKERS)], "markersize": 5.5}
    return look | {"linestyle": "-.", "markerfacecolor": "white"} if again else look


def _curves(
    curves: Sequence[Curve], size: tuple[float, float], *, xlabel: str, logarithmic: bool = False
) -> Figure | None:
    """Curves with their names at the right end."""
    drawn = [replace(c, points=[(x, cell) for x, cell in c.points if cell.value is not None]) for c in curves]
    drawn = [curve for curve in drawn if curve.points]
    xs = sorted({x for curve in drawn for x, _ in curve.points})
    if len(xs) < 2:
        return None
    figure, axis = _axes(size)
    axis.set(xlabel=xlabel, ylabel="test accuracy, %")
    if logarithmic:
        axis.set_xscale("log", base=2)
    axis.set_xticks(xs, [f"{x:g}" for x in xs])
    axis.minorticks_off()
    for curve in drawn:
        x, cells = zip(*curve.points, strict=True)
        spreads = [cell.spread or 0 for cell in cells]
        axis.errorbar(x, [cell.value for cell in cells], spreads, **{"elinewidth": 1, "linewidth": 1.6} | curve.look)
    axis.margins(y=0.08)
    low, high = axis.get_ylim()
    gap = (high - low) * 12 / (72 * size[1] * 0.82)  # the height of a line of text
    ends = [curve.points[-1][1].value or 0.0 for curve in drawn]
    for curve, end, y in zip(drawn, ends, apart(ends, gap), strict=True):
        axis.annotate(
            curve.label, (curve.points[-1][0], end), (1.03, y), textcoords=axis.get_yaxis_transform(), va="center",
            color=curve.look["color"], fontsize=9, fontweight="bold" if curve.look.get("marker") == "*" else "normal",
            arrowprops={"arrowstyle": "-", "color": curve.look["color"], "linewidth": 0.6, "shrinkA": 0, "shrinkB": 5},
        )  # fmt: skip
    return figure


def apart(values: Sequence[float], gap: float) -> list[float]:
    """The values moved as little as makes neighbours differ by `gap` at least (pool adjacent violators)."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([values[i] - rank * gap])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    levels = [_mean(pool) for pool in pools for _ in pool]
    moved = {i: level + rank * gap for rank, (i, level) in enumerate(zip(order, levels, strict=True))}
    return [moved[i] for i in range(len(values))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
