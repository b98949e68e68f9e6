"""The tables of the documents, made from the results that are committed: one number for one configuration.

    python -m scripts.documents        # rewrites what stands between <!-- table NAME --> and <!-- end -->

Everything is read from docs/results, which `python -m scripts.results` writes. A table whose results are not there
stays as it is. A test compares the documents with what this makes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, harmonic_mean, pstdev

from perlclip.files import write_files
from scripts import house
from scripts.strong_tables import STRONG_TABLES
from scripts.tables import HALVES, ROOT, MissingError, Row, read, table

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BENCH, ADAPTIVE, ANALYSIS = (Path("docs/results") / name for name in ("toybox/bench", "adaptive", "analysis"))
BLOCK = re.compile(r"<!-- table ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
CONDITION = "toybox-tiny-float32-16shot"


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


TABLES: dict[str, Callable[[], str]] = {
    **STRONG_TABLES,
    "house": lambda: table(["package", "what it is", "imports"], house.rows()),
    "hostile": hostile_table,
    "hostile-files": lambda: hostile_table("flips", "images"),
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
