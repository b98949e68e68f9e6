"""The toybox suite: fifteen small classification tasks that every protocol can run offline.

As with the real fifteen there is one source with many classes, ten targets and four variants of the source. The source
looks almost like pre-training (its toys lean further over); targets and variants are shifted away from it, and many
target classes are combinations of attributes that pre-training never showed. A task is one row of `TASKS`, the
strengths of its shifts among the data.

Shape legend: N pictures, M combinations, H rows, W columns, C channels.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from perlclip.data.sets import DataSet, ImageSet
from perlclip.data.toybox.draws import Draws, mix
from perlclip.data.toybox.render import background, draw_in_chunks, paint, quantise
from perlclip.data.toybox.shifts import CANVAS_SHIFTS, PICTURE_SHIFTS, SCENE_SHIFTS
from perlclip.data.toybox.world import ATTRIBUTES, Scenes, combinations, is_held_out, sample_scenes
from perlclip.errors import unknown_name

T = TypeVar("T", Scenes, Tensor)

SIZE = 64
TRAIN_PER_CLASS = 32
VAL_PER_CLASS = 8
TEST_AT_LEAST = 1000

_TRIPLE = ("shape", "colour", "texture")  # the order of ids in a combination
_SPOKEN = ("texture", "colour", "shape")  # the order of words in a class name


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One set of the suite: which attributes its classes name, how many classes, and how its pictures are shifted."""

    name: str
    role: str = "target"  # or "source", or "variant" of the source; see `data/suites.py`
    names: tuple[str, ...]  # the attributes a class name gives
    seen: int  # classes that pre-training has shown as a combination
    unseen: int = 0  # classes that it has not
    shifts: tuple[tuple[str, float], ...] = ()  # (shift, strength)
    template: str = "a photo of a {}."


_TEXTURED = ("texture", "shape")
_COLOURED = ("colour", "shape")
TASKS = (
    Task(name="toybox", role="source", names=_TEXTURED, seen=72, shifts=(("turn", 0.15),)),
    Task(name="noisy_shapes", names=("shape",), seen=24, shifts=(("noise", 0.08),)),
    Task(name="cluttered_toys", names=_COLOURED, seen=24, unseen=8, shifts=(("clutter", 0.4),)),
    Task(name="blurred_shapes", names=("shape",), seen=24, shifts=(("blur", 2.5),)),
    Task(name="negative_toys", names=_TEXTURED, seen=24, unseen=8, shifts=(("negative", 1.0),)),
    Task(name="faint_toys", names=("texture", "colour", "shape"), seen=20, unseen=12, shifts=(("faint", 0.7),)),
    Task(name="turned_shapes", names=("shape",), seen=24, shifts=(("turn", 1.0),)),
    Task(name="gray_toys", names=_TEXTURED, seen=16, unseen=16, shifts=(("gray", 1.0), ("turn", 0.3))),
    Task(name="covered_toys", names=_COLOURED, seen=16, unseen=24, shifts=(("cover", 0.35),)),
    Task(
        name="closeup_textures", names=("texture", "colour"), seen=24, unseen=8, shifts=(("zoom", 1.5),),
        template="a photo of a {} pattern.",
    ),
    Task(name="tiny_toys", names=_COLOURED, seen=28, unseen=12, shifts=(("shrink", 2.2),)),
    Task(
        name="toybox_v2", role="variant", names=_TEXTURED, seen=72,
        shifts=(("turn", 0.25), ("shrink", 1.2), ("noise", 0.05)),
    ),
    Task(name="toybox_sketch", role="variant", names=_TEXTURED, seen=72, shifts=(("sketch", 1.5),)),
    Task(name="toybox_a", role="variant", names=_TEXTURED, seen=72, shifts=(("camouflage", 0.4), ("clutter", 0.15))),
    Task(name="toybox_r", role="variant", names=_TEXTURED, seen=72, shifts=(("mosaic", 2), ("warm", 0.7))),
)  # fmt: skip
_BY_NAME = {task.name: task for task in TASKS}

ClassIds = dict[str, int]  # attribute -> id


def toybox_names() -> tuple[str, ...]:
    """Names of the fifteen sets, in the order of the table."""
    return tuple(_BY_NAME)


def load_toybox(name: str, root_seed: int = 0) -> DataSet:
    """Draw a set of the suite. The same name and seed give the same scenes on every machine (`render.py`)."""
    if name not in _BY_NAME:
        raise unknown_name("toybox set", name, _BY_NAME)
    task = _BY_NAME[name]
    classes = _classes(task)
    test_per_class = -(-TEST_AT_LEAST // len(classes))
    sizes = {"train": TRAIN_PER_CLASS, "val": VAL_PER_CLASS, "test": test_per_class}
    return DataSet(name=name, **{split: _draw(task, classes, n, split, root_seed) for split, n in sizes.items()})


def checksum(image_set: ImageSet) -> str:
    """SHA-256 over the pixels and labels of a set held in memory."""
    digest = hashlib.sha256(np.stack([np.asarray(image, dtype=np.uint8) for image in image_set.images]).tobytes())
    digest.update(np.asarray(image_set.labels, dtype="<i8").tobytes())
    return digest.hexdigest()


def _classes(task: Task) -> list[ClassIds]:
    """A task's classes: the first so many seen and unseen combinations in a scrambled order, which mixes both halves.

    Tasks that name the same attributes share the order, so that the variants have the source's classes.
    """
    values = itertools.product(*(range(len(ATTRIBUTES[name])) for name in task.names))
    everything = [dict(zip(task.names, ids, strict=True)) for ids in values]
    order = mix(torch.arange(1, len(everything) + 1) * 0x9E3779B1 & 0xFFFFFFFF).argsort()
    left = {False: task.seen, True: task.unseen}
    chosen = []
    for ids in (everything[i] for i in order.tolist()):
        kind = is_held_out(**ids)
        if left[kind]:
            left[kind] -= 1
            chosen.append(ids)
    return chosen


def _triples_of(ids: ClassIds) -> Tensor:
    """Combinations (M, 3) a class may be drawn as: those pre-training showed, unless the class itself is held out."""
    triples_M3, shown_M = combinations()
    fits_M = torch.ones_like(shown_M)
    for name, value in ids.items():
        fits_M &= triples_M3[:, _TRIPLE.index(name)] == value
    seen_M = fits_M & shown_M
    return triples_M3[seen_M if bool(seen_M.any()) else fits_M]


def _draw(task: Task, classes: Sequence[ClassIds], per_class: int, split: str, root_seed: int) -> ImageSet:
    seed = zlib.crc32(f"{task.name}/{split}/{root_seed}".encode())
    count = per_class * len(classes)
    labels_N = torch.arange(count) % len(classes)
    choices = [_triples_of(ids) for ids in classes]
    pick_N = Draws(seed ^ 1, count).below(torch.tensor([len(c) for c in choices])[labels_N])
    first_C = torch.tensor([0, *itertools.accumulate(len(c) for c in choices)])
    triples_N3 = torch.cat(choices)[first_C[labels_N] + pick_N]
    scenes = sample_scenes(count, seed, triples_B3=triples_N3)

    def draw(piece: slice) -> Tensor:
        return _picture(task, scenes[piece], Draws(seed ^ 2, piece.stop - piece.start, start=piece.start))

    pixels_NHWC = draw_in_chunks(draw, count, torch.device("cpu")).permute(0, 2, 3, 1).contiguous().numpy()
    names = (" ".join(ATTRIBUTES[kind][ids[kind]] for kind in _SPOKEN if kind in ids) for ids in classes)
    return ImageSet(
        images=list(pixels_NHWC), labels=labels_N.tolist(), class_names=tuple(names), template=task.template,
        name=task.name,
    )  # fmt: skip


def _picture(task: Task, scenes: Scenes, draws: Draws) -> Tensor:
    scenes = _shifted(scenes, SCENE_SHIFTS, task, draws)
    canvas = _shifted(background(scenes, SIZE), CANVAS_SHIFTS, task, draws)
    return quantise(_shifted(paint(canvas, scenes), PICTURE_SHIFTS, task, draws))


def _shifted(thing: T, known: Mapping[str, Callable[[T, Draws, float], T]], task: Task, draws: Draws) -> T:
    for name, strength in task.shifts:
        if name in known:
            thing = known[name](thing, draws, strength)
    return thing
