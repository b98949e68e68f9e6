"""A user's own data: `DATA/<class name>/*.jpg` trees and `path,label` CSV manifests.

Both may be split beforehand: a tree as `DATA/{train,val,test}/<class name>/*.jpg`, a manifest by a `split` column.
"""

import csv
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perlclip.data.images import check_image, images_under
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.templates import DEFAULT_TEMPLATE

SPLITS = ("train", "val", "test")
Labelled = list[tuple[Path, str]]


def load_images(
    source: str | Path,
    *,
    split: str | None = None,
    class_names: Sequence[str] | Mapping[str, str] | None = None,
    template: str = DEFAULT_TEMPLATE,
) -> ImageSet:
    """All labelled images of a class-per-folder tree or a CSV manifest, checked by header, in sorted order.

    `class_names` renames the classes: a mapping from folder (or label) to name, or a list in sorted folder order.
    `split` picks one of train, val and test where the source is split beforehand.
    """
    source = Path(source)
    if not source.exists():
        raise PerlclipError(f"no such file or folder: {source}")
    labelled = (_read_tree if source.is_dir() else _read_manifest)(source, split)
    labels = sorted({label for _, label in labelled})
    number = {label: i for i, label in enumerate(labels)}
    for path, _ in labelled:
        check_image(path)
    data = ImageSet(
        images=[path for path, _ in labelled],
        labels=[number[label] for _, label in labelled],
        class_names=tuple(label.replace("_", " ") for label in labels),
        template=template,
        name=source.stem,
    )
    return data if class_names is None else rename_classes(data, class_names)


def train_val(pool: ImageSet, *, shots: int | None = None, val: int = 4, seed: int = 1) -> tuple[ImageSet, ImageSet]:
    """Split a pool: `shots` images of each class to train on, then up to `val` of what is left to validate on.

    The draws are CoOp's (train first, then val, one seeded stream). Without `shots` everything is for training but
    `val` images of each class, never more than a fifth of it.
    """
    if val < 0:
        raise PerlclipError(f"val must be at least 0, got {val}")
    rng = random.Random(seed)
    if shots is not None:
        _require_shots(pool, shots)
        train = pool.sample(shots, rng)
        rest = pool.select(_without(pool, train))
        return pool.select(train), rest.few_shot(val, rng) if len(rest) else rest
    held_out: list[int] = []
    for indices in pool.by_class().values():
        held_out += rng.sample(indices, min(val, len(indices) // 5))
    return pool.select(_without(pool, held_out)), pool.select(held_out)


def read_class_names(path: str | Path) -> list[str] | dict[str, str]:
    """Class names from a file: one a line, or a JSON list, or a JSON object from folder to name."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        names = (
            json.loads(text) if path.suffix == ".json" else [line.strip() for line in text.splitlines() if line.strip()]
        )
    except OSError as error:
        raise PerlclipError(f"cannot read class names from {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PerlclipError(f"class-names file {path} cannot be read: {error}") from error
    values = names.values() if isinstance(names, dict) else names
    if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in values):
        raise PerlclipError(f"class-names file {path} must hold a list of names, or an object from folder to name")
    return names


def has_split(source: str | Path, split: str) -> bool:
    """Whether a tree or manifest was split beforehand and has that part."""
    source = Path(source)
    if source.is_dir():
        names = {folder.name for folder in _folders(source)}
        return split in names and names <= set(SPLITS)
    return any(row.get("split") == split for row in _rows(source))


def _read_tree(root: Path, split: str | None) -> Labelled:
    folders = _folders(root)
    if folders and all(folder.name in SPLITS for folder in folders):
        return _read_tree(_pick_split(root, split, [folder.name for folder in folders]), None)
    if split is not None and split != "train":
        raise PerlclipError(f"{root} is not split into train, val and test folders, so it has no split {split!r}")
    labelled: Labelled = []
    for folder in folders:
        images = images_under(folder)
        if not images:
            raise PerlclipError(f"class folder {folder} holds no images")
        labelled += [(image, folder.name) for image in images]
    if not labelled:
        raise PerlclipError(f"no class folders in {root}; expected {root}/<class name>/*.jpg")
    return labelled


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise PerlclipError(f"cannot read folder {root}: {error.strerror or error}") from error


def _pick_split(root: Path, split: str | None, there: list[str]) -> Path:
    split = split or "train"
    if split not in there:
        raise PerlclipError(f"{root} has no split {split!r}; it has {', '.join(there)}")
    return root / split


def _rows(path: Path) -> list[dict[str, str]]:
    """The manifest's rows with their line numbers, cells stripped, checked one by one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            raw = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PerlclipError(f"cannot read manifest {path} as CSV: {error}") from error
    if not raw or not {"path", "label"} <= set(raw[0][1]):
        raise PerlclipError(
            f"manifest {path} needs a header 'path,label' (and optionally 'split') and at least one row"
        )
    rows = [(line, {key: (row.get(key) or "").strip() for key in ("path", "label", "split")}) for line, row in raw]
    for line, row in rows:
        if not row["path"] or not row["label"]:
            raise PerlclipError(f"manifest {path}, line {line}: path and label must both be given")
        if "split" in raw[0][1] and row["split"] not in SPLITS:
            raise PerlclipError(f"manifest {path}, line {line}: split {row['split']!r} is not train, val or test")
    return [row for _, row in rows]


def _read_manifest(path: Path, split: str | None) -> Labelled:
    rows = _rows(path)
    there = sorted({row["split"] for row in rows} - {""})
    if there:
        _pick_split(path, split, there)
        rows = [row for row in rows if row["split"] == (split or "train")]
    elif split is not None and split != "train":
        raise PerlclipError(f"manifest {path} has no 'split' column, so it has no split {split!r}")
    return [(path.parent / row["path"], row["label"]) for row in rows]


def rename_classes(data: ImageSet, names: Sequence[str] | Mapping[str, str]) -> ImageSet:
    """Other names for a set's classes: a mapping from folder (or label) to name, or a list in the set's order."""
    old = list(data.class_names)
    if isinstance(names, Mapping):
        plain = {key.replace("_", " "): name for key, name in names.items()}
        unknown = sorted(set(plain) - set(old))
        if unknown:
            raise PerlclipError(f"class names are given for {unknown[0]!r}, which is not among the data's classes")
        return replace(data, class_names=tuple(plain.get(name, name) for name in old))
    if len(names) != len(old):
        raise PerlclipError(f"{len(names)} class names given for {len(old)} classes ({', '.join(old[:5])}, …)")
    return replace(data, class_names=tuple(names))


def _require_shots(pool: ImageSet, shots: int) -> None:
    if shots < 1:
        raise PerlclipError(f"shots must be at least 1, got {shots}")
    for label, indices in sorted(pool.by_class().items()):
        if len(indices) < shots:
            raise PerlclipError(
                f"class {pool.class_names[label]!r} has {len(indices)} images, fewer than the {shots} shots asked for"
            )


def _without(pool: ImageSet, taken: list[int]) -> list[int]:
    gone = set(taken)
    return [i for i in range(len(pool)) if i not in gone]


def match_classes(data: ImageSet, class_names: Sequence[str]) -> ImageSet:
    """The same images with labels that count in another list's order; a name not on that list is refused."""
    order = {name.replace("_", " "): i for i, name in enumerate(class_names)}
    plain = [name.replace("_", " ") for name in data.class_names]
    for name in plain:
        if name not in order:
            raise unknown_name("class", name, order)
    labels = [order[plain[label]] for label in data.labels]
    return replace(data, labels=labels, class_names=tuple(class_names))
