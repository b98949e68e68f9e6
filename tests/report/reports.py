"""Records and analyses as `perlclip bench` and `perlclip analyze` write them, and what a report makes of them."""

import json
import re
from pathlib import Path
from statistics import mean

import numpy as np

from perlclip.bench.store import Run, Store, complete_record
from perlclip.report.collect import collect
from perlclip.report.paper import published
from perlclip.report.sections import Section, section
from perlclip.report.tables import Cell, Table

CLIP = "openai/clip-vit-base-patch16"
SETS = [*dict.fromkeys(row.dataset for row in published() if row.dataset != "average")]  # the paper's fifteen
NUMBERS = {  # method, set, seed: base and novel
    ("zero-shot", "a", 0): (60, 60), ("zero-shot", "b", 0): (80, 40),
    ("coop", "a", 1): (65, 55), ("coop", "a", 2): (67, 55), ("coop", "b", 1): (85, 41), ("coop", "b", 2): (85, 45),
    ("perl", "a", 1): (70, 50), ("perl", "a", 2): (74, 54), ("perl", "b", 1): (90, 30), ("perl", "b", 2): (90, 34),
}  # fmt: skip
PARAMETERS = {"zero-shot": 0, "perl": 1000, "coop": 330, "mmrl": 817_400}


def identity(protocol, dataset, method, seed=1, **fields) -> Run:
    trained = {"recipe": "fast", "shots": 16, "seed": seed} if method != "zero-shot" else {}
    return Run(**{"protocol": protocol, "suite": "toybox", "dataset": dataset, "method": method} | trained | fields)


def put(folder: Path, one: Run, accuracy: dict[str, float], images: int = 100, weights: str = "w" * 64) -> Path:
    """A record with these accuracies; which images are right depends on the run."""
    metrics, predictions = {}, {}
    for test, percent in accuracy.items():
        right = np.arange(images) < round(percent * images / 100)
        np.random.default_rng([one.seed, len(one.method), len(test)]).shuffle(right)
        labels = np.arange(images) % 7
        last = np.where(right, labels, labels + 1)
        metrics[test] = {"accuracy": 100 * float(right.mean())}
        predictions[test] = {"labels": labels.tolist(), "first": last.tolist(), "last": last.tolist()}
    record = complete_record(
        one, backbone=weights, recipe=None, config={}, parameters=PARAMETERS[one.method], metrics=metrics,
        predictions=predictions, seconds={"fit": 1.0},
    )  # fmt: skip
    Store(folder).write(one, record)
    return Store(folder).home(one) / "run.json"


def damage(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def markdown_tables(text: str) -> list[list[list[str]]]:
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.M)
    return [[[c.strip() for c in line.strip("|\n").split("|")] for line in block.splitlines()] for block in blocks]


BASE, NOVEL = "base-to-novel: base", "base-to-novel: novel (fast, 1 shot, org/clip_b)"
CURVES = {  # setting, data set: of accuracy and of Brier score
    (BASE, "a"): ([60.0, 61.2345, 62.0], [0.51, 0.5, 0.49]), (BASE, "b"): ([50.0, 49.0, 48.0], [0.6, 0.61, 0.62]),
    (NOVEL, "a"): ([40.0, 41.0], [0.8, 0.7]),
}  # fmt: skip


def curve(mean: list[float]) -> dict[str, list[float]]:
    return {"mean": mean, "low": [m - 0.25 for m in mean], "high": [m + 0.25 for m in mean]}


def analysis_files(folder: Path, conditions: tuple[str, ...] = ("fast, 16 shots, tiny",)) -> Path:
    """What `perlclip analyze STORE` writes, as far as a report reads it."""
    sets: dict = {}
    for (setting, dataset), curves in CURVES.items():
        found = {name: curve(mean) for name, mean in zip(("accuracy", "brier"), curves, strict=True)}
        sets.setdefault(setting, {})[dataset] = found
    averages = {
        setting: {
            name: curve([mean(values) for values in zip(*(one[name]["mean"] for one in found.values()), strict=True)])
            for name in ("accuracy", "brier")
        }
        for setting, found in sets.items()
    }
    numbers = {
        "conditions": conditions, "images_a_set": 50, "metrics": {"accuracy": "accuracy, %", "brier": "Brier score"},
        "averages": averages, "sets": sets,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(numbers))
    for stem in ("settings", "sets-base-to-novel-base", "sets-base-to-novel-novel-fast-1-shot-org-clip_b"):
        (folder / f"{stem}.png").write_bytes(b"\x89PNG" + stem.encode())
        (folder / f"{stem}.svg").write_text(
            f"<?xml version='1.0'?><svg xmlns='http://w3.org/svg'><!-- {stem} --></svg>"
        )
    return folder


def sections(*folders: Path) -> list[Section]:
    return [section(study) for study in collect(folders).studies]


def cells(table: Table, label: str) -> dict[str, Cell]:
    line = next(line for line in table.lines if line.label == label)
    return {column.title: cell for column, cell in zip(table.columns, line.cells, strict=True)}


def labels(table: Table) -> list[str]:
    return [line.label for line in table.lines]
