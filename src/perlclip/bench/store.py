"""The run store: what identifies a run, and one folder a run with its record and its adapter.

STORE/base-to-novel/toybox/noisy_shapes/perl-fast-16shot-seed1/
    run.json                    the record, written last: it is what makes the run complete
    adapter_config.json  …      the adapter, if this run trained one; else `adapter_of` in the record says which did
    failed.json                 why the last attempt failed, until one succeeds; what was complete stays
"""

import hashlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perlclip.errors import PerlclipError
from perlclip.files import MIB, parse_json, read_file, remove, write_files

Record = dict[str, Any]
FORMAT_VERSION = 1
RECORD, FAILED, CHECKPOINT = "run.json", "failed.json", "checkpoint.safetensors"
USUAL_BACKBONES = {"coop": "openai/clip-vit-base-patch16"}  # of other suites tiny: what a run's name need not say
LARGEST = 512 * MIB  # of a record, most of which is answers, image by image
UNTRAINED = "none"  # the recipe of a method that has nothing to train


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that identifies a run; where it is computed, and where its data lie, is no part of it."""

    protocol: str
    suite: str
    dataset: str
    method: str
    settings: tuple[tuple[str, Any], ...] = ()  # of the method, on top of the recipe's
    recipe: str = UNTRAINED
    shots: int = 0
    seed: int = 0
    backbone: str = "tiny"
    precision: str = "float32"
    head: bool = False  # whether the adapter has a head, where the method can do without
    lens: bool = False  # whether a lens was chosen for it by the shots

    @property
    def name(self) -> str:
        """Its folder in a store; what the words do not say goes into a hash, unless it is the default."""
        words = [self.method]
        if self.recipe != UNTRAINED:
            words += [self.recipe, f"{self.shots}shot", f"seed{self.seed}"]
        unsaid = (self.settings, self.backbone, self.precision)
        if unsaid != ((), USUAL_BACKBONES.get(self.suite, "tiny"), "float32"):
            words.append(hashlib.sha256(repr(unsaid).encode()).hexdigest()[:8])
        words += ["lens"] * self.lens + ["head"] * self.head
        return "/".join([self.protocol, self.suite, self.dataset, "-".join(words)])

    def identity(self) -> dict[str, Any]:
        """As the record has it: without head and lens as before there were any."""
        fields = {key: value for key, value in asdict(self).items() if key not in ("head", "lens") or value}
        return as_json({**fields, "settings": dict(self.settings)})


@dataclass(frozen=True)
class Records:
    """What a store holds: complete and failed records, and files that are neither."""

    complete: list[Record]
    homes: list[Path]  # of the complete ones
    failed: list[Record]
    damaged: list[Path]


@dataclass(frozen=True)
class Store:
    """A folder of runs. A record is there and whole, or not there."""

    folder: Path

    def home(self, run: Run) -> Path:
        """The folder of a run."""
        return self.folder / run.name

    def find(self, run: Run, resolved: Mapping[str, Any]) -> Record | None:
        """The complete record of a run, if these entries of it are what the run would use now."""
        record = _read(self.home(run) / RECORD)
        if record is None or record["status"] != "complete" or record["run"] != run.identity():
            return None
        return record if all(record[key] == value for key, value in resolved.items()) else None

    def write(self, run: Run, record: Record) -> None:
        """Keep a record: a complete one ends what was left of attempts, a failed one never replaces a complete one."""
        home, complete = self.home(run), record["status"] == "complete"
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
        write_files({home / (RECORD if complete else FAILED): f"{{\n{lines}\n}}\n".encode()})
        if complete:
            self.forget_attempts(run)
        elif (old := _read(home / RECORD)) and old["status"] == "failed":  # where version 0.1.0 kept failures
            (home / RECORD).unlink()

    def forget_attempts(self, run: Run) -> None:
        """The run is complete: nothing is needed any more of those that failed or were killed."""
        for name in (CHECKPOINT, FAILED):
            remove(self.home(run) / name)

    def records(self) -> Records:
        """Everything in the store, in the order of the names."""
        paths = sorted(path for path in self.folder.rglob("*.json") if path.name in (RECORD, FAILED))
        found = {path: _read(path) for path in paths}
        whole = {path: record for path, record in found.items() if record is not None}
        return Records(
            complete=[record for record in whole.values() if record["status"] == "complete"],
            homes=[path.parent for path, record in whole.items() if record["status"] == "complete"],
            failed=[record for record in whole.values() if record["status"] == "failed"],
            damaged=[path for path, record in found.items() if record is None],
        )


_FIELDS = {
    "complete": {"run", "backbone", "recipe", "config", "parameters", "metrics", "predictions", "seconds"},
    "failed": {"run", "error", "traceback"},
}


def _read(path: Path) -> Record | None:
    """A record of this format, or None for whatever else may be there."""
    try:
        record = parse_json(read_file(path, LARGEST))
        whole = record["format_version"] == FORMAT_VERSION and _FIELDS[record["status"]] <= record.keys()
        return record if whole and (record["status"] == "failed" or _usable(record)) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _usable(record: Record) -> bool:
    """Whether fields hold what is computed with; NaN comes as a word, which is none."""
    run, tests = record["run"], record["metrics"].values()
    numbers = [*record["seconds"].values(), record["parameters"], run["shots"]]
    numbers += [number for metrics in tests for number in metrics.get("step_accuracy", [])]
    objects = (run["settings"], record["config"], record["predictions"], record.get("memory", {}))
    return (
        all(isinstance(run[key], str) for key in ("protocol", "suite", "dataset", "method"))
        and all(type(number) in (int, float) for number in numbers)
        and all("accuracy" in metrics for metrics in tests)
        and all(isinstance(each, dict) for each in objects)
    )


def complete_record(run: Run, **results: Any) -> Record:
    """The record of a run that came to its end."""
    return as_json({"format_version": FORMAT_VERSION, "status": "complete", "run": run.identity(), **results})


def failed_record(run: Run, error: BaseException) -> Record:
    """The record of a run that did not: the error as a sentence, and where it happened."""
    return {
        "format_version": FORMAT_VERSION,
        "status": "failed",
        "run": run.identity(),
        "error": str(error) if isinstance(error, PerlclipError) else f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from a file: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain
