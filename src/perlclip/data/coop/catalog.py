"""The fifteen data sets of CoOp's protocol: `catalog.toml`, and what is done with its rows (load, check, sample).

Folders, split files, class names, templates and sizes are CoOp's; `docs/data.md` says what to download. Labels tell
classes apart, not names: ImageNet has more than one class called "missile" or "sunglasses", and they keep their names,
because other prompts than CoOp's would give other results.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from perlclip.data.coop import lists
from perlclip.data.coop.lists import Items, labelled, read_object
from perlclip.data.sets import DataSet, ImageSet, few_shot_split
from perlclip.errors import PerlclipError, unknown_name
from perlclip.progress import progress_bar
from perlclip.text.templates import DEFAULT_TEMPLATE


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One data set: where it lies, how it is read, how its classes are put into words, what to expect of it."""

    name: str
    role: str = "target"  # or "source", or "variant" of the source; see `suites.py`
    folder: str  # below the root that holds all data sets
    images: str  # below the folder; paths in lists are relative to it
    lists: tuple[str, ...]  # files in the folder that say which images and classes there are
    read: str = "split_json"  # the reader in `lists.py`
    class_name: str = ""  # which of CoOp's rules leads from an image's path to the name of its class
    renamed: Mapping[str, str] = field(default_factory=dict)  # class folders that are called otherwise
    template: str = DEFAULT_TEMPLATE
    sizes: tuple[int, int, int, int]  # classes, and images in train, val and test
    images_from: str
    lists_from: str = ""  # if they do not come with the images

    @property
    def where(self) -> str:
        """Where to get it."""
        lists = f", {self.lists[0]} from {self.lists_from}" if self.lists_from else ""
        return f"get the images from {self.images_from}{lists}"


def _read_catalog() -> Iterator[Entry]:
    rows = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8"))
    for name, row in rows.items():
        yield Entry(name=name, **row | {key: tuple(row[key]) for key in ("lists", "sizes")})


def _class_name(entry: Entry, path: str) -> str | None:
    """By CoOp's rule, where there is one."""
    match entry.class_name:
        case "folder":
            folder = path.partition("/")[0]
            return entry.renamed.get(folder, folder)
        case "breed":  # Egyptian_Mau_167.jpg: egyptian_mau
            return path.rpartition("_")[0].lower()
        case "scene":  # a/apartment_building/outdoor/x.jpg: outdoor apartment_building
            return " ".join(reversed(path.split("/")[1:-1]))
    return None


CATALOG = tuple(_read_catalog())
_BY_NAME = {entry.name: entry for entry in CATALOG}


def dataset_names() -> tuple[str, ...]:
    """Names of the fifteen, in the order of the table."""
    return tuple(_BY_NAME)


def load_dataset(name: str, root: str | Path) -> DataSet:
    """One of the fifteen, from its folder below `root`. Only lists are read; `check_dataset` looks for every image."""
    entry, root = _entry(name), _root(root)
    try:
        return _load(entry, root / entry.folder)
    except PerlclipError as error:
        raise PerlclipError(f"{name}: {error}; {entry.where}") from error


def _load(entry: Entry, folder: Path) -> DataSet:
    _require(entry, folder)
    root = folder / entry.images
    found: lists.Lists = getattr(lists, entry.read)(root, *(folder / file for file in entry.lists))
    train, val, test = (_image_set(entry, found.class_names, root, items) for items in found[1:])
    return DataSet(name=entry.name, train=train, val=test if found.val is found.test else val, test=test)


def _entry(name: str) -> Entry:
    if name not in _BY_NAME:
        raise unknown_name("data set", name, _BY_NAME)
    return _BY_NAME[name]


def _root(root: str | Path) -> Path:
    if not Path(root).is_dir():
        raise PerlclipError(f"no data folder {root}; it is to hold folders such as {CATALOG[1].folder}/")
    return Path(root)


def _require(entry: Entry, folder: Path) -> None:
    for path in (folder, folder / entry.images):
        if not path.is_dir():
            raise PerlclipError(f"folder {path} is missing")
    for path in (folder / file for file in entry.lists):
        if not path.exists():
            raise PerlclipError(f"{path} is missing, and one made anew would not be comparable with published results")


def _image_set(entry: Entry, class_names: tuple[str, ...], root: Path, items: Items) -> ImageSet:
    return ImageSet(
        images=[f"{root}/{path}" for path, _ in items],  # a million of them: text is ten times quicker than Path
        labels=[label for _, label in items],
        class_names=class_names,
        template=entry.template,
        name=entry.name,
        published=entry.name,
        unique_names=False,
    )


# ---- checking ----


@dataclass(frozen=True, kw_only=True)
class Check:
    """What `check_dataset` found: `status` is complete, incomplete or absent."""

    name: str
    status: str
    problems: tuple[str, ...] = ()
    missing: int = 0  # images
    where: str

    def __str__(self) -> str:
        detail = "" if self.status == "complete" else f": {'; '.join([*self.problems, self.where])}"
        return f"{self.name:16}{self.status}{detail}"


def check_dataset(name: str, root: str | Path) -> Check:
    """Every file of a data set, its class names and its sizes, against what CoOp has."""
    entry, root = _entry(name), _root(root)
    if not (root / entry.folder).is_dir():
        return Check(name=name, status="absent", where=entry.where)
    try:
        data = _load(entry, root / entry.folder)
    except PerlclipError as error:
        return Check(name=name, status="incomplete", problems=(str(error),), where=entry.where)
    files = list(dict.fromkeys(str(path) for part in (data.train, data.val, data.test) for path in part.images))
    missing = _missing(name, files)
    problems = [*_wrong_sizes(data, entry), *_wrong_names(data, entry, root / entry.folder / entry.images)]
    if missing:
        first = ", ".join(_relative(missing[:3], root))
        problems.insert(0, f"{len(missing):,} of {len(files):,} files missing or empty, first {first}")
    status = "incomplete" if problems else "complete"
    return Check(name=name, status=status, problems=tuple(problems), missing=len(missing), where=entry.where)


def _missing(name: str, files: list[str], chunk: int = 1000) -> list[str]:
    missing: list[str] = []
    with progress_bar(f"check {name}", len(files)) as bar:
        for start in range(0, len(files), chunk):
            part = files[start : start + chunk]
            missing += [path for path in part if not _has_content(path)]
            bar(len(part))
    return missing


def _has_content(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0  # noqa: PTH116
    except OSError:
        return False


def _wrong_sizes(data: DataSet, entry: Entry) -> Iterable[str]:
    found = (len(data.class_names), len(data.train), len(data.val), len(data.test))
    kinds = ("classes", "train images", "val images", "test images")
    for kind, got, want in zip(kinds, found, entry.sizes, strict=True):
        if got != want:
            yield f"{got:,} {kind} instead of {want:,}"


def _wrong_names(data: DataSet, entry: Entry, root: Path) -> Iterable[str]:
    """By one training image of each class."""
    one = {int(label): image for label, image in zip(data.train.labels, data.train.images, strict=True)}
    for label, path in zip(one, _relative(one.values(), root), strict=True):
        name, rule = data.class_names[label], _class_name(entry, path)
        if rule not in (None, name):
            yield f"the class of {path} is called {name!r} instead of {rule!r}"
            return


def _relative(paths: Iterable[Any], root: Path) -> list[str]:
    return [Path(path).relative_to(root).as_posix() for path in paths]


# ---- shots that others can use ----


def shots_json(name: str, root: str | Path, shots: int, seed: int) -> bytes:
    """CoOp's shots as a file, always the same bytes: paths relative to `root`, and a hash that `load_shots` checks."""
    data = load_dataset(name, root)
    content: dict[str, Any] = {"dataset": name, "shots": shots, "seed": seed}
    for part, images in zip(("train", "val"), few_shot_split(data, shots, seed), strict=True):
        paths = _relative(images.images, Path(root))
        content[part] = [[path, y, data.class_names[y]] for path, y in zip(paths, images.labels, strict=True)]
    content["sha256"] = _digest(content)
    fields = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items())
    return f"{{\n{fields}\n}}\n".encode()


def load_shots(file: str | Path, root: str | Path) -> tuple[ImageSet, ImageSet]:
    """Train and val of a file that `perlclip data sample` wrote, with the images below `root`."""
    file = Path(file)
    content = read_object(file)
    if _digest({key: value for key, value in content.items() if key != "sha256"}) != content.get("sha256"):
        raise PerlclipError(f"{file} is not as it was written: its contents do not have the sha256 that it states")
    entry = _entry(str(content.get("dataset")))
    class_names, (train, val) = labelled({part: content.get(part) for part in ("train", "val")}, file)
    drawn = [_image_set(entry, class_names, _root(root), items) for items in (train, val)]
    shots = int(content["shots"])
    return replace(drawn[0], shots=shots), replace(drawn[1], shots=min(shots, 4)) if val else drawn[1]


def _lines(value: Any) -> str:
    """As JSON, a list with a line for each of its items."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
