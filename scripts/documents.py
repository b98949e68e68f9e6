"""The tables of the documents, made from the results that are committed: one number for one configuration.

    python -m scripts.documents        # rewrites what stands between <!-- table NAME --> and <!-- end -->

Everything is read from docs/results, which `python -m scripts.results` writes. A table whose results are not there
stays as it is. A test compares the documents with what this makes.
"""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, harmonic_mean, pstdev

from benchmarks.everyone import DIFFERENCES, HEAD, by_set, differences, means
from benchmarks.strong import means as strong_means
from perlclip.files import write_files
from perlclip.methods.registry import find_recipe
from scripts import house

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BENCH, ADAPTIVE, ANALYSIS = (Path("docs/results") / name for name in ("toybox/bench", "adaptive", "analysis"))
BLOCK = re.compile(r"<!-- table ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
STRONG = Path("docs/results/strong")
CONDITION = "toybox-tiny-float32-16shot"
HALVES = ("base", "novel")
Row = dict[str, str]


class MissingError(Exception):
    """The results that a table is made of have not been made yet."""


@cache
def read(path: Path) -> list[Row]:
    """A CSV file of the results."""
    if not (ROOT / path).exists():
        raise MissingError(path)
    with (ROOT / path).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As the documents have it."""
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def number(row: Mapping[str, str] | None, column: str, *, spread: bool = True) -> str:
    """`73.55 ± 0.92`, or a dash where there is none."""
    if row is None or not row.get(column):
        return "–"
    deviation = row.get(f"{column}_std") if spread else ""
    return f"{float(row[column]):.2f}" + (f" ± {float(deviation):.2f}" if deviation else "")


def count(row: Mapping[str, str]) -> str:
    """`1,122`."""
    return f"{float(row['parameters']):,.0f}"


# ---- all methods ----


def summary(protocol: str) -> list[Row]:
    """A row for each method, means over sets and seeds."""
    source = "" if protocol == "base-to-novel" else "toybox-"
    return read(BENCH / "tables" / f"{protocol}-toybox-{source}{CONDITION.removeprefix('toybox-')}-summary.csv")


def compared() -> list[Row]:
    """The rows of base-to-novel but `strong`, an older one here: its source is `benchmarks.everyone`."""
    return [row for row in summary("base-to-novel") if row["label"] != "perl (strong)"]


def main_table() -> str:
    """All methods by the paper's protocol."""
    others = [{row["label"]: row for row in summary(protocol)} for protocol in ("cross-dataset", "domain-shift")]
    rows = [
        [
            row["label"], count(row), number(row, "base"), number(row, "novel"),
            number(row, "HM_of_means", spread=False),
            *(number(found.get(row["label"]), "mean_of_targets") for found in others),
        ]
        for row in compared()
    ]  # fmt: skip
    head = ["", "parameters", "base", "novel", "HM of means", "10 other sets", "4 variants of the source"]
    return table(head, rows).replace("|  |", "| |", 1)


def methods_table() -> str:
    """Both averages of HM."""
    columns = ("base", "novel", "mean_of_HMs", "HM_of_means")
    rows = [[row["label"], count(row), *(number(row, column) for column in columns)] for row in compared()]
    return table(["method", "parameters", *(column.replace("_", " ") for column in columns)], rows)


# ---- PERL by the towers that think: every step, every set ----


@dataclass(frozen=True)
class Perl:
    """The base-to-novel runs of PERL by one recipe, with one setting or none."""

    setting: str = ""
    recipe: str = "extended"

    @property
    def runs(self) -> list[Row]:
        """Of all sets and seeds."""
        same = {"protocol": "base-to-novel", "method": "perl", "recipe": self.recipe, "settings": self.setting}
        found = [row for row in read(BENCH / "runs.csv") if all(row[key] == value for key, value in same.items())]
        found = [row for row in found if row.get("head") != "True"]
        if not found:
            raise MissingError(self)
        return found

    def mean(self, column: str, dataset: str = "") -> float:
        """Over sets and seeds, or of one set."""
        return fmean(float(row[column]) for row in self.runs if row["dataset"] == dataset or not dataset)

    def shown(self, column: str) -> str:
        """With the deviation over seeds of the mean over sets."""
        seeds = sorted({row["seed"] for row in self.runs})
        means = [fmean(float(row[column]) for row in self.runs if row["seed"] == seed) for seed in seeds]
        return f"{fmean(means):.2f} ± {pstdev(means):.2f}"


TOWERS = {"both towers": "", "text only": "modalities=text", "vision only": "modalities=vision"}


def towers_table() -> str:
    """Which towers think."""
    first = [Perl().mean(f"{half}_k0") for half in HALVES]
    rows = [["nothing (zero-shot CLIP)", "0", *(f"{value:.2f}" for value in first), f"{harmonic_mean(first):.2f}"]]
    for name, setting in TOWERS.items():
        perl = Perl(setting)
        hm = harmonic_mean([perl.mean(half) for half in HALVES])
        rows.append([name, count(perl.runs[0]), *(perl.shown(half) for half in HALVES), f"{hm:.2f}"])
    return table(["PERL thinks in", "parameters", "base", "novel", "HM"], rows)


def steps_table() -> str:
    """Accuracy by step."""
    rows = []
    for name, setting in TOWERS.items():
        for half in HALVES:
            steps = [f"{Perl(setting).mean(f'{half}_k{k}'):.1f}" for k in range(5)]
            rows.append([f"{name.removesuffix(' towers')}, {half}", *steps])
    return table(["", "k = 0", "1", "2", "3", "4"], rows).replace("|  |", "| |", 1)


def sets_table() -> str:
    """Set by set, in the order of the suite."""
    for setting in TOWERS.values():
        Perl(setting).runs  # noqa: B018  the tables of that page are of one store: all of them or none
    names = [name for name in read(BENCH / "runs.csv")[0] if name in {row["dataset"] for row in Perl().runs}]
    rows = [[name, *(f"{Perl().mean(f'{half}_k{k}', name):.1f}" for k in (0, 4) for half in HALVES)] for name in names]
    return table(["set", "CLIP base", "CLIP novel", "PERL base", "PERL novel"], rows)


# ---- ablations ----


def ablation(key: str, recipe: str) -> list[Row]:
    """A row for each value of a setting."""
    return read(BENCH / "tables" / f"base-to-novel-{CONDITION}-ablation-{key}-{recipe}.csv")


def ablation_table(key: str, head: str) -> Callable[[], str]:
    """Both recipes beside each other."""

    def made() -> str:
        fast, extended = ([*ablation(key, recipe)] for recipe in ("fast", "extended"))
        columns = ("base", "novel", "mean_of_HMs")
        rows = [
            [one["label"], count(one), *(number(row, column) for row in (one, two) for column in columns)]
            for one, two in zip(fast, extended, strict=True)
        ]
        names = [f"`{recipe}` {half}" for recipe in ("fast", "extended") for half in ("base", "novel", "HM")]
        return table([head, "parameters", *names], rows)

    return made


def claims() -> str:
    """What the paper says of its ablations, held against ours; the verdict is of means, whatever their spread."""
    lines = []
    for recipe in ("fast", "extended"):
        told = []
        for claim, holds, numbers in _claims(recipe):
            told.append([claim, "yes" if holds else "no", numbers])
        lines.append(f"Recipe `{recipe}`:\n\n{table(['the paper says', 'here', 'numbers'], told)}")
    return "\n".join(lines)


def _claims(recipe: str) -> Iterator[tuple[str, bool, str]]:
    def of(key: str, column: str = "mean_of_HMs") -> dict[str, float]:
        return {row["label"].removesuffix(" (default)"): float(row[column]) for row in ablation(key, recipe)}

    depth, steps, variant, towers = of("vision_depth"), of("steps"), of("variant"), of("modalities")
    best = max(depth, key=lambda j: depth[j])
    yield "HM peaks at J = 7", best == "7", f"highest at J = {best}: {depth[best]:.2f}; at 7: {depth['7']:.2f}"
    base, novel = of("vision_depth", "base"), of("vision_depth", "novel")
    yield (
        "deeper layers trade novel for base classes",
        base["11"] > base["7"] and novel["11"] < novel["7"],
        f"J = 7 → 11: base {base['11'] - base['7']:+.2f}, novel {novel['11'] - novel['7']:+.2f}",
    )
    later = max(steps[k] for k in ("5", "6", "7", "8"))
    yield (
        "HM rises to K = 4, then saturates",
        steps["4"] > steps["1"] and later - steps["4"] < steps["4"] - steps["0"],
        ", ".join(f"K = {k}: {steps[k]:.2f}" for k in ("0", "1", "2", "4", "8")),
    )
    yield "Early harms", variant["early"] < variant["shared"], f"{variant['early'] - variant['shared']:+.2f} HM"
    base, novel = of("variant", "base"), of("variant", "novel")
    yield (
        "Deep gains on base and loses on novel classes",
        base["deep"] > base["shared"] and novel["deep"] < novel["shared"],
        f"base {base['deep'] - base['shared']:+.2f}, novel {novel['deep'] - novel['shared']:+.2f}",
    )
    more = {name: variant[name] - variant["shared"] for name in ("step", "layer", "layerstep")}
    yield (
        "more projectors help, LayerStep most",
        min(more.values()) > 0 and max(more, key=lambda name: more[name]) == "layerstep",
        ", ".join(f"{name} {gain:+.2f}" for name, gain in more.items()),
    )
    yield (
        "both towers, then text, then vision",
        towers["both"] > towers["text"] > towers["vision"],
        ", ".join(f"{name} {towers[name]:.2f}" for name in ("both", "text", "vision")),
    )


def adaptive_table(file: str) -> str:
    """Means over sets and seeds."""
    rows = []
    for half in HALVES:
        part = [row for row in read(ADAPTIVE / file) if row["classes"] == half]
        columns = ("accuracy_K", "accuracy_adaptive", "mean_steps", "agreement")
        before, after, passes, same = (fmean(float(row[column]) for row in part) for column in columns)
        change = f"{after - before:+.2f}".replace("-", "−")
        passed = f"{passes:.2f} ({100 * passes / 4:.0f} %)"
        rows.append([half, f"{before:.2f}", f"{after:.2f}", change, passed, f"{same:.1f} %"])
    head = ["", "accuracy, K = 4", "adaptive", "difference", "passes of 4", "answers that are step 4's"]
    return table(head, rows).replace("|  |", "| |", 1)


# ---- three sets in depth ----


def depth_table() -> str:
    """What analyses of single sets found."""
    rows = []
    for task in ("noisy_shapes", "faint_toys", "tiny_toys"):
        for half in HALVES:
            found = json.loads((ROOT / ANALYSIS / f"{task}-{half}" / "analysis.json").read_text("utf-8"))
            curves = {name: curve["mean"] for name, curve in found["curves"].items()}
            change = next(
                re.search(r"change of (\S+) an image \(95 %: (\S+) to (\S+)\)", s)
                for s in found["findings"]
                if "Jacobian" in s
            )
            assert change is not None
            told = [f"{float(part):+.1f}".replace("-", "−") for part in change.groups()]
            median = {row["transition"]: row["quantiles"][-1][2] for row in found["drift"] if row["count"]}
            drifts = [_digits(median[name]) for name in ("correct→correct", "wrong→correct")]
            ends = {name: (values[0], values[-1]) for name, values in curves.items()}
            rows.append(
                [
                    f"{task} {half}", " ".join(f"{value:.1f}" for value in curves["accuracy"]),
                    "{:.3f} → {:.3f}".format(*ends["brier"]), "{:.3f} → {:.3f}".format(*ends["ece"]),
                    "{:.1f} → {:.1f}".format(*ends["jacobian"]) + f", {told[0]} ({told[1]} to {told[2]})", *drifts,
                ]
            )  # fmt: skip
    head = ["set, classes", "accuracy by step, %", "Brier, 0 → 4", "calibration error"]
    head += ["Jacobian norm, 0 → 4, and change per image", "median drift at K: correct→correct", "wrong→correct"]
    return table(head, rows)


def _digits(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.4f}"


def object_table() -> str:
    """How much of a map falls on the drawn object."""
    rows = []
    for how in ("gradient", "occlusion"):
        found = [row for row in read(ANALYSIS / "evidence-on-object.csv") if row["how"] == how]
        shares = [found[0]["by_chance"], *(row["on_object"] for row in found)]
        rows.append([how, *(f"{100 * float(share):.1f} %" for share in shares)])
    return table(["", "chance", "k = 0", "1", "2", "3", "4"], rows).replace("|  |", "| |", 1)


# ---- what holds when things go wrong ----


def hostile_table(*sections: str) -> str:
    """What was tried, how often, and how often it went wrong; all of it, or some sections."""
    rows = [row for row in read(Path("docs/results/hostile.csv")) if row["section"] in sections or not sections]
    return table(
        ["what was tried", "times", "wrong", "and"],
        [[row["what"], f"{int(row['done']):,}", row["wrong"], row["notes"]] for row in rows],
    )


# ---- everyone on the same shots ----


def everyone(suite: str, rows: Callable[[Path], list[list[str]]], head: Sequence[str]) -> Callable[[], str]:
    """A table of benchmarks/everyone.py."""

    def make() -> str:
        path = ROOT / STRONG / f"everyone-{suite}.csv"
        if not path.exists():
            raise MissingError(path)
        found = rows(path)
        head_row, *others = [head, *found] if head else found
        return table(head_row, others).replace("|  |", "| |", 1)

    return make


# What readers of the README want to know first: not adapting, PERL as `fit` and as the paper has it, the best others.
SHORT = (
    "zero-shot", "perl fast", "perl strong", "perl strong + lens + head", "ridge", "gaussian + lens",
    "promptsrc original", "mma original", "mma original + lens + head", "perl strong + lens",
)  # fmt: skip


def short(path: Path) -> list[list[str]]:
    """Some rows of the table of all."""
    return [row for row in means(path) if row[0] in SHORT]


def heads() -> str:
    """Heads in closed form by shots, from benchmarks/heads.py: means over the sets of both suites."""
    found: dict[tuple[int, str], dict[str, list[list[float]]]] = defaultdict(lambda: defaultdict(list))
    for suite in ("toybox", "photographs"):
        path = ROOT / STRONG / f"heads-{suite}.csv"
        if not path.exists():
            raise MissingError(path)
        for line in csv.DictReader(path.open()):
            values = [float(line[key]) for key in ("base", "novel", "all base", "all novel")]
            found[int(line["shots"]), line["row"]][suite].append(values)
    rows = []
    for (shots, row), suites in found.items():
        cells = []
        for values in suites.values():
            base, novel, *among = (fmean(column) for column in zip(*values, strict=True))
            cells += [f"{base:.1f} / {novel:.1f} / {harmonic_mean([base, novel]):.1f}", f"{harmonic_mean(among):.1f}"]
        if shots == 16 or row in ("ridge", "embedding", "uncentered", "center", "gaussian"):
            rows.append([str(shots), row, *cells])
    return table(["shots", "", "toybox, ten sets", "among all", "photographs, three sets", "among all"], rows)


CENTERS = {"0": "", "0.25": ", center 0.25", "0.5": ", center 0.5", "0.75": ", center 0.75", "1": ", center 1"}


def centers() -> str:
    """By the share of the shots' mean taken off images: zero-shot CLIP, PERL by two readouts; PERL trained so."""
    found = {}
    for suite in ("toybox", "photographs"):
        path = ROOT / STRONG / f"center-{suite}.csv"
        if not path.exists():
            raise MissingError(path)
        found[suite] = strong_means(path)
    rows = []
    for share, told in CENTERS.items():
        cells = [share]
        for by_key in found.values():
            for setting, readout in (("strong", "step 0"), ("strong", "probabilities")):
                base, novel = (by_key[setting, readout + told, half] for half in HALVES)
                cells.append(f"{base:.1f} / {novel:.1f} / {harmonic_mean([base, novel]):.1f}")
            for setting, readout in (
                ("strong", "step 4"), ("strong", "probabilities rising"), ("through 0.75", "probabilities"),
            ):  # fmt: skip
                cells.append(f"{harmonic_mean([by_key[setting, readout + told, half] for half in HALVES]):.1f}")
        rows.append(cells)
    kinds = ["zero-shot CLIP", "PERL, mean of steps", "last step", "rising", "trained so"]
    return table(["share", *(f"{suite}: {kind}" for suite in found for kind in kinds)], rows)


STEPS = {  # trained on few shots by epochs: sets, and base classes of the smallest and the largest of them
    "five drawn sets": (("noisy_shapes", "cluttered_toys", "turned_shapes", "gray_toys", "closeup_textures"), (12, 16)),
    "EuroSAT": (("eurosat",), (5, 5)),
    "DTD": (("dtd",), (19, 19)),
    "Tiny ImageNet": (("tinyimagenet",), (40, 40)),
}


def few() -> str:
    """PERL trained on few shots, by epochs: centered, mean of steps, HM; and the epochs that `strong` has."""
    lines = [row for suite in ("toybox", "photographs") for row in read(STRONG / f"steps-{suite}.csv")]
    epochs, rows = ("5", "10", "20", "40", "80"), []
    for shots in SHOTS:
        for title, (sets, classes) in STEPS.items():
            cells = []
            of_any = "20 epochs" if (shots, title) != ("16", "Tiny ImageNet") else "10 epochs"  # step 0 is not trained
            for setting, readout in ((of_any, "step 0"), *((f"{n} epochs", "probabilities") for n in epochs)):
                cells.append(_base_novel(_parts(lines, (shots,), setting, readout), set(sets)).rpartition(" / ")[2])
            counts = [find_recipe("perl", "strong", images=int(shots) * each)[0].epochs for each in classes]
            rows.append([shots, title, *cells, " to ".join(dict.fromkeys(map(str, sorted(counts))))])
    return table(["shots", "", "zero-shot CLIP, centered", *(f"{n} epochs" for n in epochs), "`strong` has"], rows)


THROUGH = {  # what PERL's loss takes off images, and what else was tried, as docs/strong.md names it
    "through 0": "nothing",
    "through 0.25": "a quarter of the mean",
    "through 0.5": "half, as in `strong`",
    "through 0.75": "three quarters, as answers do",
    "through 0.5, rate 6e-3": "half, rate 6e-3",
    "through 0.5, scale 0.12": "half, an eighth of the logit scale",
    "through 0.5, scale 0.5": "half, half of the logit scale",
    "through 0.5, anchor 0.5": "half, lambda 0.5",
    "through 0.5, anchor 2": "half, lambda 2",
    "through 0.5, 20 epochs": "half, 20 epochs",
    "step biases": "nothing; biases of their own for thoughts 1, 2 and later",
    "sentences 25": "nothing; texts held to their means over sixty templates",
}


def _parts(lines: Sequence[Row], shots: Sequence[str], setting: str, readout: str) -> dict[str, dict[str, float]]:
    """Accuracy by part and set."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in lines:
        if row["shots"] in shots and (row["setting"], row["readout"]) == (setting, f"{readout}, center 0.75"):
            found[row["part"]][row["set"]] = float(row["accuracy"])
    return found


def _base_novel(by_part: Mapping[str, Mapping[str, float]], sets: set[str]) -> str:
    """`75.2 / 74.1 / 74.6` over these sets; a dash where some are missing."""
    if any(not by_part.get(half, {}).keys() >= sets for half in HALVES):
        return "–"
    values = [fmean(by_part[half][name] for name in sets) for half in HALVES]
    return " / ".join(f"{value:.1f}" for value in (*values, harmonic_mean(values)))


def through() -> str:
    """What PERL's loss takes off, on all drawn sets, on those where everything was tried, and on photographs."""
    toys, photographs = (read(STRONG / f"through-{suite}.csv") for suite in ("toybox", "photographs"))
    every, real = ({row["set"] for row in lines} for lines in (toys, photographs))
    tried = {row["set"] for row in toys if row["setting"] == "through 0.5, anchor 2"}
    rows = []
    for setting, title in THROUGH.items():
        toy, photo = (_parts(lines, ("8", "16"), setting, "probabilities") for lines in (toys, photographs))
        rows.append([title, _base_novel(toy, every), _base_novel(toy, tried), _base_novel(photo, real)])
    return table(["taken off in the loss", "toybox, ten sets", "three of them", "photographs"], rows)


def few_lambda() -> str:
    """PERL trained on few shots with a stronger anchor, or through half of the center."""
    suites = [read(STRONG / f"few-lambda-{suite}.csv") for suite in ("toybox", "photographs")]
    rows = []
    for shots, epochs in (("1", 40), ("4", 20)):
        for title, more in (("lambda 1", ""), ("4", ", anchor 4"), ("16", ", anchor 16"), ("1, half", ", through 0.5")):
            wanted = [{row["set"] for row in lines if row["shots"] == shots} for lines in suites]
            parts = [_parts(lines, (shots,), f"epochs {epochs}{more}", "probabilities") for lines in suites]
            rows.append([shots, title, *(_base_novel(part, sets) for part, sets in zip(parts, wanted, strict=True))])
    return table(["shots", "", "toybox", "photographs"], rows)


def _lens_lines(suite: str) -> list[Row]:
    """Of benchmarks/lenses.py."""
    return read(STRONG / f"lenses-{suite}.csv")


def lenses() -> str:
    """`gaussian` by shots, without a lens and with the one chosen, means over the sets and seeds of both suites."""
    rows = []
    for shots in SHOTS:
        for title, key, value in (("no lens", "lens", "plain"), ("chosen", "chosen", "1")):
            cells = []
            for suite in ("toybox", "photographs"):
                lines = [line for line in _lens_lines(suite) if line["shots"] == shots and line[key] == value]
                columns = ("base", "novel", "all base", "all novel")
                base, novel, *among = (fmean(float(line[column]) for line in lines) for column in columns)
                hm = harmonic_mean([base, novel])
                cells += [f"{base:.1f} / {novel:.1f} / {hm:.1f}", f"{harmonic_mean(among):.1f}"]
            rows.append([shots, title, *cells])
    return table(["shots", "", "toybox, ten sets", "among all", "photographs, three sets", "among all"], rows)


def lens_sets(*suites: str) -> str:
    """Base / novel of every set through every lens, 16 shots, and how many of the seeds choose one."""
    lines = [line for suite in suites for line in _lens_lines(suite) if line["shots"] == "16"]
    names, rows = list(dict.fromkeys(line["lens"] for line in lines)), []
    for place in dict.fromkeys(line["set"] for line in lines):
        cells = []
        for lens in names:
            mine = [line for line in lines if line["set"] == place and line["lens"] == lens]
            base, novel = (fmean(float(line[half]) for line in mine) for half in HALVES)
            seeds = sum(line["chosen"] == "1" for line in mine)
            said = f"{base:.1f} / {novel:.1f}"
            cells.append(f"**{said}**" + f" ({seeds})" * (seeds < len(mine)) if seeds else said)
        rows.append([place, *cells])
    return table(["set", *names], rows)


SHOTS = ("1", "2", "4", "8", "16")


def fewer_shots(file: str, *sets: str) -> Callable[[], str]:
    """Accuracy by shots, of `everyone collect --few-shot`: means over these sets, or all; the best first."""

    def make() -> str:
        wanted = set(sets) or {line["set"] for line in read(STRONG / file)}
        found: dict[str, dict[str, dict[str, list[float]]]] = {}
        for line in read(STRONG / file):
            if line["set"] in wanted:
                by_name = found.setdefault(line["row"], {}).setdefault(line["shots"], {})
                by_name.setdefault(line["set"], []).append(float(line["accuracy"]))
        rows = []
        for name, by_shots in found.items():
            whole = {n: by_name for n, by_name in by_shots.items() if by_name.keys() == wanted}
            cells = {n: f"{fmean(map(fmean, by_name.values())):.1f}" for n, by_name in whole.items()}
            seeds = sorted({len(values) for by_name in whole.values() for values in by_name.values()})
            if untrained := cells.get("0"):
                rows.append([name, "–", *[untrained] * len(SHOTS)])
            elif cells:
                told = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
                rows.append([name, told, *(cells.get(n, "–") for n in SHOTS)])
        rows.sort(key=lambda row: next(cell for cell in reversed(row[2:]) if cell != "–"), reverse=True)
        return table(["shots", "seeds", *SHOTS], rows)

    return make


TABLES: dict[str, Callable[[], str]] = {
    "centers": centers,
    "few": few,
    "few-lambda": few_lambda,
    "through": through,
    "heads": heads,
    "lenses": lenses,
    "lens-sets": lambda: lens_sets("toybox", "photographs"),
    "lens-shifted": lambda: lens_sets("shifted"),
    "shots-toybox": fewer_shots("shots-toybox.csv"),
    "shots-eurosat": fewer_shots("shots-photographs.csv", "eurosat"),
    "shots-two": fewer_shots("shots-photographs.csv", "eurosat", "dtd"),
    "shots-tinyimagenet": fewer_shots("shots-photographs.csv", "tinyimagenet"),
    "short": everyone("toybox", short, HEAD),
    "house": lambda: table(["package", "what it is", "imports"], house.rows()),
    "hostile": hostile_table,
    "hostile-files": lambda: hostile_table("flips", "images"),
    "everyone-toybox": everyone("toybox", means, HEAD),
    "differences-toybox": everyone("toybox", differences, DIFFERENCES),
    "everyone-photographs": everyone("photographs", means, HEAD),
    "differences-photographs": everyone("photographs", differences, DIFFERENCES),
    "sets-photographs": everyone("photographs", by_set, ()),
    "depth": depth_table,
    "on-object": object_table,
    "main": main_table,
    "methods": methods_table,
    "towers": towers_table,
    "steps": steps_table,
    "sets": sets_table,
    "adaptive": lambda: adaptive_table("adaptive.csv"),
    "adaptive-strong": lambda: adaptive_table("strong.csv"),
    "claims": claims,
    "ablation-depth": ablation_table("vision_depth", "J of the vision tower"),
    "ablation-steps": ablation_table("steps", "K"),
    "ablation-variant": ablation_table("variant", "variant"),
    "ablation-modality": ablation_table("modalities", "thinks"),
    "ablation-anchor": ablation_table("anchor", "λ"),
    "ablation-rank": ablation_table("rank", "r"),
}


def generated(name: str) -> str | None:
    """A table, or nothing where its results are not there."""
    try:
        return TABLES[name]()
    except MissingError:
        return None


def renewed(text: str) -> str:
    """A document with its tables as they are made now."""

    def block(found: re.Match[str]) -> str:
        made = generated(found[1])
        return found[0] if made is None else f"<!-- table {found[1]} -->\n\n{made}\n<!-- end -->"

    return BLOCK.sub(block, text)


def write_tables() -> list[Path]:
    """Renew the documents; those that changed."""
    changed = {path: new for path in DOCUMENTS if (new := renewed(path.read_text("utf-8"))) != path.read_text("utf-8")}
    write_files({path: text.encode() for path, text in changed.items()})
    return list(changed)


if __name__ == "__main__":
    print(*write_tables(), sep="\n")
