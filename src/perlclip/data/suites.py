"""Data sets that are benchmarked together: a source, targets, and variants of the source.

Two are built in. A user's own folders make another with a small file:

    name = "garden"
    backbone = "openai/clip-vit-base-patch16"   # optional
    [sets.plants]
    data = "plants"                             # folder or manifest, relative to the file
    role = "source"                             # source, target (if not given) or variant
    template = "a photo of a {}, a type of plant."   # optional
    class_names = "names.json"                  # optional
"""

import random
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from perlclip.data.coop.catalog import CATALOG, load_dataset
from perlclip.data.folder import ClassNames, find_own, read_class_names, renamed
from perlclip.data.sets import SPLITS, DataSet, ImageSet, for_classes
from perlclip.data.toybox import TASKS, load_toybox
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import are_novel, spoken
from perlclip.text.templates import DEFAULT_TEMPLATE, check_template

Loader = Callable[[str, Path | None], DataSet]  # name, root of the data sets
ROLES = ("source", "target", "variant")
VIT_B16 = "openai/clip-vit-base-patch16"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Data sets that are benchmarked together."""

    name: str
    source: str = ""  # an own suite need not have one
    targets: tuple[str, ...]
    variants: tuple[str, ...] = ()  # of the source: its classes, other pictures
    load: Loader
    on_disk: bool = False  # below a root that the user must name
    drawn: bool = False  # by our own code: the same name is the same pictures
    published: bool = False  # its sets are those that methods have settings for
    backbone: str = "tiny"  # unless another is asked for
    file: Path | None = None  # that an own suite was read from

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*((self.source,) if self.source else ()), *self.targets, *self.variants)


def by_role(name: str, sets: Iterable[tuple[str, str]], load: Loader, **more: Any) -> Suite:
    """A suite of sets with their roles, in whatever order they come."""
    having: dict[str, list[str]] = {role: [] for role in ROLES}
    for member, role in sets:
        having[role].append(member)
    if len(having["source"]) > 1:
        raise PerlclipError(f"suite {name!r} has two sources, {' and '.join(having['source'][:2])}; it can have one")
    if having["variant"] and not having["source"]:
        raise PerlclipError(f"suite {name!r} has a variant {having['variant'][0]!r}, but no source")
    source, targets, variants = (tuple(having[role]) for role in ROLES)
    return Suite(name=name, source=source[0] if source else "", targets=targets, variants=variants, load=load, **more)


def _from_catalog(name: str, root: Path | None) -> DataSet:
    if root is None:
        raise PerlclipError("the data sets of suite 'coop' are read from a folder: name it with --data ROOT")
    return load_dataset(name, root)


def _drawn(name: str, root: Path | None) -> DataSet:
    return load_toybox(name)


_BUILT_IN = (
    by_role("toybox", ((task.name, task.role) for task in TASKS), _drawn, drawn=True),
    by_role(
        "coop", ((entry.name, entry.role) for entry in CATALOG), _from_catalog,
        on_disk=True, published=True, backbone=VIT_B16,
    ),
)  # fmt: skip
SUITES: dict[str, Suite] = {found.name: found for found in _BUILT_IN}


def suite(name: str | Path) -> Suite:
    """A suite by name, or an own one by its TOML file; from then on it has a name, too."""
    if str(name).endswith(".toml"):
        found = _read(Path(name).resolve())
        taken = SUITES.get(found.name)
        if taken is not None and taken.file != found.file:
            where = f"read from {taken.file}" if taken.file else "built in"
            raise PerlclipError(f"{name}: a suite {found.name!r} is already {where}; give this one another name")
        SUITES[found.name] = found
        return found
    if name not in SUITES:
        raise unknown_name("suite", str(name), SUITES)
    return SUITES[str(name)]


# ---- own suites ----


@dataclass(frozen=True, kw_only=True)
class _Own:
    """A set of the file."""

    path: Path
    role: str
    template: str  # empty: none given
    class_names: ClassNames | None

    def names(self) -> tuple[str, ...]:
        """Its class names, which need no image."""
        found = find_own(self.path)
        labels = found.labels("test" if found.splits and "train" not in found.splits else None)
        return renamed([spoken(label) for label in labels], self.class_names)

    def read(self, split: str | None, template: str) -> ImageSet:
        images = find_own(self.path).read(split, self.template or template)
        return replace(images, class_names=renamed(images.class_names, self.class_names))


def _read(file: Path) -> Suite:
    where = f"suite {file}"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PerlclipError(f"cannot read {where}: {error.strerror or error}") from error
    except ValueError as error:
        raise PerlclipError(f"{where} is not valid TOML: {error}") from error
    sets = content.pop("sets", None)
    _check_texts(where, content, ("name", "backbone", "sets"))
    if not isinstance(sets, dict) or not sets:
        raise PerlclipError(f"{where} has no sets; each is a table [sets.NAME] with a line data = …")
    for name in (content["name"], *sets):
        if not re.fullmatch(r"[\w-]+", name):  # it stands beside a colon or a slash, and is a folder of results
            raise PerlclipError(f"{where}: name {name!r} may have letters, digits, _ and - only")
    rows = {name: _row(file, f"{where}, set {name!r}", row) for name, row in sets.items()}
    found = by_role(
        content["name"], ((name, row.role) for name, row in rows.items()), partial(_load, rows),
        backbone=content.get("backbone", VIT_B16), file=file,
    )  # fmt: skip
    for name in found.variants:
        if are_novel(rows[name].names(), rows[found.source].names()):
            raise PerlclipError(f"{where}: variant {name!r} has classes that the source {found.source!r} has not")
    return found


def _row(file: Path, where: str, row: Any) -> _Own:
    _check_texts(where, row, ("data", "role", "template", "class_names"))
    role, path = row.get("role", "target"), file.parent / row["data"]
    if role not in ROLES:
        raise unknown_name(f"role of {where}:", role, ROLES)
    if not path.exists():
        raise PerlclipError(f"{where}: no such file or folder: {path}")
    if "template" in row:
        check_template(row["template"])
    there = find_own(path).splits
    for split in ("test",) if role == "variant" else ("train", "test"):
        if there and split not in there:
            raise PerlclipError(f"{where}: {path} has no split {split!r}; it has {', '.join(there)}")
    names = read_class_names(file.parent / row["class_names"]) if "class_names" in row else None
    return _Own(path=path, role=role, template=row.get("template", ""), class_names=names)


def _check_texts(where: str, table: Any, known: tuple[str, ...]) -> None:
    """Texts under known keys, of which the first is needed."""
    if not isinstance(table, dict):
        raise PerlclipError(f"{where} must be a table with a line {known[0]} = …")
    for key, value in table.items():
        if key not in known:
            raise unknown_name(f"key of {where}:", key, known)
        if not isinstance(value, str) or not value:
            raise PerlclipError(f"{where}: {key} must be a text in quotes, got {value!r}")
    if known[0] not in table:
        raise PerlclipError(f"{where}: a line {known[0]} = … is missing")


def _load(rows: Mapping[str, _Own], name: str, root: Path | None) -> DataSet:
    own, there = rows[name], find_own(rows[name].path).splits
    if own.role == "variant":
        source = next(row for row in rows.values() if row.role == "source")
        images = own.read("test" if there else None, source.template or DEFAULT_TEMPLATE)
        test = for_classes(images, source.names())
        parts = [test.select([]), test.select([]), test]
    elif there:
        train = own.read("train", DEFAULT_TEMPLATE)
        others = (own.read(split, DEFAULT_TEMPLATE) if split in there else train.select([]) for split in SPLITS[1:])
        parts = [train, *(for_classes(images, train.class_names) for images in others)]
    else:
        parts = _split(own.read(None, DEFAULT_TEMPLATE))
    train, val, test = (replace(images, name=name) for images in parts)
    return DataSet(name=name, train=train, val=val, test=test)


def _split(pool: ImageSet) -> list[ImageSet]:
    """Half of each class to train on, a fifth for validation and the rest for testing, as CoOp's authors split theirs.

    What becomes of a class depends on its own images alone, neither on its name nor on other classes.
    """
    parts: list[list[int]] = [[], [], []]
    for label, indices in sorted(pool.by_class().items()):
        name, count = pool.class_names[label], len(indices)
        if count < 2:
            raise PerlclipError(f"class {name!r} of {pool.name} has one image; to be split it needs at least two")
        train = min(max(round(count * 0.5), 1), count - 1)
        val = min(round(count * 0.2), count - train - 1)
        order = random.Random(0).sample(indices, count)
        for part, chosen in zip(parts, (order[:train], order[train : train + val], order[train + val :]), strict=True):
            part += sorted(chosen)
    return [pool.select(part) for part in parts]
