"""A figure as files. The same numbers give the same bytes, and all figures have one style."""

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation

from perlclip.viz.style import INK, STYLE


@dataclass(frozen=True)
class Drawing:
    """A figure, and what it shows."""

    name: str
    caption: str
    png: bytes
    svg: bytes

    @property
    def inline(self) -> str:
        """The SVG element for a page: in the page's own ink, without a ground."""
        text = re.sub(r"<metadata>.*?</metadata>", "", self.svg.decode(), flags=re.DOTALL)
        element = text[text.index("<svg") :].replace(INK, "currentColor").replace("fill: #ffffff", "fill: none")
        return element.replace("<svg ", '<svg role="img" ', 1)

    def files(self, folder: Path) -> dict[Path, bytes]:
        """NAME.png and NAME.svg in a folder."""
        return {folder / f"{self.name}.png": self.png, folder / f"{self.name}.svg": self.svg}


def draw(name: str, caption: str, size: tuple[float, float], paint: Callable[[Figure], object]) -> Drawing:
    """What `paint` puts on an empty figure of this size in inches, without dates and versions."""
    png, svg = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a box in the PNG; the SVG has the text itself
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        for axis in (axis for axes in figure.get_axes() for axis in (axes.xaxis, axes.yaxis)):
            _say_powers_plainly(axis)
        figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
        figure.set_layout_engine("none")  # it is laid out now, and both files shall look alike
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name, caption, png.getvalue(), svg.getvalue())


def _say_powers_plainly(axis: Any) -> None:
    """Logarithmic axes write their numbers as mathematics, which figures do not read: so they shall not."""
    if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
        axis.set_major_formatter(_Powers())
    if isinstance(axis.get_minor_formatter(), LogFormatterSciNotation):
        axis.set_minor_formatter(_Powers())


class _Powers(LogFormatterSciNotation):
    """`2×10⁻³` for 0.002."""

    def __call__(self, x: float, pos: Any = None) -> str:
        text = str(super().__call__(x, pos)).replace(r"\times", "×")
        raised = re.sub(r"\^\{(.*?)\}", lambda found: found[1].translate(_RAISED), text)
        return re.sub(r"[${}]|\\mathdefault", "", raised)


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
