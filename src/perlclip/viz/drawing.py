"""A figure as files. The same numbers give the same bytes, and all figures have one style."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

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
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        paint(figure)
        figure.savefig(png, format="png", dpi=160, metadata={"Software": None})
        figure.set_layout_engine("none")  # it is laid out now, and both files shall look alike
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return Drawing(name, caption, png.getvalue(), svg.getvalue())
