"""The tables of docs/strong.md, and what README, docs/choose.md and docs/trust.md have of its results.

From docs/results/strong and docs/results/trust, whose files the benchmarks named in those documents make.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, harmonic_mean

from benchmarks.everyone import DIFFERENCES, HEAD, by_set, differences, means
from benchmarks.strong import means as strong_means
from perlclip.methods.registry import find_recipe
from scripts.tables import HALVES, ROOT, MissingError, Row, read, table

STRONG, TRUST = (Path("docs/results") / name for name in ("strong", "trust"))


def of_everyone(suite: str) -> Path:
    """What benchmarks/everyone.py has collected."""
    path = ROOT / STRONG / f"everyone-{suite}.csv"
    if not path.exists():
        raise MissingError(path)
    return path


def everyone(suite: str, rows: Callable[[Path], list[list[str]]], head: Sequence[str]) -> Callable[[], str]:
    """A table of benchmarks/everyone.py."""

    def make() -> str:
        found = rows(of_everyone(suite))
        head_row, *others = [head, *found] if head else found
        return table(head_row, others).replace("|  |", "| |", 1)

    return make


SUITES_OF_ALL = ("toybox", "photographs")

# What readers of the README want to know first: not adapting, PERL as `fit` and as the paper has it, the best others.
SHORT = (
    "zero-shot", "perl fast", "perl strong", "perl strong + lens + head", "ridge", "gaussian + lens",
    "promptsrc original", "mma original", "mma original + lens + head", "perl strong + lens",
)  # fmt: skip


def short(path: Path) -> list[list[str]]:
    """Some rows of the table of all."""
    return [row for row in means(path) if row[0] in SHORT]


# What there is to choose from, by its rows on the toybox and on photographs, which want no lens.
CHOICES = {
    "the default: PERL, lens and head": ("perl strong + lens + head", "perl strong + head"),
    "`gaussian`": ("gaussian + lens", "gaussian"),
    "PERL alone, `--no-head`": ("perl strong + lens", "perl strong"),
    "`ridge`": ("ridge + lens", "ridge"),
    "`mma`, lens and head": ("mma original + lens + head", "mma original + head"),
    "`mma` as published": ("mma original", "mma original"),
    "`mmrl++` and head": ("", "mmrl++ original + head"),
    "`mmrl++` as published": ("mmrl++ original", "mmrl++ original"),
    "`promptsrc` as published": ("promptsrc original", "promptsrc original"),
    "`zero-shot`": ("zero-shot", "zero-shot"),
}


def choices() -> str:
    """Base / novel / HM and the numbers learned of what one may choose, on both suites."""
    suites = [{row[0]: row for row in means(of_everyone(suite))} for suite in SUITES_OF_ALL]
    rows = []
    for title, names in CHOICES.items():
        found = [by_name.get(name) for by_name, name in zip(suites, names, strict=True)]
        cells = [(" / ".join(row[1:4]), row[5]) if row else ("–", "–") for row in found]
        rows.append([title, *chain(*cells)])
    head = ["", "toybox", "numbers learned", "photographs", "numbers learned"]
    return table(head, rows).replace("|  |", "| |", 1)


PHOTOGRAPHS = {"eurosat": "EuroSAT", "dtd": "DTD", "tinyimagenet": "Tiny ImageNet"}


def _new(kind: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Base and novel accuracy in one kind of list, by rule and set, drawn sets first: means over seeds."""
    found: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for suite in SUITES_OF_ALL:
        for line in read(STRONG / f"new-classes-{suite}.csv"):
            if line["list"] == kind:
                found[line["rule"]][line["set"]].append(line)
    return {
        rule: {
            name: (fmean(float(line["base"] or 0) for line in lines), fmean(float(line["novel"]) for line in lines))
            for name, lines in sets.items()
        }
        for rule, sets in found.items()
    }


def new_alone() -> str:
    """Novel accuracy in lists of new classes by the weight of the score beside trained texts."""
    rows = []
    for rule, sets in _new("new classes").items():
        novel = {name: accuracy for name, (_, accuracy) in sets.items()}
        photographs = [novel.pop(name) for name in PHOTOGRAPHS]
        weight = f"1/{round(1 / float(rule))}" if rule.startswith("0.") else rule
        rows.append([weight, *(f"{mean:.1f}" for mean in (fmean(novel.values()), fmean(photographs), *photographs))])
    return table(["weight of the score", "toybox, ten sets", "photographs", *PHOTOGRAPHS.values()], rows)


def new_among() -> str:
    """Base / novel / HM among all classes of photographs, by what says which images are of new ones."""
    found = _new("all classes")
    rows = [[title, *(_three(sets[name]) for sets in found.values())] for name, title in PHOTOGRAPHS.items()]
    means_of = (map(fmean, zip(*(sets[name] for name in PHOTOGRAPHS), strict=True)) for sets in found.values())
    rows.append(["mean of the sets", *map(_three, means_of)])
    return table(["", *found], rows).replace("|  |", "| |", 1)


def trust_new() -> str:
    """How sure PERL is of new classes, beside zero-shot CLIP: means over sets, and each set of photographs."""
    numbers = {"accuracy": 1, "ece": 1, "ece_equal_mass": 1, "brier": 3, "nll": 2}
    found: dict[str, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for suite, title in zip(SUITES_OF_ALL, ("toybox, ten sets", "photographs"), strict=True):
        for line in read(TRUST / f"new-{suite}.csv"):
            for group in (title, PHOTOGRAPHS.get(line["set"], "")):
                found[group][line["rule"]][line["set"]] = line
    rows = []
    for title in ("toybox, ten sets", "photographs", *PHOTOGRAPHS.values()):
        both = [found[title][rule] for rule in ("zero-shot CLIP", "as answered")]
        rows.append(
            [title, *(" / ".join(_mean(lines, key, digits) for lines in both) for key, digits in numbers.items())]
        )
    head = ["zero-shot CLIP / PERL", "accuracy", "calibration error", "bins of equal mass", "Brier score", "log-loss"]
    return table(head, rows)


def _mean(lines: Mapping[str, Row], key: str, digits: int) -> str:
    return f"{fmean(float(line[key]) for line in lines.values()):.{digits}f}"


def _three(halves: Iterable[float]) -> str:
    base, novel = halves
    return f"{base:.1f} / {novel:.1f} / {harmonic_mean([base, novel]):.1f}"


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


STRONG_TABLES: dict[str, Callable[[], str]] = {
    "centers": centers,
    "few": few,
    "few-lambda": few_lambda,
    "through": through,
    "heads": heads,
    "lenses": lenses,
    "choices": choices,
    "trust-new": trust_new,
    "new-alone": new_alone,
    "new-among": new_among,
    "lens-sets": lambda: lens_sets("toybox", "photographs"),
    "lens-shifted": lambda: lens_sets("shifted"),
    "shots-toybox": fewer_shots("shots-toybox.csv"),
    "shots-eurosat": fewer_shots("shots-photographs.csv", "eurosat"),
    "shots-two": fewer_shots("shots-photographs.csv", "eurosat", "dtd"),
    "shots-tinyimagenet": fewer_shots("shots-photographs.csv", "tinyimagenet"),
    "short": everyone("toybox", short, HEAD),
    "everyone-toybox": everyone("toybox", means, HEAD),
    "differences-toybox": everyone("toybox", differences, DIFFERENCES),
    "everyone-photographs": everyone("photographs", means, HEAD),
    "differences-photographs": everyone("photographs", differences, DIFFERENCES),
    "sets-photographs": everyone("photographs", by_set, ()),
}
