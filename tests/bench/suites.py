"""A plugin: suites of little sets, also for processes that tests start."""

import os
import signal
from pathlib import Path

import numpy as np

from perlclip import PerlclipError
from perlclip.data import DataSet, ImageSet
from perlclip.data.suites import SUITES, Suite

NAMES = ("red paper", "green grass", "blue sky", "white snow")
COLOURS = ((200, 30, 30), (30, 180, 40), (30, 40, 200), (230, 230, 230))


def draw(rng: np.random.Generator, per_class: int) -> ImageSet:
    labels = [label for _ in range(per_class) for label in range(4)]
    images = [np.clip(COLOURS[c] + rng.normal(0, 60, (64, 64, 3)), 0, 255).astype(np.uint8) for c in labels]
    return ImageSet(images=images, labels=labels, class_names=NAMES)


def load(name: str, root: Path | None = None) -> DataSet:
    if name == "broken":
        raise PerlclipError("these pictures are lost")
    if name == "deadly":
        os.kill(os.getpid(), signal.SIGKILL)
    rng = np.random.default_rng(ord(name[0]))
    return DataSet(name=name, train=draw(rng, 8), val=draw(rng, 1), test=draw(rng, 5))


SUITES["little"] = Suite(name="little", source="a", targets=("b",), variants=("broken", "deadly"), load=load)
SUITES["fine"] = Suite(name="fine", source="a", targets=("b", "c"), variants=("d",), load=load)
