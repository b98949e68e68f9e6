"""Which labelled images an analysis is about: a user's folder or manifest, or a drawn set."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from perlclip.adapters.folder import Adapter
from perlclip.bench.protocols import PARTS
from perlclip.data.folder import load_images, match_classes
from perlclip.data.sets import ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.errors import PerlclipError, unknown_name

TOYBOX = "toybox:"


def labelled_images(
    source: str,
    adapter: Adapter,
    *,
    split: str | None = None,
    class_names: Sequence[str] | Mapping[str, str] | None = None,
    template: str | None = None,
) -> ImageSet:
    """DATA as `perlclip eval` takes it, or `toybox:NAME`, `toybox:NAME/base`, `toybox:NAME/novel`, `toybox:NAME/all`.

    A drawn set without a part is cut down to the adapter's classes, if it has them all.
    """
    if source.startswith(TOYBOX):
        if class_names is not None:
            raise PerlclipError("a toybox set has class names of its own; --class-names is for a folder or manifest")
        images = _drawn(source.removeprefix(TOYBOX), adapter.class_names, split or "test")
        return images if template is None else replace(images, template=template)
    images = load_images(Path(source), split=split, class_names=class_names, template=template or adapter.template)
    return match_classes(images, adapter.class_names) if class_names is None else images


def is_novel(images: ImageSet, adapter: Adapter) -> bool:
    """Whether there are classes that the adapter was not trained on."""
    return not set(images.class_names) <= set(adapter.class_names)


def _drawn(words: str, trained: Sequence[str], split: str) -> ImageSet:
    name, _, half = words.partition("/")
    data = load_toybox(name)
    if split not in ("train", "val", "test"):
        raise unknown_name("split", split, ("train", "val", "test"))
    images: ImageSet = getattr(data, split)
    if half:
        if half not in PARTS:
            raise unknown_name("part of a toybox set", half, PARTS)
        return PARTS[half](images)
    return _only(images, trained) if set(trained) <= set(images.class_names) else images


def _only(images: ImageSet, names: Sequence[str]) -> ImageSet:
    """The images of some of the classes, labels counting in the order of those."""
    number = {images.class_names.index(name): i for i, name in enumerate(names)}
    kept = images.select(i for i, label in enumerate(images.labels) if label in number)
    return replace(kept, labels=[number[label] for label in kept.labels], class_names=tuple(names))
