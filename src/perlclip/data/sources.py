"""One grammar of labelled images, for Python and for every command.

    pets/           a folder of class folders, or of train, val and test folders with those in them; also with a
                    metadata.csv that has the labels, with parquet files, or saved by `datasets`
    pets.zip        the same in an archive, zip or tar
    pets.csv        a manifest with columns path,label and perhaps split; also JSON lines
    pets.parquet    a table with the images in it
    toybox:NAME     a drawn set
    coop:NAME       one of the fifteen, from the folder that `data` (on the command line `--data`) names
    garden:NAME     a set of an own suite that has been read; garden.toml:NAME reads it (`suites.py`)

Behind each may stand `/base`, `/novel` or `/all`: the first half of its classes, the second, or all of them. A path
that exists as written is a path. In Python a data set of `datasets` is a source, too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perlclip.data.folder import ClassNames, Own, find_own, renamed, train_val
from perlclip.data.images import Unreadable
from perlclip.data.sets import PARTS, SPLITS, DataSet, ImageSet, few_shot_split, for_classes
from perlclip.data.splits import split_named
from perlclip.data.suites import SUITES, suite
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import Classes


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a text in the grammar stands for: a user's own data, or a set of a suite."""

    text: str
    own: Own | None = None
    known: DataSet | None = None
    part: str = ""  # none: all classes, and those of an adapter if it comes to that

    @property
    def splits(self) -> tuple[str, ...]:
        """Those that have images, if it was split beforehand."""
        if self.own is not None:
            return self.own.splits
        return tuple(split for split in SPLITS if len(getattr(self.known, split)))

    def read(self, split: str | None, skipped: list[Unreadable] | None = None) -> ImageSet:
        """A split with all of its classes; files that are no images are `skipped`, if that is a list."""
        if split is not None and split_named(split) is None:
            raise unknown_name("split", split, SPLITS)
        split = split_named(split) if split else None
        if self.own is not None:
            return self.own.read(split, skipped=skipped)
        split = split or "train"
        if split not in self.splits:
            raise PerlclipError(f"{self.text} has no split {split!r}; it has {', '.join(self.splits)}")
        images: ImageSet = getattr(self.known, split)
        return images

    def finish(self, images: ImageSet, class_names: ClassNames | None, template: str | None) -> ImageSet:
        """With other names and another template, as far as they are given, and only the part that is asked for."""
        if class_names is not None:
            if self.own is None:
                raise PerlclipError(f"{self.text} has class names of its own; others are for a folder or manifest")
            images = replace(images, class_names=renamed(images.class_names, class_names))
        if template is not None:
            images = replace(images, template=template, published="")
        return PARTS[self.part or "all"](images)

    def train_and_val(
        self, *, shots: int | None, val: int, seed: int, class_names: ClassNames | None, template: str | None,
        skipped: list[Unreadable] | None = None,
    ) -> tuple[ImageSet, ImageSet]:  # fmt: skip
        """What is trained on and what is held out, of all that is there."""
        pool = self.read("train", skipped)
        if self.known is not None and shots is not None:
            train, held_out = few_shot_split(self.known, shots, seed)
        elif self.known.own_val if self.known is not None else "val" in self.splits:
            train, _ = train_val(pool, shots=shots, val=0, seed=seed)
            held_out = for_classes(self.read("val", skipped), pool.class_names)
        else:
            train, held_out = train_val(pool, shots=shots, val=val, seed=seed)
        return self.finish(train, class_names, template), self.finish(held_out, class_names, template)


def load_images(
    source: str | Path | Any,
    *,
    split: str | None = None,
    class_names: ClassNames | None = None,
    template: str | None = None,
    data: str | Path | None = None,
) -> ImageSet:
    """The labelled images of a source, files checked by header, in sorted order.

    `split` picks one of train, val and test: train if not given, or all of a source that is not split. `class_names`
    renames the classes of a folder or manifest: a mapping from folder (or label) to name, or a list in sorted order.
    Prompts are made with the set's own template, for a folder or manifest "a photo of a {}.", unless one is given.
    """
    found = find_source(source, data)
    return found.finish(found.read(split), class_names, template)


def has_split(source: str | Path, split: str, *, data: str | Path | None = None) -> bool:
    """Whether a source was split beforehand and has images for that."""
    return split in find_source(source, data).splits


def published_name(source: str | Path) -> str:
    """The name for which methods have settings of their own, if the source is one of CoOp's fifteen; else nothing."""
    kind, _, words = str(source).rpartition(":")
    if not isinstance(source, str | Path) or Path(source).exists():
        return ""
    return words.partition("/")[0] if kind in SUITES and SUITES[kind].published else ""


def images_to_test(
    source: str | Path | Any,
    trained: Classes,
    *,
    split: str | None = None,
    class_names: ClassNames | None = None,
    template: str | None = None,
    data: str | Path | None = None,
    skipped: list[Unreadable] | None = None,
) -> ImageSet:
    """What an adapter for these classes is tested on; without a `split` the test images, else val, else all there are.

    Labels count in the adapter's order. A set of a suite with more classes is cut down to the adapter's, one that lacks
    some of them keeps its own; a folder or manifest with a class that the adapter does not know is refused. Where a
    part is asked for or class names are given, those are the classes. A folder's prompts are the adapter's. Files that
    are no images are an error, unless there is a list of those `skipped` for them.
    """
    found = find_source(source, data)
    split = split or next((name for name in ("test", "val") if name in found.splits), None)
    own = found.own is not None
    images = found.finish(found.read(split, skipped), class_names, template or (trained.template if own else None))
    if found.part or class_names is not None:
        return images
    return for_classes(images, trained.names, strict=own)


def train_and_val(
    source: str | Path | Any,
    *,
    shots: int | None = None,
    val: int = 4,
    seed: int = 1,
    class_names: ClassNames | None = None,
    template: str | None = None,
    data: str | Path | None = None,
) -> tuple[ImageSet, ImageSet]:
    """What is trained on and what is held out: the source's own validation images, else some of its training images.

    Shots are drawn of all classes, then those of a part are kept; of a set of a suite they are CoOp's, to the file.
    """
    return find_source(source, data).train_and_val(
        shots=shots, val=val, seed=seed, class_names=class_names, template=template
    )


def find_source(source: str | Path | Any, data: str | Path | None = None) -> Source:
    """What a text, a path or a data set of `datasets` stands for."""
    if not isinstance(source, str | Path):
        return Source(text="the data set", own=find_own(source))
    text, path = str(source), Path(source)
    if path.exists():
        return Source(text=text, own=find_own(path))
    kind, colon, words = text.rpartition(":")
    if colon and (kind in SUITES or kind.endswith(".toml")):
        return _in_suite(text, kind, words, data)
    if path.name in PARTS and path.parent.exists():
        return Source(text=text, own=find_own(path.parent), part=path.name)
    if len(kind) > 1 and Path(kind).name == kind:  # neither a path nor the letter of a drive
        raise unknown_name("suite", kind, SUITES)
    meant = next((f"{known.name}:{text}" for known in SUITES.values() if text.split("/")[0] in known.names), "")
    raise PerlclipError(f"no such file or folder: {text}" + (f"; did you mean {meant!r}?" if meant else ""))


def _in_suite(text: str, kind: str, words: str, data: str | Path | None) -> Source:
    found = suite(kind)
    name, slash, part = words.partition("/")
    if name not in found.names:
        raise unknown_name(f"data set of suite {found.name!r}:", name, found.names)
    if slash and part not in PARTS:
        raise unknown_name("part of a data set", part, PARTS)
    return Source(text=text, known=found.load(name, Path(data) if data else None), part=part)
