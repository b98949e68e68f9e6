"""The run store: what identifies a run, and one folder a run with its record and its adapter.

STORE/base-to-novel/toybox/noisy_shapes/perl-fast-16shot-seed1/
    run.json                    the record, written last: it is what makes the run complete
    adapter_config.json  …      the adapter, if this run trained one; else `adapter_of` in the record says which did
"""

import hashlib
import json
import platform
import subprocess
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import perlclip
from perlclip.errors import PerlclipError
from perlclip.files import write_files

Record = dict[str, Any]
FORMAT_VERSION = 1
RECORD, CHECKPOINT = "run.json", "checkpoint.safetensors"
UNTRAINED = "none"  # the recipe of a method that has nothing to train
BACKBONES = {"coop": "openai/clip-vit-base-patch16"}  # of a suite, if it is not the embedded one


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

    @property
    def name(self) -> str:
        """Its folder in a store; what the words do not say goes into a hash, unless it is the default."""
        words = [self.method]
        if self.recipe != UNTRAINED:
            words += [self.recipe, f"{self.shots}shot", f"seed{self.seed}"]
        unsaid = (self.settings, self.backbone, self.precision)
        if unsaid != ((), default_backbone(self.suite), "float32"):
            words.append(hashlib.sha256(repr(unsaid).encode()).hexdigest()[:8])
        return "/".join([self.protocol, self.suite, self.dataset, "-".join(words)])

    def identity(self) -> dict[str, Any]:
        """As the record has it."""
        return as_json({**asdict(self), "settings": dict(self.settings)})


def default_backbone(suite: str) -> str:
    """What a suite is run with unless another is asked for."""
    return BACKBONES.get(suite, "tiny")


@dataclass(frozen=True)
class Records:
    """What a store holds: complete and failed records, and files that are neither."""

    complete: list[Record]
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
        """The complete record of a run, if it was made with what the run would use now (`protocols.resolve`)."""
        record = _read(self.home(run) / RECORD)
        if record is None or record["status"] != "complete" or record["run"] != run.identity():
            return None
        return record if all(record[key] == value for key, value in resolved.items()) else None

    def write(self, run: Run, record: Record) -> None:
        """Keep a record; a complete one has no more use for the training's checkpoint."""
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
        write_files({self.home(run) / RECORD: f"{{\n{lines}\n}}\n".encode()})
        if record["status"] == "complete":
            (self.home(run) / CHECKPOINT).unlink(missing_ok=True)

    def records(self) -> Records:
        """Everything in the store, in the order of the names."""
        found = {path: _read(path) for path in sorted(self.folder.rglob(RECORD))}
        whole = [record for record in found.values() if record is not None]
        return Records(
            complete=[record for record in whole if record["status"] == "complete"],
            failed=[record for record in whole if record["status"] == "failed"],
            damaged=[path for path, record in found.items() if record is None],
        )


_FIELDS = {
    "complete": {"run", "backbone", "recipe", "config", "parameters", "metrics", "predictions", "seconds"},
    "failed": {"run", "error", "traceback"},
}


def _read(path: Path) -> Record | None:
    """A record of this format, or None for whatever else may be there."""
    try:
        record = json.loads(path.read_bytes())
        whole = record["format_version"] == FORMAT_VERSION and _FIELDS[record["status"]] <= record.keys()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return record if whole else None


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


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine behind a result."""
    cuda = device.type == "cuda"
    return {
        "perlclip": perlclip.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        **_git(),
    }


@cache
def _git() -> dict[str, Any]:
    """Commit of the checkout that perlclip is run from, and whether files differ from it; nothing if installed."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # a virtual environment may lie in somebody else's checkout
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def peak_memory(device: torch.device, kept: int = 0) -> dict[str, int]:
    """Bytes: on CUDA the most that tensors took since the last call, without those kept for other runs.

    Elsewhere the most of the process so far.
    """
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return {"cuda_bytes": most - kept}
    if sys.platform == "win32":
        return {}
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"process_bytes": used if sys.platform == "darwin" else 1024 * used}
