"""Which runs a benchmark consists of, and how one is performed.

A protocol is one row of `PROTOCOLS`: the data sets it trains on, the classes of them that training sees, and the tests.
A suite is one row of `SUITES`: a source, targets, variants of the source, and how to load one of them.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from perlclip.adapter import save_adapter
from perlclip.backbone import Backbone, load_backbone
from perlclip.data.sets import DataSet, ImageSet
from perlclip.data.toybox import load_toybox, toybox_names
from perlclip.errors import PerlclipError, unknown_name
from perlclip.evaluation import Evaluation, evaluate
from perlclip.methods.base import Method, create_method, list_methods, method_class
from perlclip.recipes import RECIPES, Recipe
from perlclip.recipes import recipe as recipe_by_name
from perlclip.recipes import settings as recipe_settings
from perlclip.runs import CHECKPOINT, UNTRAINED, Record, Run, as_json, complete_record, environment, peak_memory
from perlclip.train import FitResult, fit


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Data sets that are benchmarked together."""

    source: str
    targets: tuple[str, ...]
    variants: tuple[str, ...] = ()  # of the source: its classes, other pictures
    load: Callable[[str], DataSet]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.source, *self.targets, *self.variants)


_TOYBOX = toybox_names()
SUITES: dict[str, Suite] = {
    "toybox": Suite(source=_TOYBOX[0], targets=_TOYBOX[1:11], variants=_TOYBOX[11:], load=load_toybox),
}


class Workspace:
    """What the runs of one process share: the backbone, and the data sets used last."""

    def __init__(self, device: str = "cpu") -> None:
        self._backbone = lru_cache(maxsize=1)(lambda name, dtype: load_backbone(name, device=device, dtype=dtype))
        self._data = lru_cache(maxsize=2)(lambda suite, name: SUITES[suite].load(name))

    def backbone(self, run: Run) -> Backbone:
        """The run's backbone, on the workspace's device."""
        return self._backbone(run.backbone, run.precision)

    def data(self, run: Run) -> DataSet:
        """The data set that the run trains on."""
        return self._data(run.suite, run.dataset)


class Test(NamedTuple):
    """One thing to measure; `novel` classes are not those that were trained."""

    name: str
    images: ImageSet
    novel: bool


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is trained on and what is tested."""

    datasets: Callable[[Suite], tuple[str, ...]]
    classes: Callable[[ImageSet], ImageSet]  # of the shots, the classes that training sees
    tests: Callable[[Run, Workspace], Iterable[Test]]


def _halves(run: Run, workspace: Workspace) -> list[Test]:
    test = workspace.data(run).test
    return [Test("base", test.base(), novel=False), Test("novel", test.novel(), novel=True)]


PROTOCOLS: dict[str, Protocol] = {
    "base-to-novel": Protocol(
        datasets=lambda suite: (suite.source, *suite.targets), classes=ImageSet.base, tests=_halves
    ),
}


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A grid of runs: every method on every data set with every seed. No names stand for all there are."""

    protocol: str = "base-to-novel"
    suite: str = "toybox"
    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    recipe: str = "fast"
    shots: int = 16
    backbone: str = "tiny"
    precision: str = "float32"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # method -> its settings

    def runs(self) -> list[Run]:
        """The runs, those of one data set together; what has nothing to train is evaluated once for all seeds."""
        _check("protocol", [self.protocol], PROTOCOLS)
        _check("suite", [self.suite], SUITES)
        suite = SUITES[self.suite]
        _check(f"data set of suite {self.suite!r}:", self.datasets, suite.names)
        _check("method", [*self.methods, *self.settings], list_methods())
        if not self.seeds:
            raise PerlclipError("a benchmark needs at least one seed")
        runs = (
            self._run(dataset, method, seed)
            for dataset in self.datasets or PROTOCOLS[self.protocol].datasets(suite)
            for method in self.methods or list_methods()
            for seed in self.seeds
        )
        return list(dict.fromkeys(runs))

    def _run(self, dataset: str, method: str, seed: int) -> Run:
        settings = self.settings.get(method, {})
        _check(f"setting of method {method!r}:", settings, {f.name for f in fields(method_class(method).config_class)})
        training: dict[str, Any] = {"recipe": self.recipe, "shots": self.shots, "seed": seed}
        return Run(
            protocol=self.protocol,
            suite=self.suite,
            dataset=dataset,
            method=method,
            settings=tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in sorted(settings.items())),
            backbone=self.backbone,
            precision=self.precision,
            **training if method in RECIPES else {},
        )


def _check(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)


def resolve(run: Run, workspace: Workspace) -> dict[str, Any]:
    """What the run would be done with now, beyond what its name says: weights, recipe and settings in full."""
    recipe, settings = _training(run)
    return as_json(
        {
            "backbone": workspace.backbone(run).fingerprint,
            "recipe": asdict(recipe) if recipe else None,
            "config": asdict(method_class(run.method).config_class(**settings)),
        }
    )


def _training(run: Run) -> tuple[Recipe | None, dict[str, Any]]:
    """The recipe, and the method's settings: the recipe's own, then the run's."""
    if run.recipe == UNTRAINED:
        return None, dict(run.settings)
    where = (run.method, run.recipe, run.backbone, run.dataset)
    return recipe_by_name(*where), {**recipe_settings(*where), **dict(run.settings)}


def perform(run: Run, workspace: Workspace, folder: Path) -> Record:
    """Train and test; the adapter is saved in `folder`, the record is the caller's to keep."""
    protocol, backbone = PROTOCOLS[run.protocol], workspace.backbone(run)
    if backbone.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(backbone.device)
    # All that training gets to see. The shots of every class are drawn, then those of some classes kept, as CoOp does.
    images = protocol.classes(workspace.data(run).train.few_shot(run.shots, Random(run.seed)))
    method, fitted = _train(run, backbone, images, folder / CHECKPOINT)
    started = time.perf_counter()
    results = {
        test.name: evaluate(method, test.images, novel=test.novel, progress=False)
        for test in protocol.tests(run, workspace)
    }
    record = complete_record(
        run,
        **resolve(run, workspace),
        parameters=method.num_trainable,
        fit=fitted.settings if fitted else None,
        metrics={name: result.metrics() for name, result in results.items()},
        predictions={name: _predictions(result) for name, result in results.items()},
        seconds={"fit": fitted.seconds if fitted else 0.0, "eval": time.perf_counter() - started},
        memory=peak_memory(backbone.device),
        environment=environment(backbone.device),
    )
    if fitted:
        # The card says the method, its settings and the backbone itself.
        used = {key: value for key, value in fitted.settings.items() if key not in ("method", "config", "backbone")}
        training = {"protocol": run.protocol, "source": f"{run.suite}/{run.dataset}", "shots": run.shots}
        training |= {"recipe_name": run.recipe, **used, "environment": record["environment"]}
        save_adapter(
            method, folder, class_names=images.class_names, templates=images.template,
            training=training, metrics=record["metrics"],
        )  # fmt: skip
    return record


def _train(run: Run, backbone: Backbone, images: ImageSet, checkpoint: Path) -> tuple[Method, FitResult | None]:
    """The trained method. A checkpoint that a killed run has left is gone on from, or dropped if it is of no use."""
    recipe, settings = _training(run)
    interrupted = checkpoint.exists()
    method = create_method(run.method, backbone, seed=run.seed, **settings)
    if recipe is None:
        return method, None
    try:
        return method, fit(
            method, images, recipe=recipe, seed=run.seed, precision=run.precision, checkpoint=checkpoint, resume=True,
            progress=False,
        )  # fmt: skip
    except PerlclipError:
        if not interrupted:
            raise
    checkpoint.unlink()
    return _train(run, backbone, images, checkpoint)


def _predictions(result: Evaluation) -> dict[str, list[int]]:
    """Labels, and the answers of the first and the last step, image by image."""
    first_B, last_B = result.predictions_KB[0], result.predictions_KB[-1]
    return {"labels": result.labels_B.tolist(), "first": first_B.tolist(), "last": last_B.tolist()}
