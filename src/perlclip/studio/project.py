"""A project: a folder of images, the classes, and every label as it was given.

All of it is in `.perlclip-studio` among the images, a hidden folder that no data loading looks into: `labels.jsonl` is
the truth, the rest (thumbnails, features, adapters) can be made again from it and the images. One process at a time
has a project; tabs of one page write through it, and what two of them say about one image stands in the order in which
it came. Nothing is ever erased: an undo is one more line.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from typing import Any, Self

from perlclip.data.images import images_under
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.files import held_folder, require_writable
from perlclip.studio.journal import Journal
from perlclip.text.classes import check_class_names
from perlclip.text.templates import DEFAULT_TEMPLATE, check_template

FOLDER = ".perlclip-studio"
NONE, SKIPPED = -1, -2  # an image without a label, and one that was put aside
HELD_OUT = 5  # one image of so many is never trained on: what accuracy is measured by
MOST_CLASSES, LONGEST_NAME = 1000, 200


@dataclass(frozen=True, kw_only=True)
class Labels:
    """All labels at one moment: `version` counts the strokes before it. A class goes by its number, which stays."""

    version: int = 0
    numbers: tuple[int, ...] = ()  # of the classes, in their order
    names: tuple[str, ...] = ()
    template: str = DEFAULT_TEMPLATE
    of: dict[int, int] = field(default_factory=dict, repr=False)  # by the image's place: a class's number, or SKIPPED

    @property
    def columns(self) -> dict[int, int]:
        """Where a class's number stands among the classes."""
        return {number: column for column, number in enumerate(self.numbers)}

    def given(self) -> dict[int, int]:
        """By place, the column of its class, of all images that have a class."""
        columns = self.columns
        return {place: columns[number] for place, number in self.of.items() if number in columns}

    def counts(self) -> Counter[int]:
        """Images of each class by its number, and those put aside."""
        return Counter(self.of.values())


class Project:
    """A folder's images and labels; use it as a context, which holds the project against other processes."""

    def __init__(self, images: str | Path, folder: str | Path | None = None) -> None:
        self.root = Path(images)
        if not self.root.is_dir():
            raise PerlclipError(f"{self.root} is not a folder of images")
        self.folder = Path(folder) if folder else self.root / FOLDER
        self._lock, self._open = RLock(), ExitStack()

    def __enter__(self) -> Self:
        try:
            self._read()
        except BaseException:
            self._open.close()
            raise
        return self

    def _read(self) -> None:
        require_writable(self.folder)
        if not self._open.enter_context(held_folder(self.folder)):
            raise PerlclipError(f"another perlclip studio has {self.root} open: use its page, or end it first")
        self.paths = images_under(self.root)
        if not self.paths:
            raise PerlclipError(f"there are no images in {self.root}")
        self.names = tuple(path.relative_to(self.root).as_posix() for path in self.paths)
        self.keys = tuple(map(file_identity, self.paths, self.names))
        self.listing = hashlib.sha256(repr(self.names).encode()).hexdigest()[:16]  # which image a place means
        self._place = {name: i for i, name in enumerate(self.names)}
        self.journal, self.refits = Journal(self.folder / "labels.jsonl"), Journal(self.folder / "refits.jsonl")
        for journal in (self.journal, self.refits):
            self._open.callback(journal.close)
        self._strokes: list[dict[str, Any]] = []
        self._said: dict[str, list[int]] = {}  # of each image, the strokes that name it
        self._undone: set[int] = set()
        self._ids: dict[str, int] = {}
        self._now: Labels | None = None  # until something is said
        self._classes: dict[str, Any] = {"classes": [], "template": DEFAULT_TEMPLATE}
        self.classes_version = 0  # strokes there were when classes were changed last, that one included
        try:
            for entry in self.journal.entries:
                self._take(entry)
        except (PerlclipError, KeyError, IndexError, TypeError, ValueError) as error:
            where = f"{self.journal.path} is damaged in line {len(self._strokes) + 1}"
            raise PerlclipError(f"{where} ({error!r}): repair or remove it") from error

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def __len__(self) -> int:
        return len(self.paths)

    # ---- labels ----

    @property
    def version(self) -> int:
        """Strokes so far."""
        return len(self._strokes)

    def labels(self) -> Labels:
        """As they are now."""
        with self._lock:
            if self._now is not None:
                return self._now
            numbers, names = zip(*self._classes["classes"], strict=True) if self._classes["classes"] else ((), ())
            found = ((self._place[name], self._value(name)) for name in self._said if name in self._place)
            self._now = Labels(
                version=self.version, numbers=numbers, names=names, template=self._classes["template"],
                of={place: value for place, value in found if value != NONE},
            )  # fmt: skip
            return self._now

    def label(self, places: Sequence[int], value: int, *, stroke: str = "", by: str = "") -> int:
        """Give images a class, or `SKIPPED` or `NONE`, in one stroke; one that was told before is not taken twice."""
        with self._lock:
            if stroke in self._ids:
                return self.version
            if value not in (NONE, SKIPPED, *(number for number, _ in self._classes["classes"])):
                raise PerlclipError(f"there is no class with the number {value}")
            if not places or not all(0 <= place < len(self) for place in places):
                raise PerlclipError(f"a label needs images, each from 0 to {len(self) - 1}")
            names = [self.names[place] for place in dict.fromkeys(places)]
            return self._write({"op": "label", "images": names, "value": value, "by": by, "id": stroke})

    def undo(self, *, by: str = "", stroke: str = "") -> list[int]:
        """Take back the last stroke of whoever asks, and say which images it was about; nothing if there is none."""
        with self._lock:
            if stroke and stroke in self._ids:
                return self._places(self._strokes[self._strokes[self._ids[stroke]]["of"]])
            for n in range(self.version - 1, -1, -1):
                entry = self._strokes[n]
                if entry["op"] == "label" and n not in self._undone and entry.get("by", "") == by:
                    self._write({"op": "undo", "of": n, "by": by, "id": stroke})
                    return self._places(entry)
            return []

    def set_classes(self, classes: Sequence[tuple[int | None, str]], template: str = DEFAULT_TEMPLATE) -> int:
        """The classes in their order: with their numbers those that are there, under a new name if so; others are new.

        A class that is left out keeps its labels in the log; given back under its number, it has them again.
        """
        names = check_class_names([name.strip() for _, name in classes])
        if len(names) > MOST_CLASSES or max(map(len, names)) > LONGEST_NAME:
            raise PerlclipError(f"there may be {MOST_CLASSES} classes with names of {LONGEST_NAME} letters at most")
        check_template(template)
        with self._lock:
            used = {number for entry in self._strokes if entry["op"] == "classes" for number, _ in entry["classes"]}
            given = [number for number, _ in classes if number is not None]
            if not set(given) <= used or len(set(given)) < len(given):
                raise PerlclipError("a class was given a number that it cannot have")
            fresh = iter(range(max(used, default=-1) + 1, 2**31))
            numbers = [next(fresh) if number is None else number for number, _ in classes]
            pairs = [list(pair) for pair in zip(numbers, names, strict=True)]
            if (pairs, template) == (self._classes["classes"], self._classes["template"]):
                return self.version
            return self._write({"op": "classes", "classes": pairs, "template": template})

    def begin_with(self, template: str) -> None:
        """The prompt to offer for classes that are not there yet."""
        check_template(template)
        with self._lock:
            self._classes, self._now = {"classes": [], "template": template}, None

    def _write(self, entry: dict[str, Any]) -> int:
        entry = {key: value for key, value in entry.items() if value != ""}
        entry["at"] = datetime.now(UTC).isoformat(timespec="milliseconds")
        self.journal.append(entry)
        self._take(entry)
        return self.version

    def _take(self, entry: dict[str, Any]) -> None:
        """What a line means; the same when it is written and when it is read again."""
        n, op = len(self._strokes), entry["op"]
        if op == "label":
            int(entry["value"])
            for name in entry["images"]:
                self._said.setdefault(name, []).append(n)
        elif op == "undo":
            if self._strokes[entry["of"]]["op"] != "label":
                raise ValueError("what it takes back is no label")
            self._undone.add(entry["of"])
        elif op == "classes":
            check_class_names([name for _, name in entry["classes"]])
            self._classes = {"classes": entry["classes"], "template": entry["template"]}
            self.classes_version = n + 1
        else:
            raise ValueError(f"unknown {op!r}")
        if entry.get("id"):
            self._ids[entry["id"]] = n
        self._strokes.append(entry)
        self._now = None

    def _value(self, name: str) -> int:
        """What was said last about an image and not taken back."""
        standing = (n for n in reversed(self._said[name]) if n not in self._undone)
        last = next(standing, None)
        return NONE if last is None else int(self._strokes[last]["value"])

    def _places(self, entry: dict[str, Any]) -> list[int]:
        return [self._place[name] for name in entry["images"] if name in self._place]

    # ---- what is trained on ----

    def is_held_out(self, place: int) -> bool:
        """Whether an image is only ever tested on; it goes by its name, whenever it is labelled."""
        digest = hashlib.sha256(f"held out {self.names[place]}".encode("utf-8", "surrogateescape")).digest()
        return digest[0] % HELD_OUT == 0

    def split(self, labels: Labels) -> tuple[list[int], list[int]]:
        """Places of images with a class: to train on, and held out."""
        given = sorted(labels.given())
        return [p for p in given if not self.is_held_out(p)], [p for p in given if self.is_held_out(p)]

    def image_set(self, labels: Labels, places: Sequence[int]) -> ImageSet:
        """Labelled images, for `fit` and `evaluate`."""
        given = labels.given()
        return ImageSet(
            images=[self.paths[place] for place in places], labels=[given[place] for place in places],
            class_names=labels.names, template=labels.template, name=self.root.resolve().name,
        )  # fmt: skip

    def rows(self, labels: Labels) -> Iterator[tuple[str, str]]:
        """Name and class of every labelled image, for a list."""
        given = labels.given()
        return ((self.names[place], labels.names[given[place]]) for place in sorted(given))


def file_identity(path: Path, name: str) -> str:
    """What tells a file from the one that stood there before; of one that is gone, its name alone."""
    try:
        found = path.stat()
        content = f"{name}\0{found.st_size}\0{found.st_mtime_ns}"
    except OSError:
        content = name
    return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()
