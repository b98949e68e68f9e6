"""Domain shifts: what makes a toybox task differ from the pictures of pre-training.

A shift acts at one of three moments: on the scenes before anything is drawn, on the canvas before the object is
painted, or on the finished picture. Each takes a strength; strengths are data and stand in the suite's table.
Pixels go only through the operations that `render` allows itself, so that shifted pictures too are the same everywhere.

Shape legend: B scenes, H rows, W columns, C coordinates or channels, G cells of a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from perlclip.data.toybox.draws import Draws
from perlclip.data.toybox.render import paint
from perlclip.data.toybox.world import SHAPES, TEXTURES, Scenes, sample_scenes

SceneShift = Callable[[Scenes, Draws, float], Scenes]
PixelShift = Callable[[Tensor, Draws, float], Tensor]

_CLUTTER_CELLS = 4  # distractors lie on a grid of so many cells a side
_COVER_CELLS = 8
_BLUR_STEPS = (1, 2, 4)  # distances of the three taps, pass by pass
_WARM_LIGHT = (1.0, 0.55, 0.25)


# ---- on scenes ----


def _turn(scenes: Scenes, draws: Draws, strength: float) -> Scenes:
    """Turn objects by up to `strength` of a half-turn, either way."""
    reach = round(128 * strength)
    return replace(scenes, turn_B=scenes.turn_B + draws.below(2 * reach + 1) - reach)


def _shrink(scenes: Scenes, draws: Draws, strength: float) -> Scenes:
    """Make objects `strength` times smaller and put them anywhere in the picture."""
    radius_B = scenes.radius_B * (1.0 / strength)
    room_B1 = (1.0 - radius_B).unsqueeze(1)
    return replace(scenes, radius_B=radius_B, centre_BC=draws.uniform(-1, 1, 2) * room_B1)


def _zoom(scenes: Scenes, draws: Draws, strength: float) -> Scenes:
    """Fill the picture with the object's surface, its texture `strength` times larger than on a large object."""
    square_B = torch.full_like(scenes.shape_B, SHAPES.index("square"))
    radius_B = torch.full_like(scenes.radius_B, 3.0)
    density_B = scenes.density_B * (3.0 / (0.8 * strength))
    turn_B = draws.below(256)
    return replace(scenes, shape_B=square_B, radius_B=radius_B, density_B=density_B, turn_B=turn_B)


def _camouflage(scenes: Scenes, draws: Draws, strength: float) -> Scenes:
    """Pull the background's colour towards the object's."""
    return replace(scenes, canvas_BC=scenes.canvas_BC + (scenes.paint_BC - scenes.canvas_BC) * strength)


def _sketch(scenes: Scenes, draws: Draws, strength: float) -> Scenes:
    """Draw the outline and the texture's ink with a pen of `strength` pixels; leave the paint away."""
    none_B = torch.zeros_like(scenes.fill_B)
    return replace(scenes, fill_B=none_B, outline_B=none_B + strength)


# ---- on the canvas ----


def _cells(image_BCHW: Tensor, side: int) -> Tensor:
    """Cut pictures into side x side cells: (B * side * side, C, H / side, W / side)."""
    b, c, h, w = image_BCHW.shape
    cut = image_BCHW.view(b, c, side, h // side, side, w // side)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b * side * side, c, h // side, w // side)


def _joined(cells_GCHW: Tensor, side: int) -> Tensor:
    """Undo `_cells`."""
    g, c, h, w = cells_GCHW.shape
    laid = cells_GCHW.view(g // (side * side), side, side, c, h, w)
    return laid.permute(0, 3, 1, 4, 2, 5).reshape(-1, c, h * side, w * side)


@lru_cache(maxsize=4)
def _distractors(device: torch.device) -> Scenes:
    """A fixed pool of solid objects; a solid one has no ink, so that without fill it is not there at all."""
    pool = sample_scenes(4096, seed=-1, device=device)
    return replace(pool, texture_B=torch.full_like(pool.texture_B, TEXTURES.index("solid")))


def _clutter(canvas_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Lay small solid objects behind the object, one in a share `strength` of the cells of a grid."""
    per_picture = _CLUTTER_CELLS * _CLUTTER_CELLS
    pool = _distractors(canvas_BCHW.device)
    scenes = pool[draws.below(len(pool), per_picture).flatten()]
    shown_G = (draws.uniform(0, 1, per_picture) < strength).flatten().float()
    scenes = replace(scenes, fill_B=shown_G, turn_B=draws.below(256, per_picture).flatten())
    return _joined(paint(_cells(canvas_BCHW, _CLUTTER_CELLS), scenes), _CLUTTER_CELLS)


# ---- on the picture ----


def _noise(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Add uniform noise of +-strength to every channel of every pixel."""
    bits_BHW = draws.bits(*picture_BCHW.shape[-2:])
    ten_bits_BCHW = torch.stack([(bits_BHW >> shift) & 1023 for shift in (0, 10, 20)], dim=1)
    return picture_BCHW + (ten_bits_BCHW.float() * 2.0**-9 - 1.0) * strength


def _blur(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Blur with a standard deviation of `strength` pixels, at most 3.2: three passes of three taps each way."""
    side = strength * strength / (2 * sum(step * step for step in _BLUR_STEPS))
    for step in _BLUR_STEPS:
        wide = pad(picture_BCHW, (step, step, 0, 0), mode="replicate")
        picture_BCHW = (wide[..., : -2 * step] + wide[..., 2 * step :]) * side + picture_BCHW * (1 - 2 * side)
        tall = pad(picture_BCHW, (0, 0, step, step), mode="replicate")
        picture_BCHW = (tall[..., : -2 * step, :] + tall[..., 2 * step :, :]) * side + picture_BCHW * (1 - 2 * side)
    return picture_BCHW


def _negative(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Blend towards the photographic negative; 1 is the negative itself."""
    return picture_BCHW * (1 - 2 * strength) + strength


def _faint(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Take away a share `strength` of the contrast, around a middle gray."""
    return (picture_BCHW - 0.5) * (1 - strength) + 0.5


def _gray(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Blend towards shades of gray."""
    red_BHW, green_BHW, blue_BHW = picture_BCHW.unbind(1)
    luminance_BHW = red_BHW * 0.3 + green_BHW * 0.59 + blue_BHW * 0.11
    return picture_BCHW + (luminance_BHW.unsqueeze(1) - picture_BCHW) * strength


def _warm(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Light the scene with the warm colour of a lamp."""
    light = [1 - strength * (1 - channel) for channel in _WARM_LIGHT]
    return picture_BCHW * torch.tensor(light, device=picture_BCHW.device).view(3, 1, 1)


def _cover(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Hide a share `strength` of the picture's blocks behind gray ones."""
    hidden_BG = (draws.uniform(0, 1, _COVER_CELLS * _COVER_CELLS) < strength).flatten().view(-1, 1, 1, 1)
    shade_BG = draws.uniform(0.2, 0.8, _COVER_CELLS * _COVER_CELLS).flatten().view(-1, 1, 1, 1)
    return _joined(torch.where(hidden_BG, shade_BG, _cells(picture_BCHW, _COVER_CELLS)), _COVER_CELLS)


def _mosaic(picture_BCHW: Tensor, draws: Draws, strength: float) -> Tensor:
    """Repeat every `strength`-th pixel in blocks."""
    block = round(strength)
    coarse = picture_BCHW[..., block // 2 :: block, block // 2 :: block]
    grown = coarse.repeat_interleave(block, dim=2).repeat_interleave(block, dim=3)
    return grown[..., : picture_BCHW.shape[2], : picture_BCHW.shape[3]]


SCENE_SHIFTS: dict[str, SceneShift] = {
    "turn": _turn, "shrink": _shrink, "zoom": _zoom, "camouflage": _camouflage, "sketch": _sketch,
}  # fmt: skip
CANVAS_SHIFTS: dict[str, PixelShift] = {"clutter": _clutter}
PICTURE_SHIFTS: dict[str, PixelShift] = {
    "noise": _noise, "blur": _blur, "negative": _negative, "faint": _faint, "gray": _gray, "warm": _warm,
    "cover": _cover, "mosaic": _mosaic,
}  # fmt: skip
