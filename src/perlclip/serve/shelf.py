"""A folder of adapters: loaded when first asked for, loaded again when they have changed, dropped when room is short.

Most of an adapter's memory are its class embeddings, so these are what is kept and dropped: the least recently used
ones go when all together take more than `max_bytes`.
"""

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from perlclip.adapters.folder import CONFIG, load_adapter, read_info
from perlclip.backbone import Backbone
from perlclip.backbone.accel.cuda_graphs import is_on
from perlclip.errors import PerlclipError
from perlclip.files import MIB
from perlclip.inference.classifier import Classifier
from perlclip.serve.engine import Loaded
from perlclip.serve.guard import Refusal
from perlclip.thinking.limits import clock

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # one folder, never its parent, never hidden
FRESH = 1.0  # seconds in which a folder is not looked at again
FAILURES = 1000  # adapters that cannot be loaded and are remembered as such
MOST = 100_000  # adapters that are listed
Stamp = tuple[int, int, int]  # of an adapter's config, which changes last and as a whole


@dataclass
class _Kept:
    loaded: Loaded
    stamp: Stamp
    size: int
    bytes: int
    checked: float


class Shelf:
    """Adapters of one folder on one backbone. Threads may share it; one at a time loads."""

    def __init__(self, folder: str | Path, backbone: Backbone, *, max_bytes: int = 1024 * MIB) -> None:
        self.folder, self.backbone, self.max_bytes = Path(folder), backbone, max_bytes
        if not self.folder.is_dir():
            raise PerlclipError(f"no folder {folder} with adapters")
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._failed: OrderedDict[str, tuple[Stamp, str]] = OrderedDict()
        self._lock, self._loading = Lock(), Lock()
        self.loads = self.dropped = 0

    def names(self) -> list[str]:
        """Adapters in the folder, by their names; folders whose names cannot be asked for are none."""
        with os.scandir(self.folder) as entries:
            found = [entry.name for entry in entries if NAME.fullmatch(entry.name)]
        return sorted(name for name in found[:MOST] if (self.folder / name / CONFIG).is_file())

    @property
    def bytes(self) -> int:
        """What the loaded adapters take."""
        with self._lock:
            return sum(kept.bytes for kept in self._kept.values())

    def loaded(self) -> dict[str, int]:
        """Those that are loaded, least recently used first, and their bytes."""
        with self._lock:
            return {name: kept.bytes for name, kept in self._kept.items()}

    def known(self, name: str) -> Loaded | None:
        """An adapter if it is loaded and has not changed, after a look at its file's date; refused if there is none."""
        with self._lock:
            kept = self._kept.get(name)
        if kept is None:
            self._stamp(name)
            return None
        if clock() - kept.checked > FRESH:
            if kept.stamp != self._stamp(name):
                return None
            kept.checked = clock()
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
        return kept.loaded

    def get(self, name: str) -> Loaded:
        """The adapter, loaded if need be; a `Refusal` if there is none or it cannot be used."""
        stamp = self._stamp(name)  # first: a name that is none is not looked for
        with self._loading:
            if (loaded := self.known(name)) is not None:
                return loaded
            failed = self._failed.get(name)
            if failed and failed[0] == stamp:
                raise _unusable(name, failed[1])
            try:
                loaded = self._load(name)
            except PerlclipError as error:
                with self._lock:
                    self._kept.pop(name, None)  # what it was before
                self._failed[name] = stamp, str(error)
                while len(self._failed) > FAILURES:
                    self._failed.popitem(last=False)
                raise _unusable(name, str(error)) from error
            self._keep(name, loaded, stamp)
            return loaded

    def info(self, name: str) -> dict[str, Any]:
        """What its config says."""
        self._stamp(name)
        try:
            return read_info(self.folder / name)
        except PerlclipError as error:
            raise _unusable(name, str(error)) from error

    def weigh(self, name: str) -> None:
        """After an adapter has made itself larger, as by the words that it rejects by."""
        with self._lock:
            kept = self._kept.get(name)
            if kept:
                kept.bytes = kept.size + held_bytes(kept.loaded)
        self._make_room()

    def _load(self, name: str) -> Loaded:
        classifier = Classifier(load_adapter(self.folder / name, backbone=self.backbone), compile="off")
        classifier.answering.state.replay = is_on("auto", self.backbone.device)
        loaded = Loaded.of(name, classifier)
        if loaded.sheet:
            classifier.release_texts()
        self.loads += 1
        return loaded

    def _keep(self, name: str, loaded: Loaded, stamp: Stamp) -> None:
        size = 4 * stamp[2]  # names, scores and the training record as Python's objects
        with self._lock:
            self._kept[name] = _Kept(loaded, stamp, size, size + held_bytes(loaded), clock())
            self._kept.move_to_end(name)
        self._make_room()

    def _make_room(self) -> None:
        with self._lock:
            while len(self._kept) > 1 and sum(kept.bytes for kept in self._kept.values()) > self.max_bytes:
                self._kept.popitem(last=False)
                self.dropped += 1

    def _stamp(self, name: str) -> Stamp:
        if not NAME.fullmatch(name):
            raise Refusal(404, "an adapter's name is letters, digits and . _ -, and begins with a letter or digit")
        path = self.folder / name / CONFIG
        try:
            if not path.resolve().is_relative_to(self.folder.resolve()):  # a link that leads out
                raise FileNotFoundError
            found = path.stat()
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            with self._lock:
                self._kept.pop(name, None)
            raise Refusal(404, f"there is no adapter {name!r}; /v1/adapters lists what there is") from error
        return found.st_ino, found.st_mtime_ns, found.st_size


def _unusable(name: str, why: str) -> Refusal:
    return Refusal(500, f"adapter {name!r} cannot be used: {why}")


def held_bytes(loaded: Loaded) -> int:
    """Bytes of all tensors that only this adapter has."""
    classifier, backbone = loaded.classifier, loaded.classifier.method.backbone
    shared = {id(p) for tower in (backbone.vision, backbone.text) for p in tower.parameters()}
    tensors = {id(t): t.nbytes for t in _tensors((loaded.sheet, loaded.w_nP, vars(classifier)), set())}
    return sum(size for key, size in tensors.items() if key not in shared)


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen or isinstance(thing, Backbone | str | bytes):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, torch.nn.Module):
        yield from thing.parameters()
    elif isinstance(thing, dict):
        for inner in thing.values():
            yield from _tensors(inner, seen)
    elif isinstance(thing, list | tuple):
        for inner in thing:
            yield from _tensors(inner, seen)
    elif is_dataclass(thing) or type(thing).__module__.startswith("perlclip."):
        yield from _tensors(vars(thing) if hasattr(thing, "__dict__") else (), seen)
