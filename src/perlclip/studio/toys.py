"""Drawn toys to try the studio on: a folder of pictures whose names do not say what they show."""

from functools import cache
from pathlib import Path
from random import Random

from perlclip.data.images import read_image
from perlclip.data.sets import ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.files import require_writable

SET, CLASSES = "cluttered_toys", 8


def draw_toys(folder: Path, name: str = SET, classes: int = CLASSES) -> tuple[str, ...]:
    """Fill a folder, as far as it has not been, and say what the classes are."""
    images = _train(name)
    require_writable(folder)
    for file, i in _files(images, classes).items():
        if not (folder / file).exists():
            read_image(images.images[i]).save(folder / file)
    return images.class_names[:classes]


def truth_of(name: str = SET, classes: int = CLASSES) -> dict[str, int]:
    """What each file shows, for whoever wants to see how well it was labelled."""
    images = _train(name)
    return {file: int(images.labels[i]) for file, i in _files(images, classes).items()}


@cache
def _train(name: str) -> ImageSet:
    return load_toybox(name).train


def _files(images: ImageSet, classes: int) -> dict[str, int]:
    order = [i for i, label in enumerate(images.labels) if label < classes]
    Random(1).shuffle(order)
    return {f"toy-{number:03}.png": i for number, i in enumerate(order, start=1)}
