"""Dynamics of iterative reasoning: PERL's curves by step, as `perlclip analyze STORE` leaves them for a report.

The analysis writes `settings.json` and the figures, the report reads them, and both make their tables and words here.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from perlclip.errors import PerlclipError, shell_word
from perlclip.viz.drawing import Drawing
from perlclip.viz.markup import MISSING, aligned, markdown_text

TITLE, FILE = "Dynamics of iterative reasoning", "settings.json"
BAND = ("mean", "low", "high")
LONG = ("setting", "dataset", "metric", "step", *BAND)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
LONG_DRIFT = ("setting", "transition", "images", "step", "mean", *(f"q{round(100 * q):02}" for q in QUANTILES))
Bands = dict[str, dict[str, list[float]]]  # metric -> mean, low, high -> a number for each step


@dataclass(frozen=True, kw_only=True)
class Dynamics:
    """PERL's curves by step, averaged over the data sets of each setting, and set by set."""

    conditions: list[str]  # of the runs: recipe, shots, backbone, settings
    images_a_set: int
    metrics: dict[str, str]  # name -> title
    averages: dict[str, Bands]  # by setting
    sets: dict[str, dict[str, Bands]]  # by setting and data set
    # By setting, of each transition: its name, how many images, mean and quantiles of KL(p_0 ‖ p_k) at every step.
    drift: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # 0.1.0 did not keep it

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
        for _, _, _, _, *numbers in self.long_drift():
            if len([float(number) for number in numbers]) != 1 + len(QUANTILES):
                raise ValueError("drift without quantiles")

    def whole(self, setting: str) -> str:
        """The setting that this one is half of, if there is one: base and novel classes of base-to-novel."""
        name, _, rest = setting.partition(": ")
        candidate = f"{name} {rest.partition(' ')[2]}".strip()
        return candidate if rest and candidate in self.averages else ""

    def half(self, setting: str) -> str:
        """Which half it is."""
        return setting.partition(": ")[2].partition(" ")[0]

    @property
    def note(self) -> str:
        """What was measured."""
        return (
            f"PERL's runs: {'; '.join(self.conditions)}. Accuracy is of all test images, as recorded; the rest of up "
            f"to {self.images_a_set} images of each test set. Bands are 95 % (Student's t): for averages those of the "
            "change since step 0, over data sets; for single sets over images. Seeds are averaged."
        )

    @property
    def set_figures(self) -> dict[str, str]:
        """File names without ending, and the setting that they show set by set; of halves, not of their whole."""
        wholes = {self.whole(setting) for setting in self.sets}
        settings = [setting for setting in self.sets if setting not in wholes]
        return {"sets-" + re.sub(r"[^\w.=-]+", "-", setting).strip("-"): setting for setting in settings}

    @property
    def figures(self) -> dict[str, str]:
        """File names without ending, and captions: of the averages, of the drift, then one for each setting."""
        captions = {"settings": "Each setting's mean over its data sets at every step, with 95 % bands; own scales."}
        if self.drift:
            captions["drift"] = (
                "KL(p₀ ‖ pₖ) by setting and transition, images of all sets and seeds. Boxes: the middle half, with the "
                "median; whiskers: 5 to 95 %; small marks: the mean."
            )
        for name, setting in self.set_figures.items():
            count = len(self.sets[setting])
            captions[name] = f"{setting}, set by set ({count} data set{'s' * (count != 1)})."
        return captions

    @property
    def tables(self) -> list[tuple[list[str], list[list[str]]]]:
        """Head and rows: the averages, and the median drift."""
        return [(self.head, self.rows), *([(self.drift_head, self.drift_rows)] if self.drift else [])]

    @property
    def drift_head(self) -> list[str]:
        """Of the drift's table."""
        return ["setting", "transition", "images", *(f"median KL, {step}" for step in self.head[4:])]

    @property
    def drift_rows(self) -> list[list[str]]:
        """A line for each setting and transition."""
        rows = []
        for setting, found in self.drift.items():
            for one in found:
                medians = [f"{numbers[QUANTILES.index(0.5)]:.3g}" for numbers in one["quantiles"][1:]]
                row = [setting, one["transition"], f"{one['count']:,}", *medians]
                rows.append(row + [MISSING] * (len(self.drift_head) - len(row)))
        return rows

    def long_drift(self) -> Iterator[list[Any]]:
        """A line for each setting, transition and step, in the columns `LONG_DRIFT`."""
        for setting, found in self.drift.items():
            for one in found:
                for k, (mean, quantiles) in enumerate(zip(one["mean"], one["quantiles"], strict=True)):
                    yield [setting, one["transition"], one["count"], k, mean, *quantiles]

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
        paragraphs = [f"## {markdown_text(title)}", markdown_text(self.note)]
        for head, rows in self.tables:
            paragraphs.append(aligned(head, [[markdown_text(word) for word in row] for row in rows]).rstrip())
        for stem, caption in self.figures.items():
            picture = f"![{markdown_text(caption)}]({figures}{stem}.png)"
            folded = [f"<details><summary>{escape(caption)}</summary>", picture, "</details>"]
            paragraphs += folded if stem in self.set_figures else [picture]
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
