"""Zip and tar archives, read in place: nothing is unpacked to a disk, so no path in them can lead anywhere.

Members of a zip or of a plain tar are read one by one when they are looked at. A compressed tar can only be read from
its beginning: its images are held in memory, up to `MAX_UNPACKED` bytes.
"""

import bz2
import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perlclip.data.images import MAX_BYTES, ImageSource, NamedBytes, Packed
from perlclip.errors import PerlclipError, first_line

MAX_MEMBERS = 2_000_000
MAX_UNPACKED = 2**30
_COMPRESSED: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


@dataclass(frozen=True)
class Member(Packed):
    """A file in an archive: where its bytes stand, and how they are packed."""

    archive: Path
    name: str
    start: int
    packed: int  # bytes in the archive
    whole: int  # bytes of the file
    deflated: bool = False
    crc: int | None = None  # of a zip, whose `start` is that of a header before the bytes

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}"

    @property
    def size(self) -> int:
        return self.whole

    def read(self) -> bytes:
        """The file's bytes, never more than an image may have."""
        if self.whole > MAX_BYTES or self.packed > MAX_BYTES:
            raise PerlclipError(f"{self} has more than the {MAX_BYTES // 2**20} MiB that are read of an image")
        try:
            with self.archive.open("rb") as file:
                file.seek(self.start)
                if self.crc is not None:
                    *_, name, extra = struct.unpack("<4s22xHH", file.read(30))
                    file.seek(name + extra, 1)
                content = file.read(self.packed)
            if self.deflated:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, self.whole + 1)
        except (OSError, struct.error, zlib.error) as error:
            raise PerlclipError(f"cannot read {self}: {error}") from error
        if len(content) != self.whole or self.crc not in (None, zlib.crc32(content)):
            raise PerlclipError(f"{self} is damaged in its archive")
        return content


def is_archive(path: Path) -> bool:
    """Whether a file is a zip or a tar, by its first bytes."""
    start = first_bytes(path)
    return start[:4] in (b"PK\3\4", b"PK\5\6") or start[257:262] == b"ustar" or start.startswith(tuple(_COMPRESSED))


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ImageSource]]:
    """The files of an archive by their names; of a compressed tar only those `wanted` by name have contents."""
    start = first_bytes(path)
    find = _in_zip if start.startswith(b"PK") else _in_stream if start.startswith(tuple(_COMPRESSED)) else _in_tar
    try:
        for count, (name, source) in enumerate(find(path, wanted)):
            if count >= MAX_MEMBERS:
                raise PerlclipError(f"archive {path} has more than the {MAX_MEMBERS:,} files that are read")
            yield name.replace("\\", "/"), source
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise PerlclipError(
            f"cannot read archive {path}: {first_line(error)}; unpack it and name the folder"
        ) from error


def first_bytes(path: Path) -> bytes:
    """By which a file is known."""
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise PerlclipError(f"cannot read {path}: {error.strerror or error}") from error


def _in_zip(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ImageSource]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                how = "encrypted" if info.flag_bits & 1 else "packed in an unusual way"
                raise PerlclipError(f"{info.filename!r} in {path} is {how}; unpack the archive and name the folder")
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            sizes = info.compress_size, info.file_size
            yield info.filename, Member(path, info.filename, info.header_offset, *sizes, deflated, info.CRC)


def _in_tar(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ImageSource]]:
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isreg() and not member.issparse():  # no links: they could lead out of it
                yield member.name, Member(path, member.name, member.offset_data, member.size, member.size)


def _in_stream(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, ImageSource]]:
    unpack = next(opener for magic, opener in _COMPRESSED.items() if first_bytes(path).startswith(magic))
    with unpack(path) as stream, tarfile.open(fileobj=_Bounded(stream, path, MAX_UNPACKED), mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            if member.isreg() and not member.issparse():
                found = archive.extractfile(member) if wanted(member.name) else None
                yield member.name, NamedBytes(found.read() if found else b"", f"{path}/{member.name}")
            archive.members = []  # it would remember all of them


@dataclass
class _Bounded:
    """A stream that ends in an error before it becomes larger than memory."""

    stream: IO[bytes]
    path: Path
    left: int

    def read(self, size: int) -> bytes:
        content = self.stream.read(min(size, self.left + 1))
        self.left -= len(content)
        if self.left < 0:
            raise PerlclipError(
                f"{self.path} has over {MAX_UNPACKED // 2**20:,} MiB in it; unpack it and name the folder, or make "
                "a zip or a plain tar of it, which are read in place"
            )
        return content
