"""Labelled images, few-shot sampling and base/novel halves, as in CoOp's protocol."""

import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from perlclip.data.images import ImageSource as ImageSource
from perlclip.data.images import as_source, content_hash
from perlclip.data.splits import SPLITS as SPLITS
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.classes import Classes, check_class_names, class_keys
from perlclip.text.templates import DEFAULT_TEMPLATE, check_template


@dataclass(frozen=True, kw_only=True)
class ImageSet:
    """Images (files, their bytes, PIL images or uint8 H×W×3 arrays), a label for each, and what they stand for."""

    images: Sequence[ImageSource] = field(repr=False)
    labels: Sequence[int] = field(repr=False)
    class_names: tuple[str, ...]
    template: str = DEFAULT_TEMPLATE
    name: str = ""
    shots: int | None = None  # images drawn of each class, if it was so
    published: str = ""  # its name, if it is one of CoOp's fifteen with its own template
    unique_names: bool = True  # False where a published list repeats a name, and only labels tell the classes apart
    readable: bool = field(default=False, repr=False)  # every image has been decoded once (`decoding.py`)

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise PerlclipError(f"there are {len(self.images)} images but {len(self.labels)} labels")
        if not all(isinstance(image, ImageSource) for image in self.images):
            object.__setattr__(self, "images", [as_source(image) for image in self.images])
        object.__setattr__(self, "class_names", check_class_names(self.class_names, unique=self.unique_names))
        check_template(self.template)
        if len(self.labels) and not 0 <= min(self.labels) <= max(self.labels) < len(self.class_names):
            raise PerlclipError(f"labels must be in 0..{len(self.class_names) - 1}, as there are so many class names")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> Classes:
        """The classes as text."""
        return Classes.spoken(self.class_names, self.template, self.published)

    @property
    def prompts(self) -> list[str]:
        """The template with each class name in it."""
        return self.classes.prompts()

    def select(self, indices: Iterable[int]) -> "ImageSet":
        """The images at these positions, in this order."""
        chosen = list(indices)
        return replace(self, images=[self.images[i] for i in chosen], labels=[int(self.labels[i]) for i in chosen])

    def by_class(self) -> dict[int, list[int]]:
        """Positions of each label, in the order in which labels and images appear."""
        groups: dict[int, list[int]] = {}
        for index, label in enumerate(self.labels):
            groups.setdefault(int(label), []).append(index)
        return groups

    @property
    def shots_each(self) -> int:
        """Images of a class: as many as were drawn, or else on average."""
        return self.shots or round(len(self) / max(1, len(self.by_class())))

    def sample(self, shots: int, rng: random.Random) -> list[int]:
        """Positions of `shots` images of each class, or of all of a smaller class: CoOp's sampling, to the file.

        CoOp draws train with `random.seed(seed)`, then val from the same stream: pass one `Random(seed)` to both.
        """
        if not len(self):
            raise PerlclipError(f"{self.name or 'the set'} has no images to draw shots from")
        chosen: list[int] = []
        for indices in self.by_class().values():
            chosen += rng.sample(indices, shots) if len(indices) >= shots else indices
        return chosen

    def few_shot(self, shots: int, rng: random.Random) -> "ImageSet":
        """The images that `sample` picks."""
        return replace(self.select(self.sample(shots, rng)), shots=shots)

    def base(self) -> "ImageSet":
        """The first half of the classes (rounded up), the ones trained on in base-to-novel."""
        return self.of_classes(range((len(self.class_names) + 1) // 2))

    def novel(self) -> "ImageSet":
        """The second half of the classes, relabelled from 0."""
        return self.of_classes(range((len(self.class_names) + 1) // 2, len(self.class_names)))

    def of_classes(self, chosen: Sequence[int]) -> "ImageSet":
        """The images of some classes, relabelled in this order."""
        place = {label: i for i, label in enumerate(chosen)}
        part = self.select(i for i, label in enumerate(self.labels) if int(label) in place)
        names = tuple(self.class_names[label] for label in chosen)
        return replace(part, labels=[place[label] for label in part.labels], class_names=names)

    def fingerprint(self) -> str:
        """SHA-256 over names, labels and image contents (file bytes or pixels): the data, not where it lies."""
        digest = hashlib.sha256("\0".join([self.template, *self.class_names]).encode())
        for image, label in zip(self.images, self.labels, strict=True):
            digest.update(int(label).to_bytes(4, "little"))
            digest.update(content_hash(image))
        return digest.hexdigest()


# Classes of a set, as it is asked for with `/base` and so on; labels are counted from the first of them.
PARTS: dict[str, Callable[[ImageSet], ImageSet]] = {
    "all": lambda images: images,
    "base": ImageSet.base,
    "novel": ImageSet.novel,
}


def for_classes(images: ImageSet, class_names: Sequence[str], *, strict: bool = True) -> ImageSet:
    """The same images with labels that count in another list's order, names compared however they are spelt.

    A class that is not on the list is refused. Unless `strict`: then a set with all of the list's classes is cut down
    to them, and one that lacks some is left as it is.
    """
    order = {key: i for i, key in enumerate(class_keys(class_names))}
    keys = class_keys(images.class_names)
    unknown = [name for name, key in zip(images.class_names, keys, strict=True) if key not in order]
    if strict and unknown:
        raise unknown_name("class", unknown[0], class_names)
    if not strict and not set(order) <= set(keys):
        return images
    kept = images.select(i for i, label in enumerate(images.labels) if keys[label] in order)
    labels = [order[keys[label]] for label in kept.labels]
    unique = images.unique_names and not any(nth for _, nth in order)
    return replace(kept, labels=labels, class_names=tuple(class_names), unique_names=unique)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A named data set with its three splits, which share class names and template."""

    name: str
    train: ImageSet
    val: ImageSet
    test: ImageSet

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names in label order."""
        return self.train.class_names

    @property
    def template(self) -> str:
        """The prompt template."""
        return self.train.template

    @property
    def own_val(self) -> bool:
        """Whether there are validation images that are not the test images, as they are for ImageNet."""
        return len(self.val) > 0 and self.val is not self.test


def few_shot_split(data: DataSet, shots: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """CoOp's train and val shots, to the file: train first, then min(shots, 4) of val, over all classes, one stream.

    Halve the result for base-to-novel, not the data. Where the validation images are the test images (ImageNet), only
    train is drawn, and val is empty.
    """
    if shots < 1:
        raise PerlclipError(f"shots must be at least 1, got {shots}")
    rng = random.Random(seed)
    train = data.train.few_shot(shots, rng)
    return train, data.val.few_shot(min(shots, 4), rng) if data.own_val else data.val.select([])
