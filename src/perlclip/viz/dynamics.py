"""Dynamics of iterative reasoning: PERL's curves by step, as `perlclip analyze STORE` leaves them for a report.

The analysis writes `settings.json` and the figures, the report reads them, and both make their tables and words here.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from perlclip.errors import PerlclipError, shell_word
from perlclip.viz.drawing import Drawing
from perlclip.viz.markup import MISSING, aligned, markdown_text

TITLE, FILE = "Dynamics of iterative reasoning", "settings.json"
BAND = ("mean", "low", "high")
LONG = ("setting", "dataset", "metric", "step", *BAND)
Bands = dict[str, dict[str, list[float]]]  # metric -> mean, low, high -> a number for each step


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """PERL's curves by step, averaged over the data sets of each setting, and set by set."""

    conditions: list[str]  # of the runs: recipe, shots, backbone, settings
    images_a_set: int
    metrics: dict[str, str]  # name -> title
    averages: dict[str, Bands]  # by setting
    sets: dict[str, dict[str, Bands]]  # by setting and data set

    def content(self) -> bytes:
        """As a file."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()

    def check(self) -> None:
        """Raise if a number that is to be shown is missing or none."""
        if not self.averages or self.averages.keys() != self.sets.keys() or not all(self.sets.values()):
            raise ValueError("settings without data sets")
        each = [bands for found in self.sets.values() for bands in found.values()]
        for bands in [*self.averages.values(), *each]:
            for metric in self.metrics:
                steps = {len([float(number) for number in bands[metric][part]]) for part in BAND}
                if len(steps) > 1 or 0 in steps:
                    raise ValueError(f"{metric} without steps")

    @property
    def note(self) -> str:
        """What was measured."""
        return (
            f"PERL's runs: {'; '.join(self.conditions)}. Accuracy is of all test images, as recorded; the rest of up "
            f"to {self.images_a_set} images of each test set. Bands are 95 %: for averages those of the change since "
            "step 0, over data sets; for single sets over images. Seeds are averaged."
        )

    @property
    def figures(self) -> dict[str, str]:
        """File names without ending, and captions: that of the averages, then one for each setting."""
        captions = {"settings": "Each setting's mean over its data sets at every step, with 95 % bands."}
        for setting, found in self.sets.items():
            name = re.sub(r"[^\w.=-]+", "-", setting).strip("-")
            captions[f"sets-{name}"] = f"{setting}, set by set ({len(found)} data set{'s' * (len(found) != 1)})."
        return captions

    @property
    def head(self) -> list[str]:
        """Of the averages' table."""
        steps = max(len(band["mean"]) for bands in self.averages.values() for band in bands.values())
        return ["setting", "sets", "metric", *(f"k = {k}" for k in range(steps))]

    @property
    def rows(self) -> list[list[str]]:
        """A line for each setting and metric."""
        rows = []
        for setting, bands in self.averages.items():
            for metric, title in self.metrics.items():
                numbers = [f"{number:.4g}" for number in bands[metric]["mean"]]
                row = [setting, str(len(self.sets[setting])), title, *numbers]
                rows.append(row + [MISSING] * (len(self.head) - len(row)))
        return rows

    def long(self) -> Iterator[list[Any]]:
        """A line for each number, averages first, in the columns `LONG`."""
        means = {setting: {"mean": bands} for setting, bands in self.averages.items()}
        for setting, found in [*means.items(), *self.sets.items()]:
            for dataset, bands in found.items():
                for metric in self.metrics:
                    for k, numbers in enumerate(zip(*(bands[metric][part] for part in BAND), strict=True)):
                        yield [setting, dataset, metric, k, *numbers]

    def markdown(self, title: str = TITLE, figures: str = "") -> str:
        """A section; `figures` is what stands before the figures' file names."""
        (averages, caption), *each = self.figures.items()
        rows = [[markdown_text(word) for word in row] for row in self.rows]
        paragraphs = [f"## {markdown_text(title)}", markdown_text(self.note), aligned(self.head, rows).rstrip()]
        paragraphs.append(f"![{caption}]({figures}{averages}.png)")
        for stem, caption in each:
            paragraphs += [f"<details><summary>{escape(caption)}</summary>"]
            paragraphs += [f"![{markdown_text(caption)}]({figures}{stem}.png)", "</details>"]
        return "\n\n".join(paragraphs)


def read_dynamics(folder: Path) -> tuple[Dynamics, list[Drawing]]:
    """What an analysis has written, with its figures as `Dynamics.figures` lists them."""
    path = folder / FILE
    if not path.is_file():
        raise PerlclipError(f"{folder} holds no analysis of a store: there is no {FILE} of `perlclip analyze STORE`")
    again = f"`perlclip analyze STORE --out {shell_word(folder)}` writes it again"
    try:
        found = Dynamics(**json.loads(path.read_bytes()))
        found.check()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PerlclipError(f"{path} is damaged or of another version; {again}") from error
    drawings = []
    for stem, caption in found.figures.items():
        files = {}
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            path = folder / f"{stem}.{kind}"
            files[kind] = path.read_bytes() if path.is_file() else b""
            if not files[kind].startswith(start):
                raise PerlclipError(f"{path} is missing or damaged; {again}")
        drawings.append(Drawing(stem, caption, **files))
    return found, drawings
