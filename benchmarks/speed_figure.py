"""The growth curves of `benchmarks.speed`: time and memory against classes, images and steps."""

from matplotlib.figure import Figure

from benchmarks.common import Reading
from perlclip.viz.drawing import draw
from perlclip.viz.style import BLUE, GREY, VERMILION

TITLES = {
    "classes": ("classes", "a training step of 4 images"),
    "batch": ("images in a batch", "image inference"),
    "steps": ("refinement steps K", "image inference"),
}


def draw_growth(curves: dict[str, list[tuple[int, Reading]]]) -> bytes:
    """A panel for each axis; the grey line is linear growth through the last point."""

    def paint(figure: Figure) -> None:
        for panel, (axis, curve) in zip(figure.subplots(1, 3), curves.items(), strict=True):
            label, title = TITLES[axis]
            sizes = [size for size, _ in curve]
            times = [reading["ms"] for _, reading in curve]
            panel.plot(sizes, times, "o-", color=BLUE)
            panel.set(xlabel=label, title=title)
            panel.set_ylabel("milliseconds", color=BLUE)
            if axis == "steps":
                panel.set_ylim(0)
            else:
                panel.plot(sizes, [times[-1] * size / sizes[-1] for size in sizes], color=GREY, lw=1, zorder=0)
                panel.set(xscale="log", yscale="log")
            peaks = [reading.get("peak_MiB") for _, reading in curve]
            if all(peaks):
                other = panel.twinx()
                other.plot(sizes, peaks, "s--", color=VERMILION, ms=4)
                other.set_ylabel("peak MiB", color=VERMILION)
                other.grid(visible=False)
                other.spines["right"].set_visible(True)
                if axis == "steps":
                    other.set_ylim(0)
                else:
                    other.set_yscale("log")

    return draw("growth", "", (12, 3.8), paint).png
