"""A user's own data: trees of class folders, archives of such, lists, and tables with the images in them.

A tree is `DATA/<class name>/*.jpg` or Hugging Face's `imagefolder` with a `metadata.csv`, as a folder, zip or tar; a
list has columns `path,label`; a table is a parquet file or a data set of `datasets`. All may be split beforehand: a
tree as `DATA/{train,val,test}/…`, a list by a column `split`, parquet files by their names.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from perlclip.data.archives import first_bytes, is_archive, members
from perlclip.data.images import (
    HEIC,
    ImageSource,
    Unreadable,
    check_image,
    content_of,
    files_under,
    is_hidden,
    is_image_name,
)
from perlclip.data.manifests import (
    MAX_TABLE,
    Listed,
    columns_of,
    dataset_rows,
    is_dataset,
    parquet_rows,
    saved_dataset,
    text_rows,
)
from perlclip.data.sets import ImageSet
from perlclip.data.splits import split_folders, split_named
from perlclip.errors import PerlclipError
from perlclip.files import MIB, parse_json, read_file
from perlclip.text.classes import spelling, spoken
from perlclip.text.templates import DEFAULT_TEMPLATE

MAX_NAMES = 64 * MIB  # of a file of class names
Labelled = list[tuple[ImageSource, str]]
ClassNames = Sequence[str] | Mapping[str, str]  # in sorted folder order, or from folder (or label) to name
METADATA = ("metadata.csv", "metadata.jsonl")  # of Hugging Face's imagefolder
# Endings of pictures that are not read: worth a word, where a text file is not.
PICTURES = frozenset(
    {".heic", ".heif", ".avif", ".jfif", ".jpe", ".jp2", ".jxl", ".svg", ".ico", ".psd", ".raw", ".dng", ".cr2", ".nef"}
)


@dataclass(frozen=True, kw_only=True)
class Own:
    """A user's own data as it was found, before an image is looked at."""

    where: str
    kind: str  # how the labels are said
    splits: tuple[str, ...]  # given beforehand; none if it is not split
    in_split: Callable[[str], Labelled] = field(repr=False)  # of a split, or of "" where there is none
    left_out: tuple[str, ...] = ()  # sentences about files that were not taken

    @property
    def name(self) -> str:
        """What the data is called in records."""
        return Path(self.where).stem

    def labelled(self, split: str | None) -> Labelled:
        """The images of a split with their labels as they are written, in sorted order; train if none is named."""
        if not self.splits:
            if split not in (None, "train"):
                raise PerlclipError(f"{self.where} is not split into train, val and test, so it has no split {split!r}")
            return self.in_split("")
        split = split or "train"
        if split not in self.splits:
            raise PerlclipError(f"{self.where} has no split {split!r}; it has {', '.join(self.splits)}")
        return self.in_split(split)

    def labels(self, split: str | None = None) -> list[str]:
        """The classes as they are written."""
        return sorted({label for _, label in self.labelled(split)})

    def read(
        self, split: str | None = None, template: str = DEFAULT_TEMPLATE, skipped: list[Unreadable] | None = None
    ) -> ImageSet:
        """All labelled images of a split, files checked by header; those that fail are `skipped`, if that is a list.

        The classes are train's, unless there are others.
        """
        labelled = self.labelled(split)
        labels = sorted({label for _, label in labelled})
        if split in ("val", "test") and "train" in self.splits:
            trained = self.labels()
            labels = trained if set(labels) <= set(trained) else labels
        written: dict[str, str] = {}
        for label in labels:
            if (other := written.setdefault(spelling(label), label)) != label:
                raise PerlclipError(
                    f"{self.where}: {other!r} and {label!r} are one class name, {spelling(label)!r}, however they are "
                    "spelt; merge them or rename one"
                )
        number = {label: i for i, label in enumerate(labels)}
        kept = labelled if skipped is None else [pair for pair in labelled if not _fails(pair[0], skipped)]
        for image, _ in labelled if skipped is None else ():
            check_image(image)
        return ImageSet(
            images=[image for image, _ in kept], labels=[number[label] for _, label in kept],
            class_names=tuple(map(spoken, labels)), template=template, name=self.name,
        )  # fmt: skip


def _fails(image: ImageSource, skipped: list[Unreadable]) -> bool:
    try:
        check_image(image)
    except PerlclipError as error:
        skipped.append(Unreadable(str(image), str(error)))
        return True
    return False


def find_own(source: Path | Any) -> Own:
    """What a path holds, by its contents and not by its ending; or a data set of `datasets` itself."""
    if is_dataset(source):
        return _of_rows("the data set", "a data set of `datasets`", dataset_rows(source))
    path = Path(source)
    where = str(path)
    if path.is_dir():
        saved = saved_dataset(path)
        if saved is not None:
            return _of_rows(where, "a saved data set of `datasets`", dataset_rows(saved))
        return _of_tree(_Tree.of_folder(path))
    if not path.is_file():
        raise PerlclipError(f"{where} is neither a file nor a folder")
    if is_archive(path):
        return _of_tree(_Tree.of_archive(path))
    if first_bytes(path).startswith(b"PAR1"):
        return _of_rows(where, "a parquet file", parquet_rows(path))
    with path.open("rb") as file:
        rows = text_rows(file.read(MAX_TABLE + 1), f"manifest {where}")
    return _of_rows(where, "a list", [replace(row, image=path.parent / str(row.image)) for row in rows])


def _of_rows(where: str, kind: str, rows: list[Listed], left_out: Sequence[str] = ()) -> Own:
    splits = sorted({row.split for row in rows} - {""})

    def in_split(split: str) -> Labelled:
        return [(row.image, row.label) for row in rows if row.split == split]

    return Own(where=where, kind=kind, splits=tuple(splits), in_split=in_split, left_out=tuple(left_out))


# ---- trees ----


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """The files of a folder or archive, by the parts of their paths in it, in sorted order."""

    where: str
    files: dict[tuple[str, ...], ImageSource]
    folder: Path | None = None  # where empty folders are to be seen

    @classmethod
    def of_folder(cls, root: Path) -> "_Tree":
        start = len(root.parts)
        found = {path.parts[start:]: path for path in files_under(root, links=2)}
        return cls(where=str(root), files=dict(sorted(found.items())), folder=root)

    @classmethod
    def of_archive(cls, path: Path) -> "_Tree":
        """Of a zip or tar; a folder that all is in does not count."""
        found: dict[tuple[str, ...], ImageSource] = {}
        for name, source in members(path, lambda name: is_image_name(name) or PurePosixPath(name).name in METADATA):
            parts = tuple(part for part in name.split("/") if part not in ("", "."))
            if parts and not any(map(is_hidden, parts)):  # also of a path that leads out of the archive
                found[parts] = source
        tops = {parts[0] for parts in found}
        if len(tops) == 1 and not split_named(next(iter(tops))) and found and min(map(len, found)) > 2:
            found = {parts[1:]: source for parts, source in found.items()}
        return cls(where=str(path), files=dict(sorted(found.items())))

    def folders(self, *above: str) -> list[str]:
        """Names of the folders in a folder."""
        if self.folder is not None:
            with os.scandir(self.folder.joinpath(*above)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))
        depth = len(above)
        return sorted({parts[depth] for parts in self.files if parts[:depth] == above and len(parts) > depth + 1})

    def images(self) -> Iterator[tuple[str, ...]]:
        return (parts for parts in self.files if is_image_name(parts[-1]))


def _of_tree(tree: _Tree) -> Own:
    images = list(tree.images())
    shards = [parts for parts in tree.files if parts[-1].endswith(".parquet")]
    if shards and not images and tree.folder is not None:
        return _of_shards(tree, shards)
    tops = tree.folders()
    flat = {parts[0] for parts in images if len(parts) == 2}
    deep = {parts[0] for parts in images if len(parts) > 2}
    splits = split_folders(tree.where, tops, deep - flat)
    listed = _metadata_rows(tree, splits)
    if listed is not None:
        known = {str(row.image) for row in listed}
        others = [parts for parts in images if str(tree.files[parts]) not in known]
        notes = [_count(others, "image that metadata does not list", "images that metadata does not list")]
        return _of_rows(tree.where, "metadata", listed, [*filter(None, notes), *_not_taken(tree, [])])
    inner = {split for parts in images if len(parts) > 2 and (split := split_named(parts[1]))}
    if not splits and len(inner) > 1 and all(len(parts) > 2 and split_named(parts[1]) for parts in images):
        raise PerlclipError(
            f"the class folders of {tree.where} hold the splits ({'/'.join(images[0][:2])}); expected "
            f"{tree.where}/<split>/<class name>/*.jpg"
        )
    level = 1 if splits else 0
    stray = [parts for parts in images if len(parts) < level + 2]

    def in_split(split: str) -> Labelled:
        return _labelled(tree, [splits[split]] if splits else [])

    return Own(
        where=tree.where, kind="class folders", splits=tuple(sorted(splits)), in_split=in_split,
        left_out=tuple(_not_taken(tree, stray)),
    )  # fmt: skip


def _labelled(tree: _Tree, above: list[str]) -> Labelled:
    root, depth = "/".join([tree.where, *above]), len(above)
    found: dict[str, Labelled] = {name: [] for name in tree.folders(*above)}
    for parts in tree.images():
        if list(parts[:depth]) == above and len(parts) > depth + 1:
            found[parts[depth]].append((tree.files[parts], parts[depth]))
    for name, images in found.items():
        if not images:
            raise PerlclipError(f"class folder {root}/{name} holds no images" + _instead(tree, (*above, name)))
    if not found:
        raise PerlclipError(f"no class folders in {root}; expected {root}/<class name>/*.jpg")
    return [pair for images in found.values() for pair in images]


def _instead(tree: _Tree, above: tuple[str, ...]) -> str:
    """What a folder without images has in their place."""
    suffixes = Counter(PurePosixPath(parts[-1]).suffix.lower() for parts in tree.files if parts[: len(above)] == above)
    if not suffixes:
        return ""
    shown = ", ".join(f"{count} {suffix or 'without ending'}" for suffix, count in suffixes.most_common(3))
    return f" that can be read, but {shown}" + (f"; {HEIC}" if {".heic", ".heif"} & suffixes.keys() else "")


def _not_taken(tree: _Tree, stray: list[tuple[str, ...]]) -> Iterator[str]:
    """Sentences about pictures that are there and are not used."""
    said = _count(stray, "image beside the class folders", "images beside the class folders")
    if said:
        yield said
    suffixes = Counter(
        suffix
        for parts in tree.files
        if not is_image_name(parts[-1]) and (suffix := PurePosixPath(parts[-1]).suffix.lower()) in PICTURES
    )
    for suffix, count in sorted(suffixes.items()):
        yield f"{count} {suffix} file{'s' * (count > 1)}" + (f" ({HEIC})" if suffix in (".heic", ".heif") else "")


def _count(found: list[tuple[str, ...]], one: str, many: str) -> str:
    shown = ", ".join("/".join(parts) for parts in found[:3]) + (", …" if len(found) > 3 else "")
    return f"{len(found)} {one if len(found) == 1 else many}: {shown}" if found else ""


def _metadata_rows(tree: _Tree, splits: Mapping[str, str]) -> list[Listed] | None:
    """The labels that metadata files give the images beside and below them; None where they give none."""
    there = [parts for parts in tree.files if parts[-1] in METADATA and len(parts) <= 2]
    rows: list[Listed] = []
    split_of = {name: split for split, name in splits.items()}
    for parts in there:
        where = "/".join([tree.where, *parts])
        content = content_of(tree.files[parts])
        header = content[: 2**16].decode("utf-8-sig", "replace").splitlines()[0] if content else ""
        try:
            keys = list(json.loads(header)) if header.startswith("{") else header.replace(";", ",").split(",")
        except (ValueError, RecursionError):
            keys = ["label"]  # `text_rows` says what is wrong with it
        if "label" not in columns_of(keys) and tree.folders():
            continue  # captions or boxes: the folders say the classes
        for row in text_rows(content, where):
            name = (*parts[:-1], *(part for part in str(row.image).split("/") if part not in ("", ".")))
            if name not in tree.files:
                raise PerlclipError(f"{where} lists {row.image!r}, which is not there")
            rows.append(Listed(tree.files[name], row.label, row.split or split_of.get(name[0], "")))
    return rows or None


def _of_shards(tree: _Tree, shards: list[tuple[str, ...]]) -> Own:
    """Parquet files as Hugging Face's hub has them: `data/train-00000-of-00001.parquet`."""
    rows: list[Listed] = []
    named = [split_named(parts[-1].partition(".")[0].partition("-")[0]) for parts in shards]
    if any(named) and not all(named):
        names = ", ".join(parts[-1] for parts, split in zip(shards, named, strict=True) if not split)
        raise PerlclipError(f"{tree.where} has parquet files whose split is not in their names: {names[:200]}")
    for parts, split in zip(shards, named, strict=True):
        assert tree.folder is not None
        rows += parquet_rows(tree.folder.joinpath(*parts), split or "")
    return _of_rows(tree.where, "parquet files", rows)


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
        text = read_file(path, MAX_NAMES).decode("utf-8-sig")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        names = parse_json(text.encode()) if path.suffix == ".json" else lines
    except OSError as error:
        raise PerlclipError(f"cannot read class names from {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PerlclipError(f"class-names file {path} cannot be read: {error}") from error
    values = names.values() if isinstance(names, dict) else names
    if not isinstance(names, list | dict) or not all(isinstance(name, str) for name in values):
        raise PerlclipError(f"class-names file {path} must hold a list of names, or an object from folder to name")
    return names


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
