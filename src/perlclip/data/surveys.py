"""`survey`: what `fit` would train on and hold out, every image decoded, and what is worth knowing before it does."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perlclip.data.decoding import check_on_error, readable
from perlclip.data.folder import ClassNames
from perlclip.data.images import ImageSource, Unreadable, content_hash, file_size, image_name
from perlclip.data.sets import ImageSet
from perlclip.data.sources import Source, find_source
from perlclip.errors import PerlclipError

SHOWN = 3  # of a list, in a sentence
Twins = tuple[tuple[str, str], ...]  # names of images with the same contents, two by two


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What was found in a source; `print` it to read it.

    `train` and `val` are what `fit` trains on and holds out, decoded and as far as there is room held in memory. `test`
    is the number of test images, which are not decoded. `skipped` could not be read. `duplicates` are images with the
    same contents in two splits, `contradictions` such with two labels in train.
    """

    source: str
    kind: str
    train: ImageSet = field(repr=False)
    val: ImageSet = field(repr=False)
    test: int = 0
    own_val: bool = False  # val was split off beforehand
    skipped: tuple[Unreadable, ...] = ()
    left_out: tuple[str, ...] = ()
    duplicates: dict[str, Twins] = field(default_factory=dict)  # by the two splits, "train and val"
    contradictions: Twins = ()

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Images of each class in train and val."""
        train, val = (Counter(map(int, images.labels)) for images in (self.train, self.val))
        return {name: (train[i], val[i]) for i, name in enumerate(self.train.class_names)}

    @property
    def warnings(self) -> list[str]:
        """What could make the training or its figures worthless, a sentence each."""
        return list(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if len(self.train.class_names) == 1:
            yield (
                f"there is one class only, {self.train.class_names[0]!r}: every image will be called that; "
                f"expected one folder per class in {self.source}"
            )
        if not len(self.val):
            yield "no image is left to validate on: train on fewer shots, or add images; no accuracy will be known"
        for splits, pairs in self.duplicates.items():
            same = "1 image is" if len(pairs) == 1 else f"{len(pairs)} images are"
            yield f"{same} in both {splits}, so accuracy is overstated: {_shown([f'{a} = {b}' for a, b in pairs])}"
        if self.contradictions:
            pairs = self.contradictions
            same = "1 image has" if len(pairs) == 1 else f"{len(pairs)} images have"
            yield f"{same} two labels in train: {_shown([f'{a} = {b}' for a, b in pairs])}"
        counts = [count for count, _ in self.counts.values()]
        if counts and max(counts) >= 10 * max(min(counts), 1):
            yield f"classes are of very different sizes, from {min(counts)} to {max(counts)} images to train on"

    def __str__(self) -> str:
        classes = len(self.train.class_names)
        val = "split beforehand" if self.own_val else "held out"
        test = f", test {self.test} (not used)" if self.test else ""
        lines = [
            f"{self.source}: {self.kind}, {classes} class{'es' * (classes > 1)}",
            f"  train {len(self.train)}{_per_class(self.train)}, val {len(self.val)} "
            + (f"({val}{_per_class(self.val).replace(' (', ', ').rstrip(')')})" if len(self.val) else "") + test,
        ]  # fmt: skip
        lines += [f"  left out: {sentence}" for sentence in self.left_out]
        if self.skipped:
            lines.append(f"  skipped: {_shown([each.reason for each in self.skipped])}")
        return "\n".join([*(line.rstrip() for line in lines), *(f"warning: {sentence}" for sentence in self.warnings)])

    __repr__ = __str__


def survey(
    source: str | Path | Any,
    *,
    shots: int | None = None,
    val: int = 4,
    seed: int = 1,
    class_names: ClassNames | None = None,
    template: str | None = None,
    data: str | Path | None = None,
    on_error: str = "stop",
    progress: bool = True,
) -> Survey:
    """Draw what `fit` trains on and holds out of a source, decode it all, and look at what else there is.

    The options are `train_and_val`'s. An image that cannot be read is an error, or with `on_error="skip"` left out and
    listed; files that are no images are left out before shots are drawn, those that fail to decode after that.
    """
    check_on_error(on_error)
    found = find_source(source, data)
    skipped: list[Unreadable] = []
    train, held_out = found.train_and_val(
        shots=shots, val=val, seed=seed, class_names=class_names, template=template,
        skipped=skipped if on_error == "skip" else None,
    )  # fmt: skip
    sizes = {file_size(image) for image in (*train.images, *held_out.images)}
    train, bad = readable(train, on_error=on_error, progress=progress)
    held_out, worse = readable(held_out, on_error=on_error, progress=progress)
    skipped += [*bad, *worse]
    if skipped:
        _check_classes(train)
    hashes = {"train": _hashes(train.images), "val": _hashes(held_out.images)}
    test = _test_images(found)
    # Of the test images only those are read that can be the same, files of the same size.
    hashes["test"] = _hashes([image for image in test if file_size(image) in sizes])
    return Survey(
        source=found.text,
        kind=found.own.kind if found.own else "a set of a suite",
        train=train,
        val=held_out,
        test=len(test),
        own_val="val" in found.splits,
        skipped=tuple(skipped),
        left_out=found.own.left_out if found.own else (),
        duplicates=_duplicates(hashes) if found.own else {},
        contradictions=_contradictions(train),
    )


def _check_classes(train: ImageSet) -> None:
    there = set(map(int, train.labels))
    empty = [name for i, name in enumerate(train.class_names) if i not in there]
    if empty:
        raise PerlclipError(f"no image of class {empty[0]!r} can be read")


def _hashes(images: Sequence[ImageSource]) -> dict[bytes, str]:
    found: dict[bytes, str] = {}
    for image in images:
        with suppress(PerlclipError):  # a test image that cannot be read is for `eval` to say
            found.setdefault(content_hash(image), image_name(image))
    return found


def _test_images(found: Source) -> list[ImageSource]:
    """Images that are split off for testing; labels or headers are not looked at."""
    if found.own is None or "test" not in found.splits:
        return []
    try:
        return [image for image, _ in found.own.labelled("test")]
    except PerlclipError:  # as of a competition, without labels
        return []


def _duplicates(hashes: dict[str, dict[bytes, str]]) -> dict[str, Twins]:
    found = {}
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        both = [key for key in hashes[one] if key in hashes[other]]
        if both:
            found[f"{one} and {other}"] = tuple((hashes[one][key], hashes[other][key]) for key in both)
    return found


def _contradictions(train: ImageSet) -> Twins:
    seen: dict[bytes, int] = {}
    found = []
    for i, image in enumerate(train.images):
        first = seen.setdefault(content_hash(image), i)
        if train.labels[first] != train.labels[i]:
            found.append((image_name(train.images[first]), image_name(image)))
    return tuple(found)


def _per_class(images: ImageSet) -> str:
    counts = sorted(Counter(map(int, images.labels)).values())
    if not counts:
        return ""
    return f" ({counts[0]} per class)" if counts[0] == counts[-1] else f" ({counts[0]} to {counts[-1]} per class)"


def _shown(items: Sequence[str]) -> str:
    return "; ".join(items[:SHOWN]) + (f"; … ({len(items)} in all)" if len(items) > SHOWN else "")
