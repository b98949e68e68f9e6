"""Reading images safely, and turning them into a tower's pixels.

Only formats on the list are decoded, sizes are checked from the header before any pixel is, EXIF orientation is
applied, and every error names the file. `Preprocess` gives CLIP's own test view (equal to `CLIPImageProcessor`) and the
training view of CoOp and its followers: a random resized crop and a flip, on PIL images with bicubic interpolation.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from perlclip.data.sets import ImageSource
from perlclip.errors import PerlclipError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
MAX_PIXELS = 150_000_000
MAX_BYTES = 256 * 2**20
MAX_ASPECT = 100


def images_under(folder: Path) -> list[Path]:
    """Image files in a folder and below, by their ending, in sorted order; hidden files are left out."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted(p for p in found if p.is_file())


def check_image(path: str | Path) -> None:
    """Header, format and size of an image file, without decoding it."""
    _open(Path(path)).close()


def read_image(source: ImageSource) -> Image.Image:
    """An upright RGB image from a file, a PIL image or a uint8 array."""
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.shape[2:] not in ((), (3,), (4,)) or 0 in source.shape:
            raise PerlclipError(
                f"an image array must be uint8, H×W or H×W×3, got {source.dtype} of shape {source.shape}"
            )
        return Image.fromarray(source).convert("RGB")
    if isinstance(source, Image.Image):
        return _upright_rgb(source)
    path = Path(source)
    with _open(path) as image:
        try:
            return _upright_rgb(image)
        except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
            raise PerlclipError(f"image {path} is damaged: {error}") from error


def _open(path: Path) -> Image.Image:
    try:
        size = path.stat().st_size
        if size == 0:
            raise PerlclipError(f"image {path} is empty (0 bytes)")
        if size > MAX_BYTES:
            raise PerlclipError(f"image {path} has {size / 2**20:.0f} MiB; at most {MAX_BYTES // 2**20} are read")
        image = Image.open(path, formats=FORMATS)  # reads the header only
    except UnidentifiedImageError as error:
        raise PerlclipError(f"{path} is not an image in one of the formats {', '.join(FORMATS)}") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit is a little above ours
        raise _too_large(path) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise PerlclipError(f"cannot read image {path}: {getattr(error, 'strerror', None) or error}") from error
    if image.width * image.height > MAX_PIXELS:
        image.close()
        raise _too_large(path)
    if max(image.size) > MAX_ASPECT * min(image.size):  # its shorter side is scaled up to the tower's size
        image.close()
        raise PerlclipError(
            f"image {path} is {image.width}x{image.height}, longer than {MAX_ASPECT} times its other side"
        )
    return image


def _too_large(path: Path) -> PerlclipError:
    return PerlclipError(f"image {path} has more than the {MAX_PIXELS / 1e6:.0f} million pixels that are decoded")


def _upright_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit greys: `convert` would clip them to white instead of scaling
        return Image.fromarray((np.asarray(image).astype(np.float32) / 257.0).clip(0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    return image.convert("RGB")


@dataclass(frozen=True)
class Preprocess:
    """How pixels are made for one backbone: shorter side to `resize`, centre crop of `size`, then mean and std."""

    size: int
    resize: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def test_view(self, image: Image.Image) -> Tensor:
        """CLIP's own deterministic view, (3, size, size)."""
        width, height = image.size
        short = min(width, height)
        if short != self.resize:
            new = (int(self.resize * width / short), int(self.resize * height / short))
            image = image.resize(new, Image.Resampling.BICUBIC)
        width, height = image.size
        left, top = (width - self.size) // 2, (height - self.size) // 2
        return self.normalise(image.crop((left, top, left + self.size, top + self.size)))

    def train_view(self, image: Image.Image, rng: random.Random, scale: tuple[float, float]) -> Tensor:
        """A random part of the image by area `scale` and aspect 3/4..4/3, resized; mirrored half of the time."""
        box = random_box(image.size, rng, scale)
        image = image.crop(box).resize((self.size, self.size), Image.Resampling.BICUBIC)
        if rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return self.normalise(image)

    def normalise(self, image: Image.Image) -> Tensor:
        """RGB image -> (3, H, W), zero mean and unit variance by the backbone's statistics."""
        x_HW3 = torch.from_numpy(np.array(image, dtype=np.float32)) / 255.0
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((x_HW3 - mean) / std).permute(2, 0, 1).contiguous()


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
