"""`analyze_store`: the curves of every PERL run of a store, per data set and averaged over each setting.

Accuracy is the record's own, of all test images. The rest is measured with the stored adapters on up to so many images
of each test set, chunk by chunk as for one data set.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np

from perlclip.adapters.folder import CONFIG, load_adapter
from perlclip.analysis.chunks import measure_all, spread
from perlclip.analysis.drift import Drift, drift
from perlclip.analysis.figures import draw_drift, draw_multiples
from perlclip.analysis.trajectories import METRICS, Z95, Curve, Trajectories, curves, join
from perlclip.backbone import load_backbone
from perlclip.bench.protocols import PROTOCOLS, Test
from perlclip.bench.store import Record, Store
from perlclip.data.sets import PARTS
from perlclip.data.suites import SUITES
from perlclip.errors import PerlclipError
from perlclip.files import require_writable, write_files
from perlclip.viz.dynamics import BAND, FILE, LONG, LONG_DRIFT, TITLE, Bands, Dynamics
from perlclip.viz.markup import csv_text
from perlclip.viz.pages import page

IMAGES = 200  # of each test set, for what is not in the records
Curves = dict[str, Curve]


def analyze_store(
    store: Path, out: Path, *, images: int = IMAGES, recipe: str = "", device: str = "auto", root: Path | None = None,
    workers: int = 0,
) -> dict[str, Curves]:  # fmt: skip
    """Per-set and averaged curves of all PERL runs below `store`, written to `out`; returns the averages.

    With a `recipe` only of those trained by it with no setting changed, which leaves ablations out.
    """
    stored = Store(store).records()
    records = [pair for pair in zip(stored.homes, stored.complete, strict=True) if _thinks(pair[1], recipe)]
    if not records:
        which = f" by recipe {recipe!r} alone" if recipe else ""
        raise PerlclipError(
            f"{store} holds no complete run of perl under base-to-novel, cross-dataset or domain-shift{which}"
        )
    for name in {record["run"]["suite"] for _, record in records}:
        if name not in SUITES:
            raise PerlclipError(f"the runs of {store} are of suite {name!r}: name its file with --suite FILE")
    require_writable(out)
    conditions = sorted({_condition(record) for _, record in records})
    backbone = cache(lambda name, dtype: load_backbone(name, device=device, dtype=dtype))
    load = cache(lambda suite, dataset: SUITES[suite].load(dataset, root).test)
    seeds: dict[str, dict[str, list[Curves]]] = {}  # by setting and data set
    pooled: dict[str, list[Trajectories]] = {}  # by setting: images of all sets and seeds
    for folder, record in records:
        run = record["run"]
        if not (folder / CONFIG).exists():  # it is with the run that trained it: STORE/protocol/suite/dataset/name
            folder = folder.parents[3] / str(record.get("adapter_of"))
        adapter = load_adapter(folder, backbone=backbone(run["backbone"], run["precision"]))
        bare = adapter.head is not None and not run.get("head")  # the run that trained it went on to make a head
        adapter, key = (replace(adapter, head=None, trust=None), "bare-") if bare else (adapter, "")
        for test in PROTOCOLS[run["protocol"]].tests(SUITES[run["suite"]], run["dataset"]):
            settings = AVERAGED[run["protocol"]](run, test)
            if not settings:
                continue
            chosen = spread(PARTS[test.classes](load(run["suite"], test.dataset)), images)
            name = f"{test.dataset} {test.classes}"
            chunks = out / "chunks" / f"{key}{adapter.fingerprint[:12]}" / name.replace(" ", "-")
            measured = measure_all(adapter, chosen, chunks, novel=test.novel, workers=workers, title=name)
            found = curves(measured) | {"accuracy": _recorded(record["metrics"][test.name])}
            for setting in settings:
                setting += f" ({_condition(record)})" * (len(conditions) > 1)
                seeds.setdefault(setting, {}).setdefault(test.dataset, []).append(found)
                pooled.setdefault(setting, []).append(measured)
    sets = {setting: {name: _mean(each) for name, each in found.items()} for setting, found in seeds.items()}
    averages = {setting: _average(list(found.values())) for setting, found in sets.items()}
    drifts = {setting: drift(join(parts)) for setting, parts in pooled.items()}
    dynamics = Dynamics(
        conditions=conditions,
        images_a_set=images,
        metrics={metric.name: metric.title for metric in METRICS},
        averages={setting: _numbers(one) for setting, one in averages.items()},
        sets={setting: {name: _numbers(one) for name, one in each.items()} for setting, each in sets.items()},
        drift={setting: [asdict(row) for row in rows] for setting, rows in drifts.items()},
    )
    _write(dynamics, averages, sets, drifts, out)
    return averages


def _thinks(record: Record, recipe: str) -> bool:
    run = record["run"]
    alone = not run["settings"] and not run.get("head") and not run.get("lens")
    wanted = not recipe or (run["recipe"] == recipe and alone)
    return wanted and run["method"] == "perl" and run["protocol"] in AVERAGED and bool(record["config"]["steps"])


# The settings that a protocol's test counts for; none for the source itself, which is not what transfer is about. The
# paper has one line for base-to-novel; base and novel classes, which differ, stand beside it.
AVERAGED: dict[str, Callable[[Record, Test], tuple[str, ...]]] = {
    "base-to-novel": lambda run, test: ("base-to-novel", f"base-to-novel: {test.name}"),
    "cross-dataset": lambda run, test: ("cross-dataset",) * (test.dataset != run["dataset"]),
    "domain-shift": lambda run, test: ("domain shift",) * (test.dataset != run["dataset"]),
}


def _condition(record: Record) -> str:
    """What runs must have in common to be one curve."""
    run = record["run"]
    shots = f"{run['shots']} shot{'s' * (run['shots'] != 1)}"
    made = [f"with {part}" for part in ("lens", "head") if run.get(part)]
    settings = [f"{k}={v}" for k, v in run["settings"].items()]
    return ", ".join(map(str, [run["recipe"], shots, run["backbone"], *made, *settings]))


def _recorded(metrics: Record) -> Curve:
    """Accuracy of all test images, with the band of a share."""
    mean = np.asarray(metrics["step_accuracy"], float)
    half = Z95 * np.sqrt(mean * (100 - mean) / metrics["images"])
    return Curve(mean.tolist(), (mean - half).tolist(), (mean + half).tolist())


# ---- averages ----


def _mean(seeds: Sequence[Curves]) -> Curves:
    """Over seeds: values and bands, as all seeds see the same images."""
    return {
        name: Curve(*(np.mean([getattr(found[name], part) for found in seeds], 0).tolist() for part in BAND))
        for name in seeds[0]
    }


def _average(sets: Sequence[Curves]) -> Curves:
    """Over data sets. Sets differ far more than steps do, so the band is that of the change since step 0."""
    averages = {}
    for metric in METRICS:
        values_KB = np.array([found[metric.name].mean for found in sets]).T
        start = values_KB[0].mean()
        change = Curve.of_means(values_KB - values_KB[0])
        averages[metric.name] = Curve(*([start + c for c in part] for part in (change.mean, change.low, change.high)))
    return averages


# ---- files ----


def _write(
    found: Dynamics, averages: dict[str, Curves], sets: dict[str, dict[str, Curves]], drifts: dict[str, list[Drift]],
    out: Path,
) -> None:  # fmt: skip
    captions, beside = found.figures, dict[str, dict[str, Curves]]()
    for setting, one in averages.items():  # halves stand beside what they are halves of
        whole = found.whole(setting)
        beside.setdefault(whole or setting, {})[found.half(setting) if whole else "mean"] = one
    drawings = [
        draw_multiples("settings", captions["settings"], beside), draw_drift(drifts, captions["drift"]),
        *(
            draw_multiples(name, captions[name], {dataset: {"mean": one} for dataset, one in sets[setting].items()})
            for name, setting in found.set_figures.items()
        ),
    ]  # fmt: skip
    headings = ["Averages over data sets", "Drift from the first answer", *found.set_figures.values()]
    figures = list(zip(headings, drawings, strict=True))
    shown = page("analysis.html", title=TITLE, about=found.note, findings=[], figures=figures, gallery=[], steps=0)
    contents = {out / "settings.csv": csv_text(LONG, found.long(), digits=6).encode()}
    contents[out / "drift.csv"] = csv_text(LONG_DRIFT, found.long_drift(), digits=6).encode()
    for drawing in drawings:
        contents |= drawing.files(out)
    contents[out / "section.md"] = f"{found.markdown()}\n".encode()
    contents[out / "index.html"] = shown.encode()
    contents[out / FILE] = found.content()
    write_files(contents)


def _numbers(found: Curves) -> Bands:
    return {metric.name: asdict(found[metric.name]) for metric in METRICS}
