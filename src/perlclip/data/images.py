"""Reading images safely.

Only formats on the list are decoded, sizes are checked from the header before any pixel is, EXIF orientation is
applied, and every error names the file.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from perlclip.data.sets import ImageSource
from perlclip.errors import PerlclipError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
MAX_PIXELS = 150_000_000
MAX_BYTES = 256 * 2**20
MAX_ASPECT = 100
ON_ERROR = ("stop", "skip")  # what to do about an image that cannot be read


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read: its name, and the sentence that says why."""

    image: str
    reason: str


def images_under(folder: Path) -> list[Path]:
    """Image files in a folder and below, by their ending, in sorted order; hidden files are left out."""
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return sorted(p for p in found if p.is_file())


def check_image(path: str | Path) -> None:
    """Header, format and size of an image file, without decoding it."""
    _open(path).close()


def read_image(source: ImageSource) -> Image.Image:
    """An upright RGB image from a file, its bytes, a PIL image or a uint8 array."""
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.shape[2:] not in ((), (3,), (4,)) or 0 in source.shape:
            raise PerlclipError(
                f"an image array must be uint8, H×W or H×W×3, got {source.dtype} of shape {source.shape}"
            )
        return Image.fromarray(source).convert("RGB")
    if isinstance(source, Image.Image):
        return _upright_rgb(source)
    with _open(source) as image:
        try:
            return _upright_rgb(image)
        except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
            raise PerlclipError(f"image {_name(source)} is damaged: {error}") from error


def try_image(source: ImageSource) -> Image.Image | Unreadable:
    """What `read_image` gives, or why it does not: for `on_error="skip"`."""
    try:
        return read_image(source)
    except PerlclipError as error:
        return Unreadable(image_name(source), str(error))


def image_name(source: ImageSource) -> str:
    """What an image is called in messages and lists: its path, or what it is."""
    if isinstance(source, str | Path | bytes):
        return _name(source)
    return f"{type(source).__name__} of {source.size if isinstance(source, Image.Image) else source.shape}"


def _name(source: str | Path | bytes) -> str:
    return getattr(source, "path", f"of {len(source)} bytes") if isinstance(source, bytes) else str(source)


def _open(source: str | Path | bytes) -> Image.Image:
    path = _name(source)
    try:
        size = len(source) if isinstance(source, bytes) else Path(source).stat().st_size
        if size == 0:
            raise PerlclipError(f"image {path} is empty (0 bytes)")
        if size > MAX_BYTES:
            raise PerlclipError(f"image {path} has {size / 2**20:.0f} MiB; at most {MAX_BYTES // 2**20} are read")
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)  # header only
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


def _too_large(path: str) -> PerlclipError:
    return PerlclipError(f"image {path} has more than the {MAX_PIXELS / 1e6:.0f} million pixels that are decoded")


def _upright_rgb(image: Image.Image) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit greys: `convert` would clip them to white instead of scaling
        return Image.fromarray((np.asarray(image).astype(np.float32) / 257.0).clip(0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    return image.convert("RGB")
