"""The figure of `benchmarks.adaptive`: accuracy against mean refinement passes, base and novel classes side by side."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from perlclip.viz import drawing
from perlclip.viz.style import BLUE, GREEN, GREY, VERMILION

Row = dict[str, Any]


def draw(curve: Sequence[Row]) -> tuple[bytes, bytes]:
    """PNG and SVG; the same numbers give the same bytes."""

    def paint(figure: Figure) -> None:
        for axis, classes in zip(figure.subplots(1, 2), ("base", "novel"), strict=True):
            _panel(axis, classes, [row for row in curve if row["classes"] == classes])

    drawn = drawing.draw("curve", "", (9, 4), paint)
    return drawn.png, drawn.svg


def _panel(axis: Any, classes: str, rows: Sequence[Row]) -> None:
    kinds = {kind: _points(rows, kind) for kind in ("k steps", "image k, classes K", "budget", "adaptive")}
    (x_K, last), (star_x, star_y) = kinds["k steps"][-1], kinds["adaptive"][0]
    axis.axhspan(last - 0.2, last + 0.2, color="#eeeeee", zorder=0)
    axis.text(0.64 * x_K, last, "within 0.2 of K", ha="center", va="center", fontsize=8, color=GREY)
    axis.plot(*zip(*kinds["k steps"], strict=True), "o:", color=BLUE, label="all images k steps, classes k")
    axis.plot(
        *zip(*kinds["image k, classes K"], strict=True), "D:", color=GREEN, markerfacecolor="white",
        label="all images k steps, classes K",
    )  # fmt: skip
    axis.plot(*zip(*kinds["budget"], strict=True), "-", color=VERMILION, linewidth=2.2, label="adaptive, by budget")
    axis.plot(star_x, star_y, "*", color=VERMILION, markersize=15, zorder=5, label='steps="adaptive"')
    for k, (x, y) in enumerate(kinds["k steps"]):
        axis.annotate(f"k={k}", (x, y), (5, -11), textcoords="offset points", fontsize=8, color=BLUE)
    axis.set(title=f"{classes} classes", xlabel="mean refinement passes an image", ylabel="accuracy, %")
    axis.margins(x=0.08, y=0.12)
    if classes == "base":
        axis.legend(loc="lower right", frameon=False, fontsize=9)


def _points(rows: Sequence[Row], kind: str) -> list[tuple[float, float]]:
    return sorted((row["passes"], row["accuracy"]) for row in rows if row["kind"] == kind)
