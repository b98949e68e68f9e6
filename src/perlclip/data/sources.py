"""One grammar of labelled images, for Python and for every command.

    pets/           a folder of class folders, or of train, val and test folders with those in them
    pets.csv        a manifest with columns path,label and perhaps split
    toybox:NAME     a drawn set
    coop:NAME       one of the fifteen, from the folder that `data` (on the command line `--data`) names
    garden:NAME     a set of an own suite that has been read; garden.toml:NAME reads it (`suites.py`)

Behind each may stand `/base`, `/novel` or `/all`: the first half of its classes, the second, or all of them. A path
that exists as written is a path.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from perlclip.data.folder import ClassNames, read_images, renamed, splits_of, train_val
from perlclip.data.sets import PARTS, SPLITS, DataSet, ImageSet, few_shot_split, for_classes
from perlclip.data.suites import SUITES, suite
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import Classes


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a text in the grammar stands for: a folder or manifest, or a set of a suite."""

    text: str
    path: Path = Path()
    known: DataSet | None = None
    part: str = ""  # none: all classes, and those of an adapter if it comes to that

    @property
    def splits(self) -> tuple[str, ...]:
        if self.known is None:
            return splits_of(self.path)
        return tuple(split for split in SPLITS if len(getattr(self.known, split)))

    def read(self, split: str | None) -> ImageSet:
        """A split with all of its classes."""
        if split not in (None, *SPLITS):
            raise unknown_name("split", split, SPLITS)
        if self.known is None:
            return read_images(self.path, split)
        split = split or "train"
        if split not in self.splits:
            raise PerlclipError(f"{self.text} has no split {split!r}; it has {', '.join(self.splits)}")
        images: ImageSet = getattr(self.known, split)
        return images

    def finish(self, images: ImageSet, class_names: ClassNames | None, template: str | None) -> ImageSet:
        """With other names and another template, as far as they are given, and only the part that is asked for."""
        if class_names is not None:
            if self.known is not None:
                raise PerlclipError(f"{self.text} has class names of its own; others are for a folder or manifest")
            images = replace(images, class_names=renamed(images.class_names, class_names))
        if template is not None:
            images = replace(images, template=template, published="")
        return PARTS[self.part or "all"](images)


def load_images(
    source: str | Path,
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
    found = _find(source, data)
    return found.finish(found.read(split), class_names, template)


def has_split(source: str | Path, split: str, *, data: str | Path | None = None) -> bool:
    """Whether a source was split beforehand and has images for that."""
    return split in _find(source, data).splits


def published_name(source: str | Path) -> str:
    """The name for which methods have settings of their own, if the source is one of CoOp's fifteen; else nothing."""
    kind, _, words = str(source).rpartition(":")
    if Path(source).exists():
        return ""
    return words.partition("/")[0] if kind in SUITES and SUITES[kind].published else ""


def images_to_test(
    source: str | Path,
    trained: Classes,
    *,
    split: str | None = None,
    class_names: ClassNames | None = None,
    template: str | None = None,
    data: str | Path | None = None,
) -> ImageSet:
    """What an adapter for these classes is tested on; without a `split` the test images, else val, else all there are.

    Labels count in the adapter's order. A set of a suite with more classes is cut down to the adapter's, one that lacks
    some of them keeps its own; a folder or manifest with a class that the adapter does not know is refused. Where a
    part is asked for or class names are given, those are the classes. A folder's prompts are the adapter's.
    """
    found = _find(source, data)
    split = split or next((name for name in ("test", "val") if name in found.splits), None)
    own = found.known is None
    images = found.finish(found.read(split), class_names, template or (trained.template if own else None))
    if found.part or class_names is not None:
        return images
    return for_classes(images, trained.names, strict=own)


def train_and_val(
    source: str | Path,
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
    found = _find(source, data)
    pool = found.read("train")
    if found.known is not None and shots is not None:
        train, held_out = few_shot_split(found.known, shots, seed)
    elif found.known.own_val if found.known is not None else "val" in found.splits:
        train, _ = train_val(pool, shots=shots, val=0, seed=seed)
        held_out = for_classes(found.read("val"), pool.class_names)
    else:
        train, held_out = train_val(pool, shots=shots, val=val, seed=seed)
    return found.finish(train, class_names, template), found.finish(held_out, class_names, template)


def _find(source: str | Path, data: str | Path | None) -> _Source:
    text, path = str(source), Path(source)
    if path.exists():
        return _Source(text=text, path=path)
    kind, colon, words = text.rpartition(":")
    if colon and (kind in SUITES or kind.endswith(".toml")):
        return _in_suite(text, kind, words, data)
    if path.name in PARTS and path.parent.exists():
        return _Source(text=text, path=path.parent, part=path.name)
    if len(kind) > 1 and Path(kind).name == kind:  # neither a path nor the letter of a drive
        raise unknown_name("suite", kind, SUITES)
    meant = next((f"{known.name}:{text}" for known in SUITES.values() if text.split("/")[0] in known.names), "")
    raise PerlclipError(f"no such file or folder: {text}" + (f"; did you mean {meant!r}?" if meant else ""))


def _in_suite(text: str, kind: str, words: str, data: str | Path | None) -> _Source:
    found = suite(kind)
    name, slash, part = words.partition("/")
    if name not in found.names:
        raise unknown_name(f"data set of suite {found.name!r}:", name, found.names)
    if slash and part not in PARTS:
        raise unknown_name("part of a data set", part, PARTS)
    return _Source(text=text, known=found.load(name, Path(data) if data else None), part=part)
