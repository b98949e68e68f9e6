"""Reading images safely.

Only formats on the list are decoded, sizes are checked before any pixel is, EXIF orientation is applied, the first
frame of several is taken, and every error names the image. Grey values of 16 bits are divided by 257; of 32 bits,
floats from 0 to 1 and integers up to 65535 are scaled, and all others are refused: what is white in them, nobody says.
"""

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError, features

from perlclip.errors import PerlclipError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "HEIF")  # the last two where there is a decoder
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif"})
HEIC = "to read HEIC images, pip install 'perlclip[heic]'"
MAX_PIXELS = 150_000_000
MAX_BYTES = 256 * 2**20
MAX_ASPECT = 100
ON_ERROR = ("stop", "skip")  # what to do about an image that cannot be read
# Not a user's: what macOS, Synology, Linux and Windows put beside their files. Hidden names are left out as well.
JUNK = frozenset({"__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", "System Volume Information"})


class Packed:
    """An image inside a larger file, an archive or a table, that is read when it is looked at; its text is its name."""

    @property
    def size(self) -> int | None:
        """Bytes of the image file, if that is known."""
        return None

    def read(self) -> bytes:
        """The bytes of the image file."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Held:
    """An image that has been read before: its name, the hash of its file, and its pixels or its bytes."""

    name: str
    sha256: bytes
    data: Image.Image | bytes

    def __str__(self) -> str:
        return self.name


ImageSource = str | Path | bytes | Packed | Held | Image.Image | np.ndarray


@dataclass(frozen=True)
class Unreadable:
    """An image that cannot be read: its name, and the sentence that says why."""

    image: str
    reason: str


def images_under(folder: Path) -> list[Path]:
    """Image files in a folder and below, by their ending, in sorted order; hidden files and folders are left out."""
    return sorted(path for path in files_under(folder) if is_image_name(path.name))


def files_under(folder: Path, links: int = 0) -> Iterator[Path]:
    """All files in a folder and below but hidden ones and `JUNK`, each folder's by name.

    Links to folders are followed `links` levels deep.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise PerlclipError(f"cannot read folder {folder}: {error.strerror or error}") from error
    for entry in entries:
        if is_hidden(entry.name):
            continue
        if entry.is_dir(follow_symlinks=links > 0):
            yield from files_under(folder / entry.name, links - 1)
        elif entry.is_file():  # no pipe, no device
            yield folder / entry.name


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is not meant as data."""
    return name.startswith(".") or name in JUNK


def is_image_name(name: str) -> bool:
    """Whether a file is an image that can be read here, by its ending."""
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 (a million times)
    return suffix in SUFFIXES and _FORMAT_OF.get(suffix, "") not in _missing()


def is_image(given: object) -> bool:
    """Whether something stands for one image, rather than for several."""
    several = isinstance(given, Iterable) and not isinstance(given, str | bytes | bytearray | memoryview | np.ndarray)
    return not several or isinstance(given, Image.Image) or hasattr(given, "read") or hasattr(given, "detach")


def as_source(given: object) -> ImageSource:
    """What a user gave as an image, as something that can be read more than once: an open file is read here."""
    if isinstance(given, str | Path | bytes | Packed | Held | Image.Image | np.ndarray):
        return given
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    if hasattr(given, "read"):
        try:
            content = given.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:  # ValueError: it is closed, or its text is not UTF-8
            raise PerlclipError(f"cannot read an image from {given!r}: {error}") from error
        if isinstance(content, bytes):
            return content
        raise PerlclipError(f"{given!r} does not give bytes; open the image with mode 'rb'")
    hint = "; of a tensor give its H×W×3 array of uint8" if hasattr(given, "detach") else ""
    raise PerlclipError(
        f"an image is a path, its file's bytes, an open file, a PIL image or a uint8 array, not {type(given).__name__}"
        + hint
    )


def check_image(source: ImageSource) -> None:
    """Format and size of an image file, by its header, without decoding it; what is no file is left for later."""
    if isinstance(source, str | Path):
        _open(source).close()


def read_image(source: ImageSource | Any, least: int = 0) -> Image.Image:
    """An upright RGB image from a file, its bytes, an open file, a PIL image or a uint8 array.

    With `least`, a JPEG may come smaller than it is, by a half, a quarter or an eighth, as long as no side has fewer
    pixels than that: what its decoder can leave out is not decoded.
    """
    source = as_source(source)
    if isinstance(source, Held):
        if isinstance(source.data, Image.Image):
            return source.data
        source = NamedBytes(source.data, source.name)
    name = image_name(source)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim not in (2, 3) or source.shape[2:] not in ((), (3,), (4,)):
            raise PerlclipError(
                f"an image array must be uint8, H×W or H×W×3, got {source.dtype} of shape {source.shape}"
            )
        _check_size(source.shape[1], source.shape[0], name)
        return Image.fromarray(source).convert("RGB")
    try:
        if isinstance(source, Image.Image):
            _check_size(source.width, source.height, name)
            return _upright_rgb(source, name)
        with _open(source) as image:
            if least:
                image.draft(None, (least, least))  # for all but JPEG it does nothing
            quick = None if least else _quickly(image)
            return _upright_rgb(image, name) if quick is None else quick
    except PerlclipError:
        raise
    except Exception as error:  # decoders raise whatever they like
        raise PerlclipError(f"image {name} is damaged: {error}") from error


def try_image(source: ImageSource | Any, least: int = 0) -> Image.Image | Unreadable:
    """What `read_image` gives, or why it does not: for `on_error="skip"`."""
    try:
        return read_image(source, least)
    except PerlclipError as error:
        return Unreadable(image_name(source), str(error))


def image_name(source: ImageSource | Any) -> str:
    """What an image is called in messages and lists: its path, or what it is."""
    if isinstance(source, str | Path | Packed | Held):
        return str(source)
    if isinstance(source, bytes):
        return getattr(source, "path", f"of {len(source)} bytes")
    if isinstance(source, Image.Image | np.ndarray):
        size = source.shape[1::-1] if isinstance(source, np.ndarray) else source.size
        return f"({type(source).__name__} of {'x'.join(map(str, size))})"
    return str(getattr(source, "name", type(source).__name__))


def content_of(source: ImageSource) -> bytes:
    """The bytes of an image's file, or of its pixels: what it is, not where it lies."""
    if isinstance(source, str | Path):
        try:
            _check_bytes(Path(source).stat().st_size, str(source))  # also 0 of a pipe and of /dev/zero
            with Path(source).open("rb") as file:
                return file.read(MAX_BYTES)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
            raise PerlclipError(f"cannot read image {source}: {getattr(error, 'strerror', None) or error}") from error
    if isinstance(source, Packed):
        return source.read()
    if isinstance(source, Held):
        return source.data if isinstance(source.data, bytes) else np.asarray(source.data).tobytes()
    return source if isinstance(source, bytes) else np.asarray(source).tobytes()


def file_size(source: ImageSource) -> int | None:
    """Bytes of an image's file, without reading it; None where nothing says."""
    if isinstance(source, str | Path):
        try:
            return Path(source).stat().st_size
        except (OSError, ValueError):
            return -1  # the size of no file
    return len(source) if isinstance(source, bytes) else source.size if isinstance(source, Packed) else None


def content_hash(source: ImageSource) -> bytes:
    """SHA-256 of the image's file or pixels."""
    return source.sha256 if isinstance(source, Held) else sha256(content_of(source)).digest()


class NamedBytes(bytes):
    """An image file's contents, and what it is called."""

    path: str

    def __new__(cls, content: bytes, path: str = "") -> "NamedBytes":
        made = super().__new__(cls, content)
        made.path = path
        return made

    def __str__(self) -> str:
        return self.path


_FORMAT_OF = {".avif": "AVIF", ".heic": "HEIF", ".heif": "HEIF"}


@cache
def _missing() -> frozenset[str]:
    """Formats that no decoder is there for; Pillow learns HEIC here."""
    missing = set() if "avif" in features.modules and features.check("avif") else {"AVIF"}  # Pillow 11.3 knows of it
    try:
        from pillow_heif import register_heif_opener

        register_heif_opener()
    except ImportError:
        missing.add("HEIF")
    return frozenset(missing)


def _open(source: str | Path | bytes | Packed) -> Image.Image:
    name = image_name(source)
    formats = [each for each in FORMATS if each not in _missing()]
    if isinstance(source, Packed):
        source = source.read()
    try:
        _check_bytes(len(source) if isinstance(source, bytes) else Path(source).stat().st_size, name)
        image = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=formats)  # header only
    except UnidentifiedImageError as error:
        hint = f"; {HEIC}" if "HEIF" in _missing() and _is_heic(source) else ""
        raise PerlclipError(f"{name} is not an image in one of the formats {', '.join(formats)}{hint}") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit is a little above ours
        raise _too_large(name) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        raise PerlclipError(f"cannot read image {name}: {getattr(error, 'strerror', None) or error}") from error
    except PerlclipError:
        raise
    except Exception as error:  # as when decoding
        raise PerlclipError(f"image {name} is damaged: {error}") from error
    try:
        _check_size(image.width, image.height, name)
    except PerlclipError:
        image.close()
        raise
    return image


def _is_heic(source: str | Path | bytes) -> bool:
    if isinstance(source, bytes):
        start = source[:12]
    else:
        with Path(source).open("rb") as file:
            start = file.read(12)
    return start[4:8] == b"ftyp" and start[8:12] in (b"heic", b"heix", b"hevc", b"mif1", b"msf1")


def _check_bytes(size: int, name: str) -> None:
    if size == 0:
        raise PerlclipError(f"image {name} is empty (0 bytes)")
    if size > MAX_BYTES:
        raise PerlclipError(f"image {name} has {size / 2**20:.0f} MiB; at most {MAX_BYTES // 2**20} are read")


def _check_size(width: int, height: int, name: str) -> None:
    if not width or not height:
        raise PerlclipError(f"image {name} is empty ({width}x{height} pixels)")
    if width * height > MAX_PIXELS:
        raise _too_large(name)
    if max(width, height) > MAX_ASPECT * min(width, height):  # its shorter side is scaled up to the tower's size
        raise PerlclipError(f"image {name} is {width}x{height}, longer than {MAX_ASPECT} times its other side")


def _too_large(name: str) -> PerlclipError:
    return PerlclipError(f"image {name} has more than the {MAX_PIXELS / 1e6:.0f} million pixels that are decoded")


@cache
def _turbo() -> Any:
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    return decode_jpeg


def _quickly(image: Image.Image) -> Image.Image | None:
    """A JPEG by a quicker binding of the same library, if it is there (extra `turbo`): the same pixels."""
    decode, colours = _turbo(), {"RGB": "RGB", "L": "GRAY"}.get(image.mode)
    file = getattr(image, "fp", None)
    if decode is None or image.format != "JPEG" or colours is None or file is None:
        return None
    file.seek(0)
    try:
        pixels = decode(file.read(MAX_BYTES), colours)
    except (ValueError, MemoryError):  # Pillow says what is wrong with it
        return None
    if pixels.shape[:2] != (image.height, image.width):
        return None
    made = Image.fromarray(pixels[:, :, 0] if colours == "GRAY" else pixels)
    made.info = dict(image.info)  # which way is up
    ImageOps.exif_transpose(made, in_place=True)
    return made if made.mode == "RGB" else made.convert("RGB")


def _upright_rgb(image: Image.Image, name: str) -> Image.Image:
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):  # `convert` would clip them to black or white
        return Image.fromarray(_eight_bits(image, name)).convert("RGB")
    if image.mode == "P" and isinstance(image.info.get("transparency"), bytes):
        image = image.convert("RGBA")  # the same colours, without a warning
    return image.convert("RGB")


def _eight_bits(image: Image.Image, name: str) -> np.ndarray:
    """Greys of more than eight bits, scaled as the module says."""
    x_HW = np.asarray(image).astype(np.float64)
    low, high = float(x_HW.min()), float(x_HW.max())
    deep = image.mode == "I" and image.format != "PNG"  # a PNG has no more than 16 bits, whatever Pillow makes of it
    if image.mode == "F":
        white, known = 1.0, low >= 0 and high <= 1  # not if there is a NaN
    else:
        # 32 bits with nothing above 255: as 16 bits it is black, as 8 bits not.
        white, known = 65535.0, low >= 0 and high <= 65535 and not (deep and 0 < high <= 255)
    if not known:
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise PerlclipError(
            f"image {name} has {kind} values from {low:g} to {high:g}, and nothing says which of them is white; "
            "save it with 8 or 16 bits, or as floats from 0 to 1"
        )
    return (x_HW * (255 / white)).astype(np.uint8)
