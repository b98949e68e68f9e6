"""How one run is performed: train on some shots, or take what another run has trained, then test."""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from perlclip.adapters.folder import Adapter, load_adapter, save_adapter
from perlclip.backbone import Backbone, load_backbone
from perlclip.bench.protocols import ASKED, PROTOCOLS, Test, known_dataset, siblings, tests_of
from perlclip.bench.store import CHECKPOINT, UNTRAINED, Record, Run, Store, as_json, complete_record, failed_record
from perlclip.data.sets import PARTS, DataSet, ImageSet
from perlclip.data.suites import suite
from perlclip.errors import PerlclipError
from perlclip.files import remove
from perlclip.inference.cache import LIMIT, EvalCache
from perlclip.inference.evaluation import Evaluation, evaluate
from perlclip.methods import Method, Recipe, create_method, method_class
from perlclip.methods.registry import find_recipe
from perlclip.training.environment import environment, peak_memory
from perlclip.training.loop import fit


class Workspace:
    """What the runs of one process share: backbone, data sets, and what tests of the same images have in common."""

    def __init__(
        self, device: str = "auto", data: Path | None = None, workers: int = 0, cache_bytes: int = LIMIT
    ) -> None:
        self.data = data  # folder of the data sets
        self.workers = workers  # processes that decode images
        self.cache = EvalCache(cache_bytes)
        self._trained_on = ("", "")
        self._backbone = lru_cache(maxsize=1)(lambda name, dtype: load_backbone(name, device=device, dtype=dtype))
        self._data = lru_cache(maxsize=1)(self.load)
        self._test = lru_cache(maxsize=None)(self._load_test)

    def load(self, suite_name: str, dataset: str) -> DataSet:
        """A data set."""
        return suite(suite_name).load(dataset, self.data)

    def backbone(self, run: Run) -> Backbone:
        """The run's backbone, on the workspace's device."""
        return self._backbone(run.backbone, run.precision)

    def shots(self, run: Run) -> ImageSet:
        """All that training gets to see."""
        return draw_shots(self._data(run.suite, run.dataset), PROTOCOLS[run.protocol].trains, run.shots, run.seed)

    def tests(self, run: Run) -> "dict[Test, TestSet]":
        """The run's tests. Those of runs that train on the same data set are kept until others come."""
        if self._trained_on != (run.suite, run.dataset):
            self._trained_on = (run.suite, run.dataset)
            self._test.cache_clear()
            self.cache.forget()
        return {test: self._test(run.suite, test.dataset, test.classes) for test in tests_of(run)}

    def _load_test(self, suite_name: str, dataset: str, classes: str) -> "TestSet":
        load = self._data if (suite_name, dataset) == self._trained_on else self.load
        images = ASKED[classes](load(suite_name, dataset).test)
        return TestSet(images, list_fingerprint(images))


def draw_shots(data: DataSet, classes: str, shots: int, seed: int) -> ImageSet:
    """Shots of every class are drawn, then those of some kept, as CoOp does."""
    return PARTS[classes](data.train.few_shot(shots, Random(seed)))


@dataclass(frozen=True)
class TestSet:
    """Images to test on, and what tells them from others."""

    images: ImageSet
    fingerprint: str


def list_fingerprint(images: ImageSet) -> str:
    """SHA-256 over prompts, labels, and each file's path below their common folder and size, or a picture's pixels.

    Unlike `ImageSet.fingerprint` it does not read the files: ImageNet's 50,000 test images would take minutes. Another
    selection, order, label, or size of a file shows; a picture changed to one of the same size in bytes does not.
    """
    digest = hashlib.sha256("\0".join([images.template, *images.class_names]).encode())
    digest.update(np.asarray(images.labels, dtype="<i8").tobytes())
    files = [os.fspath(image) for image in images.images if isinstance(image, str | Path)]
    root = len(os.path.commonpath([os.path.dirname(file) for file in files])) if files else 0  # noqa: PTH120
    for image in images.images:
        if isinstance(image, str | Path):
            digest.update(f"{os.fspath(image)[root:]}\0{_size(image)}\0".encode())
        else:
            digest.update(hashlib.sha256(np.asarray(image).tobytes()).digest())
    return digest.hexdigest()


def _size(file: str | Path) -> int:
    try:
        return os.stat(file).st_size  # noqa: PTH116
    except OSError as error:
        raise PerlclipError(f"cannot read image {file}: {error.strerror or error}") from error


def plan(run: Run) -> dict[str, Any]:
    """Recipe and settings in full: what the run would be done with now, as far as that needs no weights and no data."""
    recipe, settings = _recipe(run)
    config = method_class(run.method).config_class(**settings)
    return as_json({"recipe": recipe.as_dict() if recipe else None, "config": config.as_dict()})


def resolve(run: Run, workspace: Workspace) -> dict[str, Any]:
    """The plan, and the fingerprint of the weights."""
    return {"backbone": workspace.backbone(run).fingerprint, **plan(run)}


def _recipe(run: Run) -> tuple[Recipe | None, dict[str, Any]]:
    """The recipe, and the method's settings: the recipe's own, then the run's."""
    if run.recipe == UNTRAINED:
        return None, dict(run.settings)
    where = (run.method, run.recipe, run.backbone, known_dataset(run.suite, run.dataset), run.shots)
    recipe, settings = find_recipe(*where)
    return recipe, settings | dict(run.settings)


class Lookup:
    """Finds runs that need not be done again: recipe, settings, data and weights are what they would use now.

    What is dear comes last and once: a store without records loads nothing, and of a data set only its lists are read.
    """

    def __init__(self, store: Store, workspace: Workspace) -> None:
        self.store, self.workspace = store, workspace
        self._data = lru_cache(maxsize=None)(workspace.load)
        self._list = lru_cache(maxsize=None)(self._fingerprint)

    def find(self, run: Run, *, weights: bool = True) -> Record | None:
        """The complete record of a run, if there is one that still holds; without `weights`, for all that is known."""
        record = self.store.find(run, plan(run))
        if record is None or not self._same_data(run, record):
            return None
        return None if weights and record["backbone"] != self.workspace.backbone(run).fingerprint else record

    def _same_data(self, run: Run, record: Record) -> bool:
        """Pictures that we draw ourselves are not looked at: 0.1.0 drew them a little differently on some CPUs."""
        found = suite(run.suite)
        if found.drawn or (found.on_disk and self.workspace.data is None):
            return True
        try:
            tests = {test.name: self._list(run.suite, test.dataset, test.classes) for test in tests_of(run)}
            if tests != record.get("tests", tests):
                return False
            trained_on = record.get("train")  # which version 0.1.0 did not record
            drawn = (PROTOCOLS[run.protocol].trains, run.shots, run.seed)
            return trained_on is None or trained_on == self._list(run.suite, run.dataset, *drawn)
        except PerlclipError:  # it is not there any more: trying the run will say what is missing
            return False

    def _fingerprint(self, suite_name: str, dataset: str, classes: str, shots: int = 0, seed: int = 0) -> str:
        """Of the test images or, if so many, of the shots."""
        data = self._data(suite_name, dataset)
        return list_fingerprint(draw_shots(data, classes, shots, seed) if shots else ASKED[classes](data.test))


def attempt(run: Run, store: Store, workspace: Workspace) -> Record:
    """Perform a run and keep its record; an error makes one, too."""
    try:
        record = perform(run, workspace, store)
    except Exception as error:
        record = failed_record(run, error)
    store.write(run, record)
    return record


def perform(run: Run, workspace: Workspace, store: Store) -> Record:
    """Train and test; the adapter is saved in the run's folder, the record is the caller's to keep."""
    device, kept = workspace.backbone(run).device, workspace.cache
    tests = workspace.tests(run)  # a set that is missing is found out before training, which gets nothing of this
    peak_memory(device)
    trained = _train(run, workspace, store)
    memory = peak_memory(device, kept.used)
    started = time.perf_counter()
    results = {
        test.name: evaluate(
            trained.adapter, found.images, novel=test.novel, workers=workspace.workers, progress=False,
            cache=kept.of(found.fingerprint),
        )
        for test, found in tests.items()
    }  # fmt: skip
    seconds = time.perf_counter() - started
    memory = {key: max(memory[key], most) for key, most in peak_memory(device, kept.used).items()}
    sets = suite(run.suite)
    record = complete_record(
        run,
        **resolve(run, workspace),
        roles={"source": sets.source, "targets": sets.targets, "variants": sets.variants},
        parameters=trained.adapter.num_learned if isinstance(trained.adapter, Adapter) else 0,
        fit=trained.fit,
        **trained.chosen,
        adapter_of=trained.adapter_of,
        train=trained.shots,
        tests={test.name: found.fingerprint for test, found in tests.items()},
        metrics={name: result.metrics() for name, result in results.items()},
        predictions={name: _predictions(result) for name, result in results.items()},
        seconds={**trained.seconds, "eval": seconds},
        memory=memory,
        environment=environment(device),
    )
    if trained.images:
        _save(run, trained.adapter, record, store.home(run))
    return record


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A method that is ready to be tested, and where its parameters come from."""

    adapter: Adapter | Method
    fit: Mapping[str, Any] | None = None  # settings of the training
    chosen: Mapping[str, Any] = field(default_factory=dict)  # how lens and head were, where they are
    seconds: Mapping[str, float] = field(default_factory=lambda: {"fit": 0.0})
    shots: str | None = None  # fingerprint of the list that it was trained on
    images: ImageSet | None = None  # if it was trained just now
    adapter_of: str | None = None  # the run that trained it, if not


def _train(run: Run, workspace: Workspace, store: Store) -> Trained:
    recipe, settings = _recipe(run)
    backbone = workspace.backbone(run)
    if recipe is None:
        return Trained(adapter=create_method(run.method, backbone, **settings))
    images = workspace.shots(run)
    shots = list_fingerprint(images)
    found = _trained_before(run, images, workspace, store)
    if found is not None:
        return replace(found, shots=shots)
    recipe = recipe.trained_on(len(images))
    checkpoint = store.home(run) / CHECKPOINT
    interrupted = checkpoint.exists()
    while True:
        method = create_method(run.method, backbone, seed=run.seed, **settings)
        try:
            result = fit(
                method, images, recipe=recipe, seed=run.seed, thresholds=False, checkpoint=checkpoint,
                head=run.head or method.head_alone, lens="auto" if run.lens else method.config.lens,
                resume=True, workers=workspace.workers, progress=False,
            )  # fmt: skip
            return Trained(
                adapter=result, fit=result.settings, chosen=_chosen(result.training), shots=shots, images=images,
                seconds={
                    "fit": result.seconds, **({"lens": result.lens_seconds} if run.lens else {}),
                    **({"head": result.head_seconds} if run.head else {}),
                },
            )  # fmt: skip
        except PerlclipError:
            if not interrupted:
                raise
        # What a killed run has left is gone on from, or dropped if it is of no use.
        remove(checkpoint)
        interrupted = False


def _trained_before(run: Run, images: ImageSet, workspace: Workspace, store: Store) -> Trained | None:
    """The adapter of a complete run with the same training on the same images, if the store has one."""
    resolved = resolve(run, workspace)
    for other in siblings(run):
        record = store.find(other, resolved)
        if record and not record.get("adapter_of") and record["fit"]["data"] == images.fingerprint():
            try:
                adapter = load_adapter(store.home(other), backbone=workspace.backbone(run))
            except PerlclipError:  # damaged since: train again
                continue
            if other.head != run.head:  # what it was trained to be, before it got its head
                adapter, record = replace(adapter, head=None, trust=None), {**record, "head": None}
            return Trained(adapter=adapter, fit=record["fit"], chosen=_chosen(record), adapter_of=other.name)
    return None


def _chosen(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: record[key] for key in ("lens", "head") if record.get(key)}


def _save(run: Run, adapter: Adapter | Method, record: Record, folder: Path) -> None:
    # The card says the method, its settings and the backbone itself.
    used = {key: value for key, value in record["fit"].items() if key not in ("method", "config", "backbone")}
    training = {"protocol": run.protocol, "source": f"{run.suite}/{run.dataset}", "shots": run.shots}
    training |= {"recipe_name": run.recipe, **used, "environment": record["environment"]}
    training |= _chosen(record)
    save_adapter(adapter, folder, training=training, metrics=record["metrics"])


def _predictions(result: Evaluation) -> dict[str, list[int]]:
    """Labels, and the answers of the first and the last step, image by image."""
    first_B, last_B = result.predictions_KB[0], result.predictions_KB[-1]
    return {"labels": result.labels_B.tolist(), "first": first_B.tolist(), "last": last_B.tolist()}
