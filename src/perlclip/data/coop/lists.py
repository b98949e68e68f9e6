"""Readers of a data set's lists: which images and classes there are, by files alone; no image is looked for.

A reader takes the image root and the list files, and gives class names in label order and (path, label) pairs whose
paths are relative to the image root. Lists that come as files keep the files' order; folders are listed sorted.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from perlclip.data.images import SUFFIXES
from perlclip.data.sets import SPLITS
from perlclip.errors import PerlclipError

Items = list[tuple[str, int]]
_OUTSIDE = re.compile(r"^[/\\]|^[A-Za-z]:|(^|[/\\])\.\.([/\\]|$)|\0")


class Lists(NamedTuple):
    """The three splits, and the names their labels stand for."""

    class_names: tuple[str, ...]
    train: Items
    val: Items
    test: Items


def split_json(images: Path, split: Path) -> Lists:
    """CoOp's split files: `{"train": [[path, label, class name], …], "val": …, "test": …}`."""
    parts = read_object(split)
    names, items = labelled({part: parts.get(part) for part in SPLITS}, split)
    return Lists(names, *items)


def aircraft_lists(images: Path, variants: Path, *lists: Path) -> Lists:
    """FGVC-Aircraft's own lists: labels count the lines of `variants.txt`, items are `<image number> <variant>`."""
    names = _lines(variants)
    label = {name: i for i, name in enumerate(names)}

    def items(file: Path) -> Items:
        pairs = [line.partition(" ")[::2] for line in _lines(file)]
        for number, variant in pairs:
            if variant not in label or not number.isdigit():
                raise PerlclipError(f"{file}: {f'{number} {variant}'!r} is not an image number and a known variant")
        return [(f"{number}.jpg", label[variant]) for number, variant in pairs]

    return Lists(tuple(names), *map(items, lists))


def imagenet_folders(images: Path, classnames: Path) -> Lists:
    """ImageNet's `train/<wnid>/` and `val/<wnid>/`; the validation images are CoOp's val and test."""
    names = _names_by_wnid(classnames)
    train, val = (
        [(f"{part}/{path}", label) for path, label in _walk(images / part, names)] for part in ("train", "val")
    )
    return Lists(tuple(names.values()), train, val, val)


def wnid_folders(images: Path, classnames: Path) -> Lists:
    """A test set in ImageNet's own label space, `<wnid>/` (Sketch)."""
    names = _names_by_wnid(classnames)
    return Lists(tuple(names.values()), [], [], _walk(images, names))


def numbered_folders(images: Path, classnames: Path) -> Lists:
    """A test set in ImageNet's own label space, with labels for folders: `0/`, `1/`, … (V2)."""
    names = _names_by_wnid(classnames)
    return Lists(tuple(names.values()), [], [], _walk(images, [str(label) for label in range(len(names))]))


def own_wnid_folders(images: Path, classnames: Path) -> Lists:
    """A test set in a label space of its own: the wnid folders that are there, sorted (A and R)."""
    names, there = _names_by_wnid(classnames), _subfolders(images)
    for folder in there:
        if folder not in names:
            raise PerlclipError(f"folder {images / folder} is not a class of {classnames}")
    return Lists(tuple(names[folder] for folder in there), [], [], _walk(images, there))


def labelled(parts: Mapping[str, Any], file: Path) -> tuple[tuple[str, ...], list[Items]]:
    """Lists of [path, label, class name], checked; the first gives the class names and must have every label."""
    names: dict[int, str] = {}
    checked: list[Items] = []
    for part, triples in parts.items():
        if not isinstance(triples, list):
            raise PerlclipError(f"{file} has no list {part!r}")
        items: Items = []
        for triple in triples:
            path, label, name = _triple(triple, part, file)
            known = names.get(label) if checked else names.setdefault(label, name)
            if known != name:
                before = "has no name before" if known is None else f"is {known!r} before"
                raise PerlclipError(f"{file}: label {label}, {name!r} in {part!r}, {before}")
            items.append((path, label))
        checked.append(items)
    gap = next((label for label in range(len(names) or 1) if label not in names), None)
    if gap is not None:
        raise PerlclipError(f"{file}: labels must count from 0 without a gap, but {next(iter(parts))!r} lacks {gap}")
    return tuple(names[label] for label in range(len(names))), checked


def _triple(triple: Any, part: str, file: Path) -> tuple[str, int, str]:
    match triple:
        case [str(path), int(label), str(name)] if type(label) is int:
            if not path or _OUTSIDE.search(path):
                raise PerlclipError(f"{file}: path {path!r} in {part!r} does not stay below the image folder")
            return path, label, name
    raise PerlclipError(f"{file}: {part!r} must hold [path, label, class name], got {str(triple)[:80]}")


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise PerlclipError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise PerlclipError(f"{file} must hold a JSON object, got a {type(value).__name__}")
    return value


def read_text(file: Path) -> str:
    """A UTF-8 file, with or without a byte-order mark."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PerlclipError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PerlclipError(f"{file} is not UTF-8 text: {error}") from error


def _lines(file: Path) -> list[str]:
    lines = [line.strip() for line in read_text(file).splitlines()]
    if not any(lines):
        raise PerlclipError(f"{file} is empty")
    return [line for line in lines if line]


def _names_by_wnid(classnames: Path) -> dict[str, str]:
    """`<wnid> <class name>` lines in the order of wnids, which is that of ImageNet's labels."""
    names: dict[str, str] = {}
    for line in _lines(classnames):
        wnid, _, name = line.partition(" ")
        if not name or wnid in names:
            raise PerlclipError(f"{classnames}: line {line!r} is not a new wnid and a class name")
        names[wnid] = name
    return dict(sorted(names.items()))


def _walk(root: Path, folders: Sequence[str] | Mapping[str, str]) -> Items:
    """The image files of these folders, which must be all there are, in sorted order; labels count the folders."""
    there = set(_subfolders(root))
    missing = [folder for folder in folders if folder not in there]
    if missing:
        few = ", ".join(islice(missing, 3))
        raise PerlclipError(f"{root} lacks {len(missing):,} of {len(folders):,} class folders, first {few}")
    unknown = sorted(there.difference(folders))
    if unknown:
        raise PerlclipError(f"folder {root / unknown[0]} is not one of the {len(folders):,} class folders")
    return [(f"{folder}/{file}", label) for label, folder in enumerate(folders) for file in _image_files(root / folder)]


def _subfolders(root: Path) -> list[str]:
    return sorted(entry.name for entry in _scan(root) if entry.is_dir())


def _image_files(folder: Path) -> list[str]:
    names = (entry.name for entry in _scan(folder))
    return sorted(name for name in names if os.path.splitext(name)[1].lower() in SUFFIXES)  # noqa: PTH122


def _scan(folder: Path) -> "list[os.DirEntry[str]]":
    """What is in a folder but for hidden files; 1.3 million files are listed in seconds, as none is looked at."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise PerlclipError(f"cannot read folder {folder}: {error.strerror or error}") from error
