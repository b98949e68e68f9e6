"""`check`: wrong labels, images that are there twice and images of no class, before they are trained on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from perlclip.adapters.folder import Adapter
from perlclip.data.folder import ClassNames
from perlclip.data.images import Unreadable, content_hash, image_name
from perlclip.data.sets import SPLITS, ImageSet, for_classes
from perlclip.data.sources import find_source
from perlclip.errors import PerlclipError
from perlclip.inference.row_files import row_file
from perlclip.labels.duplicates import duplicate_groups
from perlclip.labels.looking import look
from perlclip.labels.outliers import outliers, strangeness
from perlclip.labels.wrong import SUSPECT, doubts
from perlclip.methods.base import Method

COLUMNS: dict[str, type] = {
    "kind": str, "rank": int, "image": str, "split": str, "label": str, "likely": str, "score": float, "group": int,
}  # fmt: skip
SHOWN = 3  # of a list, in a sentence


@dataclass(frozen=True)
class WrongLabel:
    """An image whose label is wrong with a `probability`, and the class that it is `likely` of."""

    place: int
    label: str
    likely: str
    probability: float


@dataclass(frozen=True)
class Duplicates:
    """Places of images that show the same; whether in more than one split, and whether under more than one label."""

    places: tuple[int, ...]
    across_splits: bool
    contradict: bool


@dataclass(frozen=True)
class Outlier:
    """An image for which no class speaks, by so many robust standard deviations."""

    place: int
    label: str
    strangeness: float


@dataclass(frozen=True, kw_only=True)
class LabelCheck:
    """What was found, worst first. `places` count in `images`, whose splits are `splits`; print it for a summary.

    `noise` is the share of labels that is estimated to be wrong; `accuracy` that of the answers the check goes by, each
    without its own image, against the labels as they are, in percent.
    """

    images: ImageSet = field(repr=False)
    splits: tuple[str, ...] = field(repr=False)  # of each image; "" where nothing is split
    wrong: tuple[WrongLabel, ...] = field(repr=False)
    duplicates: tuple[Duplicates, ...] = field(repr=False)
    outliers: tuple[Outlier, ...] = field(repr=False)
    noise: float
    accuracy: float
    skipped: tuple[Unreadable, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What should be looked at before training, a sentence each."""
        return list(self._warnings())

    def _warnings(self) -> Iterator[str]:
        if self.wrong:
            shown = [f"{self.name(one.place)} is {one.label!r}, rather {one.likely!r}" for one in self.wrong[:SHOWN]]
            count = "1 label is" if len(self.wrong) == 1 else f"{len(self.wrong)} labels are"
            yield f"{count} probably wrong: {_listed(shown, len(self.wrong))}"
        contradictions = [group for group in self.duplicates if group.contradict]
        leaks = [group for group in self.duplicates if group.across_splits]
        for groups, sentence in (
            (contradictions, "images that are the same have different labels"),
            (leaks, "images are the same in different splits, so accuracy is overstated"),
        ):
            if groups:
                shown = [" = ".join(self.name(place) for place in group.places[:2]) for group in groups[:SHOWN]]
                yield f"{sentence}: {_listed(shown, len(groups))}"
        if self.outliers:
            shown = [self.name(one.place) for one in self.outliers[:SHOWN]]
            count = "1 image seems" if len(self.outliers) == 1 else f"{len(self.outliers)} images seem"
            yield f"{count} to be of no class: {_listed(shown, len(self.outliers))}"

    def __str__(self) -> str:
        copies = sum(len(group.places) - 1 for group in self.duplicates)
        lines = [
            f"{len(self.images)} images of {len(self.images.class_names)} classes: {len(self.wrong)} labels probably "
            f"wrong, {copies} near-duplicate{'s' * (copies != 1)}, {len(self.outliers)} of no class",
            *(f"warning: {sentence}" for sentence in self.warnings),
        ]
        return "\n".join(lines)

    def name(self, place: int) -> str:
        """An image's path, or where it stands."""
        image = self.images.images[place]
        nameless = type(image) is bytes or isinstance(image, Image.Image | np.ndarray)
        return f"image {place}" if nameless else image_name(image)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each finding, of a duplicate one for each image of its group."""
        for rank, one in enumerate(self.wrong, start=1):
            yield self._row("label", rank, one.place, likely=one.likely, score=one.probability)
        for rank, group in enumerate(self.duplicates, start=1):
            for place in group.places:
                yield self._row("duplicate", rank, place, score=1.0, group=rank)
        for rank, stray in enumerate(self.outliers, start=1):
            yield self._row("outlier", rank, stray.place, score=stray.strangeness)

    def _row(
        self, kind: str, rank: int, place: int, likely: str = "", score: float = 0.0, group: int = 0
    ) -> dict[str, Any]:
        label = self.images.class_names[int(self.images.labels[place])]
        return {
            "kind": kind, "rank": rank, "image": self.name(place), "split": self.splits[place], "label": label,
            "likely": likely, "score": round(score, 4), "group": group,
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write `rows()` to a CSV, JSON-lines or parquet file, by its ending."""
        with row_file(path, COLUMNS) as write:
            for row in self.rows():
                write(row)
        return Path(path)


def check(
    trained: Method | Adapter,
    images: ImageSet | Mapping[str, ImageSet],
    *,
    batch_size: int = 64,
    workers: int = 0,
    on_error: str = "stop",
    progress: bool = True,
) -> LabelCheck:
    """Look at labelled images, of one set or of several splits with the same classes, and say what seems wrong.

    `trained` sees them: a `zero-shot` method, or an adapter whose texts know the classes better. Its head is not
    asked, since that has learned the labels. Nothing is changed.
    """
    given = {"": images} if isinstance(images, ImageSet) else dict(images)
    joined, parts = _joined(given)
    seen = look(trained, joined, batch_size=batch_size, workers=workers, on_error=on_error, progress=progress)
    joined, splits = joined.select(seen.places), tuple(parts[place] for place in seen.places)
    labels_N = torch.as_tensor([int(label) for label in joined.labels])
    groups = duplicate_groups(seen.frozen_NE, seen.small_N3SS, [content_hash(image) for image in joined.images])
    groups_N = torch.arange(len(labels_N))
    for members in groups:
        groups_N[list(members)] = members[0]
    found = doubts(seen.features_NF, seen.texts_NC, labels_N, groups_N)
    strange_N = strangeness(found.vouched_N, seen.nearest_N)
    names = joined.class_names
    suspects = [i for i in found.wrong_N.argsort(descending=True, stable=True).tolist() if found.wrong_N[i] > SUSPECT]
    right_N = found.p_NC.argmax(1) == labels_N
    return LabelCheck(
        images=joined,
        splits=splits,
        wrong=tuple(
            WrongLabel(i, names[int(labels_N[i])], names[int(found.likely_N[i])], float(found.wrong_N[i]))
            for i in suspects
        ),
        duplicates=tuple(_judged(members, splits, joined.labels) for members in groups),
        outliers=tuple(Outlier(i, names[int(labels_N[i])], float(strange_N[i])) for i in outliers(strange_N)),
        noise=found.share,
        accuracy=100 * right_N.double().mean().item(),
        skipped=seen.lost,
    )


def labelled_splits(
    source: str | Path | Any,
    *,
    class_names: ClassNames | None = None,
    template: str | None = None,
    data: str | Path | None = None,
    skipped: list[Unreadable] | None = None,
) -> dict[str, ImageSet]:
    """All labelled images of a source by split, or under no name if it is not split; the options are `load_images`'."""
    found = find_source(source, data)
    if not found.splits:
        return {"": found.finish(found.read(None, skipped), class_names, template)}
    splits: dict[str, ImageSet] = {}
    for split in (name for name in SPLITS if name in found.splits):
        # The test images of a competition have no labels.
        with suppress(PerlclipError) if split == "test" and splits else nullcontext():
            splits[split] = found.finish(found.read(split, skipped), class_names, template)
    return splits


def _joined(splits: Mapping[str, ImageSet]) -> tuple[ImageSet, list[str]]:
    """All images in one set, and the split that each is of."""
    if not any(map(len, splits.values())):
        raise PerlclipError("there are no images to check")
    first = next(iter(splits.values()))
    parts = {name: for_classes(part, first.class_names) for name, part in splits.items() if len(part)}
    joined = replace(
        first,
        images=[image for part in parts.values() for image in part.images],
        labels=[int(label) for part in parts.values() for label in part.labels],
        readable=all(part.readable for part in parts.values()),
    )
    return joined, [name for name, part in parts.items() for _ in range(len(part))]


def _judged(members: Sequence[int], splits: Sequence[str], labels: Sequence[int]) -> Duplicates:
    across, contradict = (len({values[i] for i in members}) > 1 for values in (splits, labels))
    return Duplicates(tuple(members), across, contradict)


def _listed(shown: Sequence[str], count: int) -> str:
    return "; ".join(shown) + (f"; … ({count} in all)" if count > len(shown) else "")
