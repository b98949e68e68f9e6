"""The drawn world: its attributes, which of their pairs pre-training never sees, how scenes are drawn and described.

A scene is one object (shape, colour, texture, size, place) before a background. A caption is a sentence of a small
grammar that mentions some of these attributes. Every attribute value is one word, so a caption is a row of word ids
and whole batches are described without touching a string.

Shape legend: B scenes, A attributes, T words of a caption, K templates, M combinations, C coordinates or channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache

import torch
from torch import Tensor

from perlclip.data.toybox.draws import Draws

SHAPES = (
    "circle", "square", "triangle", "diamond", "hexagon", "star", "crescent", "heart", "ring", "cross", "arrow", "drop",
    "frame", "flower", "gear", "dome", "bolt", "chevron", "house", "tree", "fish", "mushroom", "hourglass", "crown",
)  # fmt: skip
COLOURS = {
    "red": (0.86, 0.10, 0.12), "orange": (0.98, 0.52, 0.05), "yellow": (0.98, 0.90, 0.12),
    "lime": (0.55, 0.92, 0.15), "green": (0.06, 0.48, 0.16), "cyan": (0.10, 0.82, 0.88),
    "blue": (0.10, 0.22, 0.88), "purple": (0.48, 0.12, 0.66), "pink": (0.98, 0.50, 0.76),
    "brown": (0.44, 0.25, 0.10), "white": (0.97, 0.97, 0.97), "black": (0.04, 0.04, 0.04),
}  # fmt: skip
TEXTURES = ("solid", "striped", "dotted", "checkered", "zigzag", "netted", "speckled", "faded")
SIZES = {"small": (0.40, 0.52), "large": (0.64, 0.80)}  # range of the radius, in halves of the picture
PLACES = {"middle": (0.0, 0.0), "left": (-1.0, 0.0), "right": (1.0, 0.0), "top": (0.0, -1.0), "bottom": (0.0, 1.0)}
GROUNDS = {"dark": 0.26, "gray": 0.50, "light": 0.75}  # brightness of the background

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": tuple(COLOURS),
    "texture": TEXTURES,
    "size": tuple(SIZES),
    "place": tuple(PLACES),
    "ground": tuple(GROUNDS),
}

# A pair is held out when (factor * first + second) % modulus == remainder. The remainders make "striped purple
# crescent" held out in all three of its pairs; every shape lacks exactly one texture and one colour.
HELD_OUT_RULES = (
    ("texture", "shape", 3, 8, 1),
    ("colour", "shape", 5, 12, 5),
    ("texture", "colour", 5, 12, 0),
)

# Articles never agree ("a orange arrow"), because class names are put into templates such as "a photo of a {}.".
TEMPLATES = (
    "a {texture} {colour} {shape}.",
    "a photo of a {texture} {colour} {shape}.",
    "a photo of a {size} {texture} {colour} {shape} on a {ground} background.",
    "a picture of a {size} {texture} {colour} {shape} at the {place}.",
    "a drawing of a {colour} {shape} with a {texture} pattern.",
    "a {texture} {shape}.",
    "a photo of a {texture} {shape}.",
    "a picture of a {texture} {shape} on a {ground} background.",
    "a {colour} {shape}.",
    "a photo of a {colour} {shape}.",
    "a drawing of a {size} {colour} {shape}.",
    "a {colour} {shape} at the {place}.",
    "a {shape}.",
    "a photo of a {shape}.",
    "a picture of a {size} {shape} at the {place}.",
    "a drawing of a {shape} on a {ground} background.",
    "a photo of a {texture} {colour} pattern.",
    "a {texture} {colour} thing.",
    "a picture of a {texture} pattern.",
    "a photo of a {texture} thing.",
    "a {colour} thing at the {place}.",
)
TWO_SENTENCES_ONE_IN = 4  # so often a caption has a second sentence: long texts train the later position embeddings


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenes:
    """A batch of scenes: ids of what captions can mention, then everything the renderer needs."""

    shape_B: Tensor
    colour_B: Tensor
    texture_B: Tensor
    size_B: Tensor
    place_B: Tensor
    ground_B: Tensor
    radius_B: Tensor  # in halves of the picture, like the centre: the picture spans -1 .. 1, y down
    centre_BC: Tensor
    turn_B: Tensor  # clockwise, in 256ths of a turn
    density_B: Tensor  # texture tiles per radius
    phase_BC: Tensor  # texture offset, in tiles
    paint_BC: Tensor  # RGB of the object
    canvas_BC: Tensor  # RGB of the background
    slope_BC: Tensor  # brightness gradient of the background, to the right and down
    fill_B: Tensor  # opacity of the paint; the texture's ink stays opaque
    outline_B: Tensor  # width of an ink outline, in pixels

    def __len__(self) -> int:
        return len(self.shape_B)

    def __getitem__(self, index: slice | Tensor) -> Scenes:
        return Scenes(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def to(self, device: torch.device | str) -> Scenes:
        """The same scenes on another device."""
        return Scenes(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def ids(self) -> Tensor:
        """(B, A) attribute ids in the order of `ATTRIBUTES`."""
        return torch.stack([getattr(self, f"{name}_B") for name in ATTRIBUTES], dim=1)


def is_held_out(**ids: int) -> bool:
    """Whether pre-training never shows this combination, e.g. `is_held_out(texture=1, shape=6)`."""
    return any(
        (factor * ids[first] + ids[second]) % modulus == remainder
        for first, second, factor, modulus, remainder in HELD_OUT_RULES
        if first in ids and second in ids
    )


@lru_cache(maxsize=1)
def combinations() -> tuple[Tensor, Tensor]:
    """All (shape, colour, texture) triples, (M, 3), and which of them pre-training may show, (M,)."""
    triples = list(itertools.product(range(len(SHAPES)), range(len(COLOURS)), range(len(TEXTURES))))
    shown = [not is_held_out(shape=s, colour=c, texture=t) for s, c, t in triples]
    return torch.tensor(triples), torch.tensor(shown)


def sample_scenes(
    n: int, seed: int, *, start: int = 0, device: torch.device | str = "cpu", triples_B3: Tensor | None = None
) -> Scenes:
    """Scenes `start .. start + n` of a seed, of the given (shape, colour, texture) ids or of any pre-training shows."""
    draws = Draws(seed, n, start=start, device=device)
    if triples_B3 is None:
        all_M3, shown_M = combinations()
        pool_M3 = all_M3[shown_M].to(device)
        triples_B3 = pool_M3[draws.below(len(pool_M3))]
    shape_B, colour_B, texture_B = triples_B3.to(device).unbind(1)
    size_B, place_B, ground_B = (draws.below(len(ATTRIBUTES[name])) for name in ("size", "place", "ground"))

    low_B, high_B = _table(SIZES, device)[size_B].unbind(1)
    radius_B = low_B + (high_B - low_B) * draws.uniform(0, 1)
    room_B1 = (1.0 - radius_B).mul(0.8).unsqueeze(1)
    brightness_B1 = _table(GROUNDS, device)[ground_B].unsqueeze(1)
    return Scenes(
        shape_B=shape_B, colour_B=colour_B, texture_B=texture_B, size_B=size_B, place_B=place_B, ground_B=ground_B,
        radius_B=radius_B,
        centre_BC=_table(PLACES, device)[place_B] * room_B1 + draws.uniform(-0.06, 0.06, 2),
        turn_B=draws.below(25) - 12,  # up to 17 degrees either way
        density_B=draws.uniform(0.45, 0.60),
        phase_BC=draws.uniform(0, 1, 2),
        paint_BC=_table(COLOURS, device)[colour_B] + draws.uniform(-0.04, 0.04, 3),
        canvas_BC=brightness_B1 + draws.uniform(-0.05, 0.05, 3),
        slope_BC=draws.uniform(-0.06, 0.06, 2),
        fill_B=torch.ones(n, device=device),
        outline_B=torch.zeros(n, device=device),
    )  # fmt: skip


def _table(values: Mapping[str, tuple[float, ...] | float], device: torch.device | str) -> Tensor:
    return torch.tensor(list(values.values()), device=device)


def _words_of(text: str) -> list[str]:
    return text.replace(".", " .").split()


_ATTRIBUTE_WORDS = itertools.chain.from_iterable(ATTRIBUTES.values())
_OTHER_WORDS = (word for template in TEMPLATES for word in _words_of(template) if not word.startswith("{"))
WORDS = ("", *dict.fromkeys([*_ATTRIBUTE_WORDS, *_OTHER_WORDS]))  # id 0 is padding


@lru_cache(maxsize=1)
def _grammar() -> tuple[Tensor, Tensor, Tensor]:
    """Word ids of the templates (K, T), their slots (K, T) as attribute number + 1, each attribute's first word id."""
    slots = [f"{{{name}}}" for name in ATTRIBUTES]
    width = max(len(_words_of(template)) for template in TEMPLATES)
    words_KT = torch.zeros(len(TEMPLATES), width, dtype=torch.int64)
    slots_KT = torch.zeros_like(words_KT)
    for k, template in enumerate(TEMPLATES):
        for t, word in enumerate(_words_of(template)):
            if word in slots:
                slots_KT[k, t] = slots.index(word) + 1
            else:
                words_KT[k, t] = WORDS.index(word)
    first_A = torch.tensor([WORDS.index(values[0]) for values in ATTRIBUTES.values()])
    return words_KT, slots_KT, first_A


def caption_words(scenes: Scenes, seed: int, *, start: int = 0) -> tuple[Tensor, Tensor]:
    """Describe each scene: word ids (B, T), padded with 0, and which attributes the caption mentions, (B, A) bool."""
    draws = Draws(seed, len(scenes), start=start, device=scenes.shape_B.device)
    ids_BA = scenes.ids()
    first_BT, first_BA = _sentence(ids_BA, draws.below(len(TEMPLATES)))
    second_BT, second_BA = _sentence(ids_BA, draws.below(len(TEMPLATES)))
    has_second_B1 = (draws.below(TWO_SENTENCES_ONE_IN) == 0).unsqueeze(1)

    # The second sentence starts where the first ends: shift it right by the first one's length.
    length_B1 = (first_BT > 0).sum(1, keepdim=True)
    width = first_BT.shape[1]
    source_BT = torch.arange(2 * width, device=draws.device) - length_B1
    inside_BT = (source_BT >= 0) & (source_BT < width) & has_second_B1
    shifted_BT = second_BT.gather(1, source_BT.clamp(0, width - 1)) * inside_BT
    words_BT = torch.nn.functional.pad(first_BT, (0, width)) + shifted_BT
    return words_BT, first_BA | (second_BA & has_second_B1)


def _sentence(ids_BA: Tensor, template_B: Tensor) -> tuple[Tensor, Tensor]:
    words_KT, slots_KT, first_A = (table.to(ids_BA.device) for table in _grammar())
    slots_BT = slots_KT[template_B]
    filled_BT = (ids_BA + first_A).gather(1, (slots_BT - 1).clamp(min=0))
    mentions_BA = (slots_BT.unsqueeze(2) == torch.arange(1, len(ATTRIBUTES) + 1, device=ids_BA.device)).any(1)
    return torch.where(slots_BT > 0, filled_BT, words_KT[template_B]), mentions_BA


def captions(words_BT: Tensor) -> list[str]:
    """The captions of `caption_words` as text."""
    return [" ".join(WORDS[i] for i in row if i).replace(" .", ".") for row in words_BT.tolist()]
