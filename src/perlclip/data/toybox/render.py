"""Draw scenes as pixels, whole batches at once.

Shapes and textures are drawn once per process into an atlas: a signed distance per shape (in radii, negative inside)
and an ink amount per texture tile. A picture then costs two look-ups per pixel, whatever its shape.

Pictures are meant to be identical everywhere: the atlas is made on the CPU, and pixels go through +, -, *, sqrt, floor,
min and max only, one operation per kernel, which IEEE 754 rounds in one way. Kernels that fuse (torch.compile), divide
by a constant (CUDA multiplies by its inverse) or sum (order varies) are kept out, and so is torch's square root, which
is MKL's and on Intel's processors other in its last digit than on AMD's.

Shape legend: B scenes, H rows, W columns, R atlas rows and columns, P points of a polygon, C coordinates or channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from perlclip.data.toybox.draws import Draws
from perlclip.data.toybox.world import SHAPES, TEXTURES, Scenes
from perlclip.threads import one_thread

_CPU_CHUNK = 32  # scenes drawn together on a CPU, so that the working set stays in its cache
_ATLAS = 384  # rows and columns of a shape
_EXTENT = 1.2  # a shape's atlas spans -1.2 .. 1.2 radii
_TILE = 128  # rows and columns of a texture tile

Field = Callable[[Tensor, Tensor], Tensor]  # (x_RR, y_RR) -> value_RR; x to the right, y down


# ---- shapes: signed distances, combined with minimum (union) and maximum (intersection) ----


def _root(x: Tensor) -> Tensor:
    """The square root, rounded as IEEE 754 has it; of torch's that is so on GPUs, and on CPUs by their maker."""
    return x.sqrt() if x.is_cuda else torch.from_numpy(np.sqrt(x.numpy()))


def _circle(x0: float, y0: float, radius: float) -> Field:
    return lambda x, y: _root((x - x0) * (x - x0) + (y - y0) * (y - y0)) - radius


def _box(x0: float, y0: float, half_width: float, half_height: float) -> Field:
    return lambda x, y: torch.maximum((x - x0).abs() - half_width, (y - y0).abs() - half_height)


def _below(y0: float) -> Field:
    return lambda x, y: y0 - y


def _polygon(*points: tuple[float, float]) -> Field:
    """Distance to the nearest edge; the sign flips at every edge crossed by a ray to the right."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        nearest = torch.full_like(x, 1e9)
        inside = torch.zeros_like(x, dtype=torch.bool)
        for (ax, ay), (bx, by) in zip(points, (*points[1:], points[0]), strict=True):
            ex, ey = bx - ax, by - ay
            along = (((x - ax) * ex + (y - ay) * ey) * (1.0 / (ex * ex + ey * ey))).clamp(0, 1)
            dx, dy = x - ax - along * ex, y - ay - along * ey
            nearest = torch.minimum(nearest, dx * dx + dy * dy)
            if ey:
                inside ^= ((y >= ay) != (y >= by)) & (x < ax + (y - ay) * (ex / ey))
        far = _root(nearest)
        return torch.where(inside, -far, far)

    return distance


def _union(*parts: Field) -> Field:
    return lambda x, y: torch.stack([part(x, y) for part in parts]).amin(0)


def _both(first: Field, second: Field) -> Field:
    return lambda x, y: torch.maximum(first(x, y), second(x, y))


def _without(whole: Field, hole: Field) -> Field:
    return lambda x, y: torch.maximum(whole(x, y), -hole(x, y))


def _on_circle(count: int, radius: float, offset: float = 0.0) -> list[tuple[float, float]]:
    """Points spread evenly on a circle from the top, rounded so that no libm's last digit shows."""
    angles = [math.tau * (k + offset) / count for k in range(count)]
    return [(round(radius * math.sin(a), 6), round(-radius * math.cos(a), 6)) for a in angles]


def _mirrored(*right_half: tuple[float, float]) -> Field:
    """The polygon whose right half, from top to bottom, is given."""
    return _polygon(*right_half, *((-x, y) for x, y in reversed(right_half) if x))


def _gear() -> Field:
    teeth = []
    for x, y in _on_circle(8, 1.0)[:4]:  # each bar makes two teeth; (x, y) is its direction, (-y, x) its normal
        corners = [(sx * x - sy * y, sx * y + sy * x) for sx, sy in ((-1, -0.15), (1, -0.15), (1, 0.15), (-1, 0.15))]
        teeth.append(_polygon(*corners))
    return _without(_union(_circle(0, 0, 0.68), *teeth), _circle(0, 0, 0.28))


_SHAPE_FIELDS: dict[str, Field] = {
    "circle": _circle(0, 0, 0.92),
    "square": _box(0, 0, 0.78, 0.78),
    "triangle": _mirrored((0, -0.95), (0.98, 0.78)),
    "diamond": _mirrored((0, -1.05), (0.62, 0), (0, 1.05)),
    "hexagon": _polygon(*_on_circle(6, 1.0, offset=0.5)),
    "star": _polygon(*(p for pair in zip(_on_circle(5, 1.05), _on_circle(5, 0.42, 0.5), strict=True) for p in pair)),
    "crescent": _without(_circle(0.1, 0, 0.98), _circle(0.52, 0, 0.76)),
    "heart": _union(
        _circle(-0.45, -0.36, 0.5),
        _circle(0.45, -0.36, 0.5),
        _mirrored((0, -0.5), (0.45, -0.4), (0.85, -0.06), (0, 0.95)),
    ),
    "ring": _without(_circle(0, 0, 0.95), _circle(0, 0, 0.52)),
    "cross": _union(_box(0, 0, 0.95, 0.3), _box(0, 0, 0.3, 0.95)),
    "arrow": _polygon((1.05, 0), (0.2, -0.8), (0.2, -0.3), (-1, -0.3), (-1, 0.3), (0.2, 0.3), (0.2, 0.8)),
    "drop": _union(_circle(0, 0.38, 0.58), _mirrored((0, -1.05), (0.53, 0.15))),
    "frame": _without(_box(0, 0, 0.84, 0.84), _box(0, 0, 0.44, 0.44)),
    "flower": _union(_circle(0, 0, 0.4), *(_circle(x, y, 0.34) for x, y in _on_circle(6, 0.68))),
    "gear": _gear(),
    "dome": lambda x, y: torch.maximum(_circle(0, 0.5, 1.0)(x, y), y - 0.5),
    "bolt": _polygon((0.45, -1.05), (-0.65, 0.2), (-0.1, 0.2), (-0.45, 1.05), (0.65, -0.3), (0.05, -0.3)),
    "chevron": _polygon((-0.8, -0.9), (0.05, -0.9), (0.85, 0), (0.05, 0.9), (-0.8, 0.9), (0, 0)),
    "house": _mirrored((0, -1), (0.98, -0.15), (0.76, -0.15), (0.76, 0.85)),
    "tree": _mirrored((0, -1.05), (0.6, -0.25), (0.32, -0.25), (0.9, 0.55), (0.2, 0.55), (0.2, 1.05)),
    "fish": _union(
        _both(_circle(-0.2, 0.55, 1.02), _circle(-0.2, -0.55, 1.02)), _polygon((0.4, 0), (1.0, -0.6), (1.0, 0.6))
    ),
    "mushroom": _union(_without(_circle(0, 0.05, 0.95), _below(0.05)), _box(0, 0.45, 0.26, 0.45)),
    "hourglass": _mirrored((0, -0.95), (0.82, -0.95), (0.14, 0), (0.82, 0.95), (0, 0.95)),
    "crown": _mirrored((0, -0.8), (0.42, 0.0), (0.95, -0.65), (0.75, 0.75)),
}


# ---- textures: ink in 0 .. 1 on a tile that repeats; (u, v) in 0 .. 1 ----


def _wave(phase: Tensor) -> Tensor:
    """A triangle wave of period 1: 0 at integers, 1 halfway."""
    return 1.0 - ((phase - phase.floor()) * 2.0 - 1.0).abs()


def _band(phase: Tensor, share: float = 0.5) -> Tensor:
    """Ink in `share` of every period, with edges soft enough not to flicker when sampled coarsely."""
    return ((_wave(phase) - (1.0 - share)) * 5.0 + 0.5).clamp(0, 1)


def _dots(u: Tensor, v: Tensor) -> Tensor:
    x, y = u * 4.0 - (u * 4.0).floor() - 0.5, v * 4.0 - (v * 4.0).floor() - 0.5
    return ((0.34 - _root(x * x + y * y)) * 6.0 + 0.5).clamp(0, 1)


def _checks(u: Tensor, v: Tensor) -> Tensor:
    a, b = _band(u * 3.0), _band(v * 3.0)
    return a + b - 2.0 * a * b


def _speckles(u: Tensor, v: Tensor, cells: int = 14, share: float = 0.3) -> Tensor:
    on = (Draws(0, cells * cells).uniform(0, 1) < share).float()
    return on[(v * cells).long() * cells + (u * cells).long()]


_TEXTURE_FIELDS: dict[str, Field] = {
    "solid": lambda u, v: torch.zeros_like(u),
    "striped": lambda u, v: _band(v * 4.0),
    "dotted": _dots,
    "checkered": _checks,
    "zigzag": lambda u, v: _band(v * 3.0 + _wave(u * 3.0) * 0.9, share=0.42),
    "netted": lambda u, v: torch.maximum(_band((u + v) * 3.0, share=0.28), _band((u - v) * 3.0, share=0.28)),
    "speckled": _speckles,
    "faded": lambda u, v: _wave(v),
}


@lru_cache(maxsize=4)
def _atlas(device: torch.device) -> tuple[Tensor, Tensor]:
    """Signed distances of all shapes and ink of all textures, both flat, for look-up by one index."""
    r_R = (torch.arange(_ATLAS) + 0.5) * (2 * _EXTENT / _ATLAS) - _EXTENT
    x_RR, y_RR = r_R.expand(_ATLAS, -1), r_R.unsqueeze(1).expand(-1, _ATLAS)
    distances = torch.stack([_SHAPE_FIELDS[name](x_RR, y_RR) for name in SHAPES])
    t_R = (torch.arange(_TILE) + 0.5) * (1.0 / _TILE)
    u_RR, v_RR = t_R.expand(_TILE, -1), t_R.unsqueeze(1).expand(-1, _TILE)
    inks = torch.stack([_TEXTURE_FIELDS[name](u_RR, v_RR) for name in TEXTURES])
    return distances.flatten().to(device), inks.flatten().to(device)


@lru_cache(maxsize=4)
def _turns(device: torch.device) -> Tensor:
    """(cos, sin) of every 256th of a turn, rounded so that no libm's last digit shows."""
    angles = [math.tau * k / 256 for k in range(256)]
    return torch.tensor([(round(math.cos(a), 6), round(math.sin(a), 6)) for a in angles], device=device)


# ---- painting ----


def _pixel_centres(size: int, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) * 2 + 1) * (1.0 / size) - 1.0


def background(scenes: Scenes, size: int) -> Tensor:
    """The empty canvases of scenes: (B, 3, H, W) float32 in about 0 .. 1."""
    at = _pixel_centres(size, scenes.shape_B.device)
    across_BHW = scenes.slope_BC[:, 0, None, None] * at + scenes.slope_BC[:, 1, None, None] * at.unsqueeze(1)
    return scenes.canvas_BC[:, :, None, None] + across_BHW.unsqueeze(1)


def _ink_colour(paint_BC: Tensor) -> Tensor:
    """Darker than a light paint, lighter than a dark one."""
    brightness_B1 = paint_BC[:, :1] * 0.3 + paint_BC[:, 1:2] * 0.6 + paint_BC[:, 2:] * 0.1
    return torch.where(brightness_B1 > 0.2, paint_BC * 0.3, paint_BC * 0.4 + 0.6)


def _object_coordinates(scenes: Scenes, size: int) -> tuple[Tensor, Tensor]:
    """Where each pixel lies on the object, (B, H, W) each, in radii."""
    at = _pixel_centres(size, scenes.shape_B.device)
    cos_B1, sin_B1 = _turns(at.device)[scenes.turn_B & 255].unsqueeze(1).unbind(2)
    per_radius_B1 = scenes.radius_B.reciprocal().unsqueeze(1)
    x_BW = (at - scenes.centre_BC[:, :1]) * per_radius_B1
    y_BH = (at - scenes.centre_BC[:, 1:]) * per_radius_B1
    u_BHW = (x_BW * cos_B1).unsqueeze(1) + (y_BH * sin_B1).unsqueeze(2)
    v_BHW = (y_BH * cos_B1).unsqueeze(2) - (x_BW * sin_B1).unsqueeze(1)
    return u_BHW, v_BHW


def _look_up(flat: Tensor, layer_B: Tensor, side: int, column_BHW: Tensor, row_BHW: Tensor) -> Tensor:
    cell_BHW = row_BHW.floor().mul_(side).add_(column_BHW.floor()).add_((layer_B * (side * side)).view(-1, 1, 1))
    return flat[cell_BHW.int()]


def _wrap(tiles_BHW: Tensor) -> Tensor:
    # The remainder is below 1, and 1 - 2**-24 times the side still floors to the last cell.
    return (tiles_BHW - tiles_BHW.floor()).clamp(max=1.0 - 2.0**-24).mul_(_TILE)


def paint(canvas_BCHW: Tensor, scenes: Scenes) -> Tensor:
    """Draw each scene's object over its canvas."""
    size = canvas_BCHW.shape[-1]
    distances, inks = _atlas(canvas_BCHW.device)
    u_BHW, v_BHW = _object_coordinates(scenes, size)
    column_BHW, row_BHW = (w.mul(_ATLAS / (2 * _EXTENT)).add_(_ATLAS / 2).clamp_(0, _ATLAS - 1) for w in (u_BHW, v_BHW))
    pixels_per_radius_B11 = (scenes.radius_B * (size / 2)).view(-1, 1, 1)
    distance_BHW = _look_up(distances, scenes.shape_B, _ATLAS, column_BHW, row_BHW) * pixels_per_radius_B11

    density_B11 = scenes.density_B.view(-1, 1, 1)
    tile_u_BHW, tile_v_BHW = (
        _wrap(w * density_B11 + scenes.phase_BC[:, i].view(-1, 1, 1)) for i, w in enumerate((u_BHW, v_BHW))
    )
    stroke_BHW = (scenes.outline_B.view(-1, 1, 1) - distance_BHW.abs()).clamp_(0, 1)
    ink_BHW = torch.maximum(_look_up(inks, scenes.texture_B, _TILE, tile_u_BHW, tile_v_BHW), stroke_BHW)

    fill_B11 = scenes.fill_B.view(-1, 1, 1)
    inside_BHW = (0.5 - distance_BHW).clamp_(0, 1)
    opacity_BHW = torch.maximum(inside_BHW * (fill_B11 + ink_BHW * (1.0 - fill_B11)), stroke_BHW)
    ink_step_BC = _ink_colour(scenes.paint_BC) - scenes.paint_BC
    colour_BCHW = (ink_BHW.unsqueeze(1) * ink_step_BC[:, :, None, None]).add_(scenes.paint_BC[:, :, None, None])
    return colour_BCHW.sub_(canvas_BCHW).mul_(opacity_BHW.unsqueeze(1)).add_(canvas_BCHW)


def quantise(picture_BCHW: Tensor) -> Tensor:
    """Float pictures in 0 .. 1 as uint8."""
    return (picture_BCHW.clamp(0, 1) * 255.0 + 0.5).floor().to(torch.uint8)


def draw_in_chunks(draw: Callable[[slice], Tensor], count: int, device: torch.device) -> Tensor:
    """Join what `draw` makes of each piece of a batch: small pieces on a CPU, one elsewhere.

    A CPU draws on one thread.
    """
    step = _CPU_CHUNK if device.type == "cpu" else max(count, 1)
    with one_thread():
        return torch.cat([draw(slice(i, min(i + step, count))) for i in range(0, count, step)])


def render(scenes: Scenes, size: int = 64, device: torch.device | str | None = None) -> Tensor:
    """Draw scenes: (B, 3, size, size) uint8, on `device` (default: where the scenes are)."""
    scenes = scenes if device is None else scenes.to(device)

    def draw(piece: slice) -> Tensor:
        part = scenes[piece]
        return quantise(paint(background(part, size), part))

    return draw_in_chunks(draw, len(scenes), scenes.shape_B.device)
