"""Drawn toys to try the studio on: a folder of pictures whose names do not say what they show."""

from pathlib import Path
from random import Random

from perlclip.data.images import read_image
from perlclip.data.toybox import load_toybox
from perlclip.files import require_writable

SET, CLASSES = "cluttered_toys", 8


def draw_toys(folder: Path, name: str = SET, classes: int = CLASSES) -> tuple[str, ...]:
    """Fill a folder, unless it has been, and say what the classes are."""
    images = load_toybox(name).train
    names = images.class_names[:classes]
    if not folder.exists():
        require_writable(folder)
        order = [i for i, label in enumerate(images.labels) if label < classes]
        Random(1).shuffle(order)
        for number, i in enumerate(order, start=1):
            read_image(images.images[i]).save(folder / f"toy-{number:03}.png")
    return names
