"""`analyze_store`: the curves of every PERL run of a store, per data set and averaged over each setting.

Accuracy is the record's own, of all test images. The rest is measured with the stored adapters on up to so many images
of each test set, chunk by chunk as for one data set.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from perlclip.adapters.folder import CONFIG, load_adapter
from perlclip.analysis.chunks import measure_all, spread
from perlclip.analysis.figures import draw_curves
from perlclip.analysis.trajectories import METRICS, Z95, Curve, curves
from perlclip.backbone import Backbone, load_backbone
from perlclip.bench.protocols import PROTOCOLS, Test
from perlclip.bench.store import RECORD, Record, Store
from perlclip.data.sets import PARTS, ImageSet
from perlclip.data.suites import SUITES
from perlclip.errors import PerlclipError
from perlclip.files import require_writable, write_files
from perlclip.viz.dynamics import FILE, LONG, TITLE, Bands, Dynamics
from perlclip.viz.markup import csv_text
from perlclip.viz.pages import page

IMAGES = 200  # of each test set, for what is not in the records
Curves = dict[str, Curve]


@dataclass(frozen=True)
class Tested:
    """One test of one run."""

    setting: str  # what is averaged together
    dataset: str
    seed: int
    curves: Curves


@dataclass
class Shared:
    """What the runs have in common: backbone and test sets, loaded once."""

    device: str
    root: Path | None
    backbones: dict[tuple[str, str], Backbone] = field(default_factory=dict)
    sets: dict[tuple[str, str], ImageSet] = field(default_factory=dict)

    def backbone(self, name: str, precision: str) -> Backbone:
        """By name and number format."""
        key = name, precision
        if key not in self.backbones:
            self.backbones[key] = load_backbone(name, device=self.device, dtype=precision)
        return self.backbones[key]

    def images(self, suite: str, test: Test) -> ImageSet:
        """The test images of a data set, or of half of its classes."""
        key = suite, test.dataset
        if key not in self.sets:
            self.sets[key] = SUITES[suite].load(test.dataset, self.root).test
        return PARTS[test.classes](self.sets[key])


def analyze_store(
    store: Path, out: Path, *, images: int = IMAGES, device: str = "auto", root: Path | None = None, workers: int = 0
) -> dict[str, Curves]:
    """Per-set and averaged curves of all PERL runs below `store`, written to `out`; returns the averages."""
    records = [record for record in Store(store).records().complete if _thinks(record)]
    if not records:
        raise PerlclipError(f"{store} holds no complete run of perl under base-to-novel, cross-dataset or domain-shift")
    for name in {record["run"]["suite"] for record in records}:
        if name not in SUITES:
            raise PerlclipError(f"the runs of {store} are of suite {name!r}: name its file with --suite FILE")
    require_writable(out)
    places = {json.dumps(record["run"]): path for path, record in _paths(store)}
    conditions = sorted({_condition(record) for record in records})
    shared = Shared(device, root)
    tested: list[Tested] = []
    for record in records:
        folder = _adapter_folder(places[json.dumps(record["run"])], record)
        tested += _tests(record, folder, shared, out, images=images, workers=workers, several=len(conditions) > 1)
    sets = _per_set(tested)
    averages = {setting: _average(list(found.values())) for setting, found in sets.items()}
    found = Dynamics(
        conditions=conditions,
        images_a_set=images,
        metrics={metric.name: metric.title for metric in METRICS},
        averages={setting: _numbers(curves) for setting, curves in averages.items()},
        sets={setting: {name: _numbers(one) for name, one in curves.items()} for setting, curves in sets.items()},
    )
    _write(found, [averages, *sets.values()], out)
    return averages


def _paths(store: Path) -> Iterator[tuple[Path, Record]]:
    for path in sorted(store.rglob(RECORD)):
        try:
            record = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and "run" in record:
            yield path.parent, record


def _thinks(record: Record) -> bool:
    run = record["run"]
    known = run["method"] == "perl" and run["protocol"] in AVERAGED
    return bool(known and record["config"]["steps"])


def _adapter_folder(folder: Path, record: Record) -> Path:
    """Beside the record, or with the run that trained it: STORE/protocol/suite/dataset/name."""
    return folder if (folder / CONFIG).exists() else folder.parents[3] / str(record.get("adapter_of"))


# The setting of a protocol's test, or nothing for the source itself, which is not what those protocols are about.
AVERAGED: dict[str, Callable[[Record, Test], str]] = {
    "base-to-novel": lambda run, test: f"base-to-novel: {test.name}",
    "cross-dataset": lambda run, test: "cross-dataset" if test.dataset != run["dataset"] else "",
    "domain-shift": lambda run, test: "domain shift" if test.dataset != run["dataset"] else "",
}


def _condition(record: Record) -> str:
    run = record["run"]
    words = [run["recipe"], f"{run['shots']} shots", run["backbone"], *(f"{k}={v}" for k, v in run["settings"].items())]
    return ", ".join(map(str, words))


def _tests(
    record: Record, folder: Path, shared: Shared, out: Path, *, images: int, workers: int, several: bool
) -> Iterator[Tested]:
    run = record["run"]
    adapter = load_adapter(folder, backbone=shared.backbone(run["backbone"], run["precision"]))
    for test in PROTOCOLS[run["protocol"]].tests(SUITES[run["suite"]], run["dataset"]):
        setting = AVERAGED[run["protocol"]](run, test)
        if not setting:
            continue
        chosen = spread(shared.images(run["suite"], test), images)
        name = f"{test.dataset} {test.classes}"
        chunks = out / "chunks" / adapter.fingerprint[:12] / name.replace(" ", "-")
        found = curves(measure_all(adapter, chosen, chunks, novel=test.novel, workers=workers, title=name))
        found["accuracy"] = _recorded(record["metrics"][test.name])
        yield Tested(f"{setting} ({_condition(record)})" if several else setting, test.dataset, run["seed"], found)


def _recorded(metrics: Record) -> Curve:
    """Accuracy of all test images, with the band of a share."""
    mean = np.asarray(metrics["step_accuracy"], float)
    half = Z95 * np.sqrt(mean * (100 - mean) / metrics["images"])
    return Curve(mean.tolist(), (mean - half).tolist(), (mean + half).tolist())


# ---- averages ----


def _per_set(tested: Iterable[Tested]) -> dict[str, dict[str, Curves]]:
    """setting -> data set -> curves, averaged over seeds: values and bands, as all seeds see the same images."""
    groups: dict[str, dict[str, list[Curves]]] = {}
    for one in tested:
        groups.setdefault(one.setting, {}).setdefault(one.dataset, []).append(one.curves)
    return {
        setting: {
            dataset: {name: _mean_curve([c[name] for c in seeds]) for name in seeds[0]}
            for dataset, seeds in found.items()
        }
        for setting, found in groups.items()
    }


def _mean_curve(found: Sequence[Curve]) -> Curve:
    return Curve(*(np.mean([getattr(curve, part) for curve in found], 0).tolist() for part in ("mean", "low", "high")))


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


def _write(found: Dynamics, groups: Sequence[dict[str, Curves]], out: Path) -> None:
    drawings = [draw_curves(*names, group) for names, group in zip(found.figures.items(), groups, strict=True)]
    figures = list(zip(["Averages over data sets", *found.sets], drawings, strict=True))
    shown = page("analysis.html", title=TITLE, about=found.note, findings=[], figures=figures, gallery=[], steps=0)
    contents = {out / "settings.csv": csv_text(LONG, found.long(), digits=6).encode()}
    for drawing in drawings:
        contents |= drawing.files(out)
    contents[out / "section.md"] = f"{found.markdown()}\n".encode()
    contents[out / "index.html"] = shown.encode()
    contents[out / FILE] = found.content()
    write_files(contents)


def _numbers(found: Curves) -> Bands:
    return {metric.name: asdict(found[metric.name]) for metric in METRICS}
