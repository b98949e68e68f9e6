"""Dynamics of iterative reasoning: what `perlclip analyze STORE` leaves, and a report's section about it.

The analysis writes `settings.json` and the figures, the report reads them, and both make their tables and words here.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perlclip.errors import PerlclipError
from perlclip.report.plots import Drawing
from perlclip.report.tables import MISSING
from perlclip.report.text import aligned

TITLE = "Dynamics of iterative reasoning"
FILE, AVERAGES = "settings.json", "settings"
BAND = ("mean", "low", "high")
LONG = ("setting", "dataset", "metric", "step", *BAND)
Curves = dict[str, dict[str, list[float]]]  # metric -> mean, low, high -> a number for each step


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """PERL's curves by step, averaged over the data sets of each setting, and set by set."""

    conditions: list[str]  # of the runs: recipe, shots, backbone, settings
    images_a_set: int
    metrics: dict[str, str]  # name -> title
    averages: dict[str, Curves]  # by setting
    sets: dict[str, dict[str, Curves]]  # by setting and data set

    def content(self) -> bytes:
        """As a file."""
        return (json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n").encode()

    def check(self) -> None:
        """Raise if a number that is to be shown is missing or none."""
        if not self.averages or self.averages.keys() != self.sets.keys() or not all(self.sets.values()):
            raise ValueError("settings without data sets")
        each = [curves for found in self.sets.values() for curves in found.values()]
        for curves in [*self.averages.values(), *each]:
            for metric in self.metrics:
                steps = {len([float(number) for number in curves[metric][part]]) for part in BAND}
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
        each = {
            "sets-" + re.sub(r"[^\w.=-]+", "-", setting).strip("-"): f"{setting}, set by set ({_sets(len(found))})."
            for setting, found in self.sets.items()
        }
        return {AVERAGES: "Each setting's mean over its data sets at every step, with 95 % bands.", **each}

    @property
    def head(self) -> list[str]:
        """Of the averages' table."""
        steps = max(len(curve["mean"]) for curves in self.averages.values() for curve in curves.values())
        return ["setting", "sets", "metric", *(f"k = {k}" for k in range(steps))]

    @property
    def rows(self) -> list[list[str]]:
        """A line for each setting and metric."""
        rows = []
        for setting, curves in self.averages.items():
            for metric, title in self.metrics.items():
                numbers = [f"{number:.4g}" for number in curves[metric]["mean"]]
                row = [setting, str(len(self.sets[setting])), title, *numbers]
                rows.append(row + [MISSING] * (len(self.head) - len(row)))
        return rows

    def long(self) -> Iterator[list[Any]]:
        """A line for each number, averages first, in the columns `LONG`."""
        means = {setting: {"mean": curves} for setting, curves in self.averages.items()}
        for setting, found in [*means.items(), *self.sets.items()]:
            for dataset, curves in found.items():
                for metric in self.metrics:
                    for k, numbers in enumerate(zip(*(curves[metric][part] for part in BAND), strict=True)):
                        yield [setting, dataset, metric, k, *numbers]


def _sets(count: int) -> str:
    return f"{count} data set{'s' * (count != 1)}"


@dataclass(frozen=True)
class Chapter:
    """An analysis in a report; `name` is its anchor and how its files' names begin."""

    name: str
    title: str
    found: Dynamics
    drawings: list[Drawing]  # as `Dynamics.figures`


def chapters(folders: Sequence[Path]) -> list[Chapter]:
    """The analyses in the folders, told apart by their runs where there are several."""
    made = []
    for i, folder in enumerate(folders, start=1):
        found = _read(folder)
        name = "dynamics" if i == 1 else f"dynamics-{i}"
        title = f"{TITLE}: {'; '.join(found.conditions)}" if len(folders) > 1 else TITLE
        made.append(Chapter(name, title, found, _drawings(folder, found, name)))
    return made


def _read(folder: Path) -> Dynamics:
    path = folder / FILE
    if not path.is_file():
        raise PerlclipError(f"{folder} holds no analysis of a store: there is no {FILE} of `perlclip analyze STORE`")
    try:
        found = Dynamics(**json.loads(path.read_bytes()))
        found.check()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PerlclipError(f"{path} is damaged or of another version; {_again(folder)}") from error
    return found


def _drawings(folder: Path, found: Dynamics, name: str) -> list[Drawing]:
    made = []
    for stem, caption in found.figures.items():
        files = {}
        for kind, start in (("png", b"\x89PNG"), ("svg", b"<?xml")):
            path = folder / f"{stem}.{kind}"
            files[kind] = path.read_bytes() if path.is_file() else b""
            if not files[kind].startswith(start):
                raise PerlclipError(f"{path} is missing or damaged; {_again(folder)}")
        made.append(Drawing(f"{name}-{stem}", caption, **files))
    return made


def _again(folder: Path) -> str:
    return f"`perlclip analyze STORE --out {folder}` writes it again"


def dynamics_markdown(title: str, found: Dynamics, figures: str = "") -> list[str]:
    """The section's paragraphs; `figures` is what stands before the figures' file names."""
    (averages, caption), *each = found.figures.items()
    paragraphs = [f"## {title}", found.note, aligned(found.head, found.rows).rstrip()]
    paragraphs.append(f"![{caption}]({figures}{averages}.png)")
    for stem, caption in each:
        paragraphs += [f"<details><summary>{caption}</summary>", f"![{caption}]({figures}{stem}.png)", "</details>"]
    return paragraphs
