"""How every figure looks: colours that the colour-blind can tell apart (Okabe and Ito), and a marker for each line."""

from typing import Any

INK, SOFT, GREY = "#1c2330", "#8a93a2", "#777777"
BLUE, ORANGE, GREEN, PINK, SKY, VERMILION = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, INK)  # vermilion is for what is set off, grey for what stands behind
MARKERS = "osD^vPX"
# Names are text: `$1 or $2 bill` is no formula, and `$\input{x}$` no reason to stop.
STYLE: dict[str, Any] = {
    "text.parse_math": False, "text.usetex": False, "axes.formatter.use_mathtext": False,
    "font.size": 10, "font.family": "sans-serif", "svg.fonttype": "none", "text.color": INK, "axes.labelcolor": INK,
    "axes.titlecolor": INK, "axes.titlesize": 10.5, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": SOFT,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True,
    "grid.color": SOFT, "grid.alpha": 0.25, "grid.linewidth": 0.8, "legend.frameon": False, "legend.fontsize": 9.5,
}  # fmt: skip


def look(rank: int) -> dict[str, Any]:
    """Colour and marker of the line of this rank; when the colours are used up, again with open markers."""
    again, colour = rank >= len(COLOURS), COLOURS[rank % len(COLOURS)]
    return {
        "color": colour, "marker": MARKERS[rank % len(MARKERS)], "markersize": 5.5,
        "linestyle": "-." if again else "-", "markerfacecolor": "white" if again else colour,
    }  # fmt: skip
