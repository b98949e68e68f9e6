"""Images to a tower's pixels: the backbone's own test view, and the training view of CoOp and its followers."""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from perlclip.errors import PerlclipError


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How pixels are made for one backbone; `processor` is its own, as `transformers` loads it."""

    processor: Any
    size: int  # pixels a side that the image tower takes
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0  # what a pixel's numbers are divided by
    resample: int = Image.Resampling.BICUBIC

    @classmethod
    def of(cls, processor: Any, size: int) -> "Preprocess":
        """From an image processor, which must give what the tower takes."""
        made = processor.crop_size if processor.do_center_crop else processor.size
        given = [made.get("height"), made.get("width")]
        if given != [size, size]:
            wrong = "x".join(map(str, given)) if all(given) else "any shape"
            raise PerlclipError(f"preprocessor makes images of {wrong} but the image tower takes {size}x{size} pixels")
        normal = processor.do_normalize
        return cls(
            processor=processor,
            size=size,
            mean=tuple(processor.image_mean) if normal else (0.0,) * 3,
            std=tuple(processor.image_std) if normal else (1.0,) * 3,
            scale=1 / processor.rescale_factor if processor.do_rescale else 1.0,
            resample=int(processor.resample),
        )

    def test_view(self, image: Image.Image) -> Tensor:
        """The backbone's own deterministic view of an RGB image, (3, size, size): its processor's, to the bit."""
        return self.pixels(torch.from_numpy(self.crop(image)))

    def crop(self, image: Image.Image) -> np.ndarray:
        """What `test_view` shows of an RGB image, still as bytes: (3, size, size), a quarter of the memory.

        Resizing the shorter side and cropping the middle, CLIP's way, is done here as its processor does it, without
        the copies that this makes of the whole image.
        """
        processor, size = self.processor, self.size
        edge = processor.size.get("shortest_edge") if processor.do_resize and processor.do_center_crop else None
        if edge is None or edge < size:
            made = processor(images=image, do_rescale=False, do_normalize=False, return_tensors="np")
            view_3HW: np.ndarray = made["pixel_values"][0]
            return view_3HW
        image = image if image.mode == "RGB" else image.convert("RGB")
        short = min(image.size)
        width, height = (edge if side == short else int(edge * side / short) for side in image.size)
        left, top = (width - size) // 2, (height - size) // 2
        resized = image.resize((width, height), Image.Resampling(self.resample))
        return _planes(resized.crop((left, top, left + size, top + size)))

    def pixels(self, crops_B3HW: Tensor) -> Tensor:
        """Of bytes the numbers that the tower takes: rescaled and normalised, as the processor does it."""
        mean, std = (torch.tensor(each, device=crops_B3HW.device)[:, None, None] for each in (self.mean, self.std))
        return (crops_B3HW.float() / self.scale - mean) / std

    def train_view(self, image: Image.Image, rng: random.Random, scale: tuple[float, float]) -> Tensor:
        """A random part of the image by area `scale` and aspect 3/4..4/3, resized; mirrored half of the time."""
        box = random_box(image.size, rng, scale)
        image = image.crop(box).resize((self.size, self.size), Image.Resampling(self.resample))
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self.pixels(torch.from_numpy(_planes(image)))

    def picture(self, pixels_3HW: Tensor) -> Image.Image:
        """Pixels as an image again."""
        x_HW3 = pixels_3HW.detach().cpu().float().permute(1, 2, 0) * torch.tensor(self.std) + torch.tensor(self.mean)
        return Image.fromarray((x_HW3.clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def _planes(image: Image.Image) -> np.ndarray:
    """Its bytes as (3, H, W), laid out so: what follows is then three times as fast."""
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def resized(processor: Any, old: int, new: int) -> Any:
    """The same image processor for another size."""
    settings = processor.to_dict()
    for key in ("size", "crop_size"):
        if settings.get(key):
            settings[key] = {side: round(length * new / old) for side, length in settings[key].items() if length}
    return type(processor).from_dict(settings)


def random_box(size: tuple[int, int], rng: random.Random, scale: tuple[float, float]) -> tuple[int, int, int, int]:
    """A box of random area and aspect inside an image; after ten misses, the largest centred one that is allowed."""
    width, height = size
    low, high = 3 / 4, 4 / 3
    for _ in range(10):
        area = width * height * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, round(height * high)), min(height, round(width / low))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
