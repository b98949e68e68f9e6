"""Lenses: how pictures are shown to the frozen image tower.

CLIP has seen clean photographs, upright in tone, with their object in view. Other pictures may tell it little for no
deeper reason than how they look: full of grain, as a negative, the object small in the middle of much else. A lens
changes that before the first block, without a parameter and next to no time:

    x' = gain L x Lᵀ + offset

L maps rows and columns of the pixels x, gain and offset their tones. `fit` chooses one by the shots
(`training.choose_lens`); it is a setting of every method, and `plain` is none at all.

Shapes: B images of S pixels a side.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.backbone.preprocess import Preprocess

PLAIN = "plain"
FINEST = 8  # details smaller than this part of a patch are smoothed away
NEARER = 1.3


@dataclass(frozen=True, eq=False)
class Lens:
    """One of `LENSES` for the pixels of one backbone."""

    name: str
    map_SS: Tensor | None
    gain: float
    offset_311: Tensor

    def __call__(self, pixels_B3SS: Tensor) -> Tensor:
        """Normalised pixels as the tower is shown them, in float32."""
        with torch.autocast(pixels_B3SS.device.type, enabled=False):
            x_B3SS = pixels_B3SS.float()
            if self.map_SS is not None:
                x_B3SS = self.map_SS @ x_B3SS @ self.map_SS.T
            return self.gain * x_B3SS + self.offset_311

    def arrays(self) -> dict[str, Tensor]:
        """Its numbers by name, for those who look without torch; an empty map leaves all in its place."""
        map_SS = torch.zeros(0, 0) if self.map_SS is None else self.map_SS
        return {"lens": map_SS, "lens_gain": torch.tensor(self.gain), "lens_offset": self.offset_311.flatten()}


def _smooth(size: int, patch: int) -> Tensor:
    """A Gaussian round every pixel, whose weights sum to 1 at the edges, too."""
    at_S = torch.arange(size, dtype=torch.float64)
    return (-0.5 * ((at_S[:, None] - at_S) * FINEST / patch).square()).softmax(1)


def _near(size: int, patch: int) -> Tensor:
    """The middle of the image, enlarged."""
    left_out = round(size * (1 - 1 / NEARER) / 2)  # on either side
    rows_sS = torch.eye(size, dtype=torch.float64)[left_out : size - left_out]
    return F.interpolate(rows_sS[None, None], (size, size), mode="bicubic")[0, 0]


@dataclass(frozen=True)
class Kind:
    """What makes a lens: its map for images and patches of so many pixels a side; whether tones are turned round."""

    summary: str
    map: Callable[[int, int], Tensor] | None = None
    negative: bool = False


LENSES = {
    "smooth": Kind("fine grain smoothed away", _smooth),
    "negative": Kind("dark for bright, as from a film's negative", negative=True),
    "near": Kind("the middle of the picture, from nearer", _near),
}


def make_lens(name: str, preprocess: Preprocess, patch: int, device: torch.device) -> Lens | None:
    """A lens for pixels that were made so, and are seen by patches of so many a side; nothing for `plain`."""
    if name == PLAIN:
        return None
    kind, white = LENSES[name], 255 / preprocess.scale
    with torch.inference_mode(False):  # it may be made where nobody wants gradients, and used where somebody does
        # white - p of tones p, where x = (p - mean) / std.
        means = zip(preprocess.mean, preprocess.std, strict=True)
        offset = [(white - 2 * m) / s if kind.negative else 0.0 for m, s in means]
        map_SS = kind.map(preprocess.size, patch).float().to(device) if kind.map else None
        return Lens(name, map_SS, -1.0 if kind.negative else 1.0, torch.tensor(offset, device=device)[:, None, None])
