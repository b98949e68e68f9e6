"""A user's own data: `DATA/<class name>/*.jpg` trees and `path,label` CSV manifests.

Both may be split beforehand: a tree as `DATA/{train,val,test}/<class name>/*.jpg`, a manifest by a `split` column.
"""

import csv
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perlclip.data.images import Unreadable, check_image, images_under
from perlclip.data.sets import SPLITS, ImageSet
from perlclip.errors import PerlclipError
from perlclip.text.classes import spelling, spoken
from perlclip.text.templates import DEFAULT_TEMPLATE

Labelled = list[tuple[Path, str]]
ClassNames = Sequence[str] | Mapping[str, str]  # in sorted folder order, or from folder (or label) to name


def read_images(
    source: Path, split: str | None = None, template: str = DEFAULT_TEMPLATE, skipped: list[Unreadable] | None = None
) -> ImageSet:
    """All labelled images of a class-per-folder tree or a CSV manifest, checked by header, in sorted order.

    `split` picks one of train, val and test where the source is split beforehand: train if not given. The classes are
    train's, unless there are others.
    """
    labelled = (_read_tree if source.is_dir() else _read_manifest)(source, split)
    labels = sorted({label for _, label in labelled})
    if split in ("val", "test") and "train" in splits_of(source):
        trained = labels_of(source)
        labels = trained if set(labels) <= set(trained) else labels
    number = {label: i for i, label in enumerate(labels)}
    labelled = [pair for pair in labelled if not _fails(pair[0], skipped)]
    return ImageSet(
        images=[path for path, _ in labelled], labels=[number[label] for _, label in labelled],
        class_names=tuple(map(spoken, labels)), template=template, name=source.stem,
    )  # fmt: skip


def _fails(path: Path, skipped: list[Unreadable] | None) -> bool:
    try:
        check_image(path)
    except PerlclipError as error:
        if skipped is None:
            raise
        skipped.append(Unreadable(str(path), str(error)))
        return True
    return False


def splits_of(source: Path) -> tuple[str, ...]:
    """The splits that a tree or manifest was given beforehand; none if it was not split."""
    if source.is_dir():
        names = [folder.name for folder in _folders(source)]
        return tuple(names) if set(names) <= set(SPLITS) else ()
    return tuple(sorted({row["split"] for row in _rows(source)} - {""}))


def labels_of(source: Path, split: str | None = None) -> list[str]:
    """The classes of a tree or manifest as they are written there; the images of a tree are not looked for."""
    if not source.is_dir():
        return sorted({label for _, label in _read_manifest(source, split)})
    there = splits_of(source)
    return [folder.name for folder in _folders(source / _pick_split(source, split, there) if there else source)]


def train_val(pool: ImageSet, *, shots: int | None = None, val: int = 4, seed: int = 1) -> tuple[ImageSet, ImageSet]:
    """Split a pool: `shots` images of each class to train on, then up to `val` of what is left to validate on.

    The draws are CoOp's (train first, then val, one seeded stream). Without `shots` everything is for training but
    `val` images of each class, never more than a fifth of it.
    """
    if val < 0:
        raise PerlclipError(f"val must be at least 0, got {val}")
    rng = random.Random(seed)
    if shots is not None:
        if shots < 1:
            raise PerlclipError(f"shots must be at least 1, got {shots}")
        for label, indices in sorted(pool.by_class().items()):
            if (count := len(indices)) < shots:
                name = pool.class_names[label]
                raise PerlclipError(f"class {name!r} has {count} images, fewer than the {shots} shots asked for")
        train = pool.sample(shots, rng)
        rest = pool.select(_without(pool, train))
        return replace(pool.select(train), shots=shots), rest.few_shot(val, rng) if len(rest) else rest
    held_out: list[int] = []
    for indices in pool.by_class().values():
        held_out += rng.sample(indices, min(val, len(indices) // 5))
    return pool.select(_without(pool, held_out)), pool.select(held_out)


def read_class_names(path: str | Path) -> list[str] | dict[str, str]:
    """Class names from a file: one a line, or a JSON list, or a JSON object from folder to name."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        names = json.loads(text) if path.suffix == ".json" else lines
    except OSError as error:
        raise PerlclipError(f"cannot read class names from {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PerlclipError(f"class-names file {path} cannot be read: {error}") from error
    values = names.values() if isinstance(names, dict) else names
    if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in values):
        raise PerlclipError(f"class-names file {path} must hold a list of names, or an object from folder to name")
    return names


def _read_tree(root: Path, split: str | None) -> Labelled:
    there = splits_of(root)
    if there:
        root = root / _pick_split(root, split, there)
    elif split not in (None, "train"):
        raise PerlclipError(f"{root} is not split into train, val and test folders, so it has no split {split!r}")
    labelled: Labelled = []
    for folder in _folders(root):
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


def _pick_split(source: Path, split: str | None, there: Sequence[str]) -> str:
    split = split or "train"
    if split not in there:
        raise PerlclipError(f"{source} has no split {split!r}; it has {', '.join(there)}")
    return split


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
        split = _pick_split(path, split, there)
        rows = [row for row in rows if row["split"] == split]
    elif split not in (None, "train"):
        raise PerlclipError(f"manifest {path} has no 'split' column, so it has no split {split!r}")
    return [(path.parent / row["path"], row["label"]) for row in rows]


def renamed(old: Sequence[str], names: ClassNames | None) -> tuple[str, ...]:
    """Other names for classes: all of them in order, or those that a mapping has by their old name; none: the old."""
    if isinstance(names, Mapping):
        new = {spelling(key): name for key, name in names.items()}
        unknown = sorted(set(new) - set(map(spelling, old)))
        if unknown:
            raise PerlclipError(f"class names are given for {unknown[0]!r}, which is not among the data's classes")
        return tuple(new.get(spelling(name), name) for name in old)
    if names is not None and len(names) != len(old):
        raise PerlclipError(f"{len(names)} class names given for {len(old)} classes ({', '.join(old[:5])}, …)")
    return tuple(old if names is None else names)


def _without(pool: ImageSet, taken: list[int]) -> list[int]:
    gone = set(taken)
    return [i for i in range(len(pool)) if i not in gone]
