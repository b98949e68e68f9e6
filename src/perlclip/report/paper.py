"""The paper's tables as printed, and the cells in them that contradict others.

`published/tables.csv` holds the tables of `perl.tex` (without the column ×PERL, which follows from the parameters) and,
as table `text`, the accuracies its prose names. The average HM is the mean of the data sets' HMs.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, kw_only=True)
class Published:
    """One number as printed; zero-shot CLIP is not trained, so its recipe is only that of the table it stands in."""

    table: str  # the LaTeX label without "tab:"
    protocol: str  # base-to-novel, cross-dataset or domain-shift
    recipe: str  # fast, or original for competitors in their authors' setting
    method: str
    settings: str  # of an ablation, as in "variant=deep"; else empty
    dataset: str  # or "average"
    metric: str  # base, novel, hm, accuracy, parameters; delta_hm and delta are gaps to PERL's average
    printed: str

    @property
    def value(self) -> float:
        """The number; `6K` parameters are 6000."""
        return float(self.printed.replace("K", "e3").replace("M", "e6"))


@dataclass(frozen=True, kw_only=True)
class Slip:
    """A printed number that contradicts others."""

    table: str
    method: str
    settings: str
    dataset: str
    metric: str
    printed: str
    expected: str  # by the other cells; empty where they do not tell
    why: str


def published() -> list[Published]:
    """All numbers, in the order of the paper: the main tables come before the appendix, the prose is last."""
    return list(_published())


def slips() -> list[Slip]:
    """All cells that contradict others."""
    return [Slip(**row) for row in _read("slips.csv")]


def value(protocol: str, recipe: str, method: str, dataset: str, metric: str, settings: str = "") -> Published | None:
    """The number where it is printed first, None where it is not; PERL has only `fast`, zero-shot CLIP any recipe."""
    return _first().get((protocol, _trained(recipe, method), method, dataset, metric, settings))


@cache
def _published() -> tuple[Published, ...]:
    return tuple(Published(printed=row.pop("value"), **row) for row in _read("tables.csv"))


@cache
def _first() -> dict[tuple[str, ...], Published]:
    first: dict[tuple[str, ...], Published] = {}
    for row in _published():
        recipe = _trained(row.recipe, row.method)
        first.setdefault((row.protocol, recipe, row.method, row.dataset, row.metric, row.settings), row)
    return first


def _trained(recipe: str, method: str) -> str:
    return "" if method == "zero-shot" else recipe


def _read(name: str) -> Iterator[dict[str, str]]:
    text = files("perlclip.report").joinpath("published", name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())
