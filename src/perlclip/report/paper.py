"""The paper: its settings, the order it names things in, its tables as printed, and the cells that contradict others.

They are facts about the paper, not about this code: what runs are compared with stays, whatever defaults become.

`published/tables.csv` holds the tables of `perl.tex` (without the column ×PERL, which follows from the parameters) and,
as table `text`, the accuracies its prose names. The average HM is the mean of the data sets' HMs.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

SUITE, BACKBONE, RECIPE, SHOTS = "coop", "openai/clip-vit-base-patch16", "fast", 16
METHODS = (
    "zero-shot", "coop", "cocoop", "kgcoop", "maple", "promptsrc", "provp", "tcp", "mma", "mmrl", "mmrl++", "perl",
)  # fmt: skip
SETS = (
    "imagenet", "caltech101", "oxford_pets", "stanford_cars", "oxford_flowers", "food101", "fgvc_aircraft", "sun397",
    "dtd", "eurosat", "ucf101", "imagenet_v2", "imagenet_sketch", "imagenet_a", "imagenet_r",
)  # fmt: skip
# How the paper prints them, in its order.
NAMES = dict(
    zip(
        (*METHODS, *SETS),
        (
            "CLIP", "CoOp", "CoCoOp", "KgCoOp", "MaPLe", "PromptSRC", "ProVP", "TCP", "MMA", "MMRL", "MMRL++", "PERL",
            "ImageNet", "Caltech101", "OxfordPets", "StanfordCars", "Flowers102", "Food101", "FGVCAircraft", "SUN397",
            "DTD", "EuroSAT", "UCF101", "ImageNet-V2", "ImageNet-Sketch", "ImageNet-A", "ImageNet-R",
        ),
        strict=True,
    )
)  # fmt: skip
CALLED = {"base": "Base", "novel": "Novel", "mean of HMs": "HM", "mean of targets": "Average"}  # of its averages
SOURCE = SETS[0]
AVERAGED_OVER = {"base-to-novel": 11, "cross-dataset": 11, "domain-shift": 5}  # sets of each protocol
# PERL's settings, the depth of each variant, and the order in which the tables have the words among the settings.
PERL = {
    "rank": 1, "steps": 4, "depth": 7, "anchor": 1.0, "modalities": "both", "variant": "shared", "init": "normal",
}  # fmt: skip
DEPTHS = {"shared": 7, "early": 0, "deep": (3, 7, 11), "step": 7, "layer": (7, 9, 11), "layerstep": (7, 9, 11)}
# Of its table of variants the columns behind J, and what each variant has of them.
TRAITS = ("skip early", "multi-depth", "layer-specific", "step-specific")
VARIANTS = {
    "early": (), "deep": TRAITS[1:2], "shared": TRAITS[:1], "step": (TRAITS[0], TRAITS[3]), "layer": TRAITS[:3],
    "layerstep": TRAITS,
}  # fmt: skip
WORDS = (*DEPTHS, "text", "vision", "both", "normal", "torch", "zero")


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


@cache
def published() -> tuple[Published, ...]:
    """All numbers, in the order of the paper: the main tables come before the appendix, the prose is last."""
    return tuple(Published(printed=row.pop("value"), **row) for row in _read("tables.csv"))


def ratio(parameters: Published) -> Published:
    """The cell of the column ×PERL: it is that of the rounded counts, so 4.9M / 6K = 817 for MMRL."""
    times = parameters.value / 6000
    return replace(parameters, metric="ratio", printed=f"{int(times + 0.5)}" if times >= 1 else f"{times:.2f}")


def slips() -> list[Slip]:
    """All cells that contradict others."""
    return [Slip(**row) for row in _read("slips.csv")]


def value(protocol: str, recipe: str, method: str, dataset: str, metric: str, settings: str = "") -> Published | None:
    """The number where it is printed first, None where it is not; PERL has only `fast`, zero-shot CLIP any recipe."""
    return _first().get((protocol, _trained(recipe, method), method, dataset, metric, settings))


@cache
def _first() -> dict[tuple[str, ...], Published]:
    first: dict[tuple[str, ...], Published] = {}
    for row in published():
        recipe = _trained(row.recipe, row.method)
        first.setdefault((row.protocol, recipe, row.method, row.dataset, row.metric, row.settings), row)
    return first


def _trained(recipe: str, method: str) -> str:
    return "" if method == "zero-shot" else recipe


def _read(name: str) -> Iterator[dict[str, str]]:
    text = files("perlclip.report").joinpath("published", name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())
