"""What a job reads: folders, globs, lists, archives and tables of images, here or at an address that `fsspec` knows.

Before a job begins they are cut into pieces, and the list of images is written down, so that a job that goes on has the
same images in the same places whatever has happened to the folders meanwhile. Nothing is held: a list is walked
through, an archive and a table are read as they come.

    photos/  "photos/*.jpg"  -      images, a path on each line of stdin
    list.csv  list.txt              a table with a column `path` (or JSON lines), or a path on each line
    00000.tar  a.tar.gz  a.zip      the images in them; webdataset's samples have the name without its ending as key
    part.parquet                    a column of image files, or of paths
    shards/                         a folder with tars or tables and no images in it is those
    {00000..00099}.tar              as webdataset writes it
    s3://bucket/…  hf://…  https://…

A key says which image a row is about: the path as it was given, the sample's name in an archive, in a table the column
`key` or `id`, else the path, else the file and the row.
"""

import csv
import glob
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from perlclip.data.archives import first_bytes, members
from perlclip.data.images import (
    MAX_BYTES,
    ImageSource,
    NamedBytes,
    Packed,
    Unreadable,
    files_under,
    is_hidden,
    is_image_name,
)
from perlclip.data.manifests import PARQUET, columns_of, holds_images
from perlclip.errors import PerlclipError, first_line

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")
TABLES, LISTS, LINES = (".parquet",), (".csv", ".tsv", ".jsonl", ".ndjson", ".txt"), (".txt",)
KEYS = ("key", "id", "__key__", "image_id")
MAX_LINE = 2**20  # characters of a line in a list
MAX_RANGE = 1_000_000
ROWS = 64  # of a table, read at once

Found = tuple[str, ImageSource | Unreadable]  # a key, and the image


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of the images: what one process reads from beginning to end."""

    kind: str  # "list", "archive" or "table"
    where: str  # the file or address; of a list what its paths are relative to
    start: int = 0  # of a list the byte where it begins, of a table the first row group
    stop: int = 0  # of a table the row group behind the last
    count: int | None = None  # images, if that is known before they are read
    size: int = 0  # bytes, by which the others' number is estimated


@dataclass(frozen=True)
class Remote(Packed):
    """An image at an address."""

    address: str

    def __str__(self) -> str:
        return self.address

    def read(self) -> bytes:
        """Its bytes, never more than an image may have."""
        try:
            with opened(self.address) as file:
                content: bytes = file.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise PerlclipError(f"cannot read image {self}: {first_line(error)}") from error
        if len(content) > MAX_BYTES:
            raise PerlclipError(f"image {self} has more than the {MAX_BYTES // 2**20} MiB that are read")
        return content


def make_plan(sources: Iterable[str], listed: Path, shard_size: int, stdin: IO[bytes] | None = None) -> list[Piece]:
    """The pieces of all sources, in order; paths of single images are written to the file `listed`, a line each."""
    pieces: list[Piece] = []
    with listed.open("wb") as file:
        plan = _Plan(pieces, file, shard_size)
        for source in sources:
            if source == "-":
                plan.images(_lines(stdin or io.BytesIO(), "stdin"), str(Path.cwd()))
            else:
                for name in _expanded(source):
                    plan.add(name)
        plan.flush()
        file.flush()
        os.fsync(file.fileno())
    if not pieces:
        raise PerlclipError("there are no images to label")
    return pieces


def read_piece(piece: Piece, listed: Path) -> Iterator[Found]:
    """Every image of a piece with its key, always in the same order; where it is damaged stands one unreadable image.

    A file that is gone is an error: a disk that is not there today may be tomorrow. So is an archive that has changed.
    """
    if piece.kind != "list" and not is_address(piece.where) and Path(piece.where).stat().st_size != piece.size:
        raise PerlclipError(f"{piece.where} has changed since the job began; give another folder to begin again")
    empty = True
    try:
        for found in READERS[piece.kind](piece, listed):
            yield found
            empty = False
        if empty:
            raise PerlclipError(f"{piece.where} holds no images")
    except PerlclipError as error:
        yield piece.where, Unreadable(piece.where, str(error))


def opened(where: str) -> Any:
    """A file or address, open to be read."""
    if not is_address(where):
        return Path(where).open("rb")
    files, path = _filesystem(where)
    return files.open(path, "rb")


def is_address(text: str) -> bool:
    """Whether it is for `fsspec`."""
    return re.match(r"[a-z][a-z0-9+]*(::|://)", text) is not None


# ---- planning ----


@dataclass
class _Plan:
    """Pieces as they are found; paths gather until there are enough for a shard."""

    pieces: list[Piece]
    file: IO[bytes]
    shard_size: int
    base: str = ""
    start: int = 0
    waiting: int = 0

    def add(self, name: str) -> None:
        """A file, a folder or an address, by its ending."""
        local = Path(name)
        if not is_address(name) and local.is_dir():
            self.folder(local)
        elif name.lower().endswith(LISTS):
            base = name.rpartition("/")[0] if is_address(name) else str(local.absolute().parent)
            with opened(name) as file:
                self.images(_lines(file, name) if name.lower().endswith(LINES) else _rows(file, name), base)
        elif name.lower().endswith((*ARCHIVES, *TABLES)):
            self.flush()
            absolute = name if is_address(name) else str(local.absolute())
            self.pieces += (
                self.tables(absolute)
                if name.lower().endswith(TABLES)
                else [Piece(kind="archive", where=absolute, size=_size(absolute))]
            )
        else:
            self.images([name], str(Path.cwd()))

    def folder(self, folder: Path) -> None:
        """Tars, or else tables, that lie in it; or else the images in it and below."""
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and not is_hidden(entry.name))
        for endings in (ARCHIVES, TABLES):
            found = [str(folder / name) for name in names if name.lower().endswith(endings)]
            if found and not any(map(is_image_name, names)):
                for name in found:
                    self.add(name)
                return
        self.images((str(path) for path in files_under(folder) if is_image_name(path.name)), str(Path.cwd()))

    def images(self, paths: Iterable[str], base: str) -> None:
        """Single images, as they are called."""
        if base != self.base:
            self.flush()
            self.base = base
        for path in paths:
            self.file.write(json.dumps(path).encode() + b"\n")
            self.waiting += 1
            if self.waiting == self.shard_size:
                self.flush()

    def flush(self) -> None:
        """What has gathered is a piece."""
        if self.waiting:
            self.pieces.append(Piece(kind="list", where=self.base, start=self.start, count=self.waiting))
        self.start, self.waiting = self.file.tell(), 0

    def tables(self, where: str) -> Iterator[Piece]:
        """Of a table as many row groups together as a shard has rows; a damaged one fails before anything is done."""
        size = _size(where)
        with _table(where) as table:
            _columns(table, where)
            sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
        start, rows = 0, 0
        for i, more in enumerate(sizes):
            if rows and rows + more > self.shard_size:
                yield Piece(kind="table", where=where, start=start, stop=i, count=rows, size=size)
                start, rows = i, 0
            rows += more
        if rows:
            yield Piece(kind="table", where=where, start=start, stop=len(sizes), count=rows, size=size)


def _size(where: str) -> int:
    if not is_address(where):
        return Path(where).stat().st_size
    files, path = _filesystem(where)
    return int(files.size(path) or 0)


def _expanded(source: str) -> list[str]:
    """Webdataset's braces and globs opened up; what is there under its name is that."""
    found = []
    for name in _braces(source):
        if is_address(name):
            files, path = _filesystem(name)
            matches = [files.unstrip_protocol(each) for each in sorted(files.glob(path))] if _is_glob(path) else [name]
        elif Path(name).exists() or not glob.has_magic(name):
            matches = [name]
            if not Path(name).exists():
                raise PerlclipError(f"no such image: {name}")
        else:
            matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise PerlclipError(f"no file matches {name!r}")
        found += matches
    return found


def _is_glob(path: str) -> bool:
    return "*" in path or "[" in path  # a ? in an address asks for something


def _braces(text: str) -> list[str]:
    """`{000..012}` as thirteen names."""
    match = re.search(r"\{(\d{1,18})\.\.(\d{1,18})\}", text)
    if match is None or Path(text).exists():
        return [text]
    first, last = int(match[1]), int(match[2])
    if not 0 <= last - first < MAX_RANGE:
        raise PerlclipError(f"{match[0]} in {text!r} is not a range of 1 to {MAX_RANGE:,} numbers")
    names = [f"{text[: match.start()]}{n:0{len(match[1])}}{text[match.end() :]}" for n in range(first, last + 1)]
    return [name for each in names for name in _braces(each)]


def _filesystem(address: str) -> tuple[Any, str]:
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(address)
    except ImportError as error:  # says what to install
        raise PerlclipError(f"cannot read {address}: {first_line(error)}") from error
    except (ValueError, OSError) as error:
        raise PerlclipError(f"cannot read {address}: {first_line(error)}") from error
    return files, path


# ---- lists ----


def _lines(file: IO[bytes], where: str) -> Iterator[str]:
    """Paths as `find` prints them, with `-print0` as well."""
    start = file.read(MAX_LINE)
    mark = b"\0" if b"\0" in start else b"\n"
    rest = start
    while rest:
        *lines, rest = rest.split(mark)
        yield from (os.fsdecode(line.removesuffix(b"\r")) for line in lines if line.strip())
        if len(rest) > MAX_LINE:
            raise PerlclipError(f"{where} has a line of more than {MAX_LINE:,} bytes; it is no list of paths")
        more = file.read(MAX_LINE)
        if not more:
            break
        rest += more
    if rest.strip():
        yield os.fsdecode(rest.removesuffix(b"\r"))


def _rows(file: IO[bytes], where: str) -> Iterator[str]:
    """The column of paths in a CSV file or in JSON lines, row by row; labels are not needed and not looked at."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    try:
        start = text.readline(MAX_LINE)
        lines = _bounded(start, text, where)
        if start.lstrip().startswith("{"):
            records: Iterator[Any] = (json.loads(line) for line in lines if line.strip())
        else:
            mark = max(",;\t", key=lambda sign: (len(columns_of(start.strip().split(sign))), sign == ","))
            records = csv.DictReader(lines, delimiter=mark)
        for number, record in enumerate(records, start=2):
            column = columns_of(record).get("path") if isinstance(record, dict) else None
            path = record[column] if column is not None else None
            if not isinstance(path, str) or not path.strip():
                raise PerlclipError(f"{where}, row {number}: there must be a column 'path', and a path in every row")
            yield path.strip()
    except (ValueError, RecursionError, csv.Error) as error:
        raise PerlclipError(f"cannot read the list {where}: {first_line(error)}") from error


def _bounded(start: str, text: IO[str], where: str) -> Iterator[str]:
    line = start
    while line:
        if len(line) >= MAX_LINE:
            raise PerlclipError(f"{where} has a line of more than {MAX_LINE:,} letters; it is no list of paths")
        yield line
        line = text.readline(MAX_LINE)


def _read_list(piece: Piece, listed: Path) -> Iterator[Found]:
    with listed.open("rb") as file:
        file.seek(piece.start)
        for _ in range(piece.count or 0):
            key = json.loads(file.readline())
            yield key, source_of(key, piece.where)


def source_of(path: str, base: str) -> ImageSource:
    """The image that a path in a list names, which is relative to a folder or to an address."""
    if is_address(path):
        return Remote(path)
    if is_address(base) and not Path(path).is_absolute():
        return Remote(f"{base}/{path}")
    return Path(base, path)


# ---- archives ----


def _read_archive(piece: Piece, listed: Path) -> Iterator[Found]:
    """Images of a plain tar or a zip on a disk are read where they are wanted, others here, one after the other."""
    where, inside = piece.where, _streamed
    if not is_address(where):
        start = first_bytes(Path(where))
        if start.startswith(b"PK") or start[257:262] == b"ustar":
            inside = _indexed
    for name, source in inside(where):
        if not is_hidden(name.rpartition("/")[2]) and is_image_name(name):
            yield name.rpartition(".")[0], source


def _indexed(where: str) -> Iterator[tuple[str, ImageSource | Unreadable]]:
    yield from members(Path(where), is_image_name)


def _streamed(where: str) -> Iterator[tuple[str, ImageSource | Unreadable]]:
    try:
        with opened(where) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                if member.isreg() and not member.issparse() and is_image_name(member.name):
                    yield member.name, _content(archive, member, f"{where}/{member.name}")
                archive.members = []  # type: ignore[attr-defined]  # it would remember all of them
    except (tarfile.TarError, EOFError) as error:
        raise PerlclipError(f"cannot read archive {where}: {first_line(error)}") from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> ImageSource | Unreadable:
    if member.size > MAX_BYTES:
        return Unreadable(name, f"image {name} has {member.size / 2**20:.0f} MiB; {MAX_BYTES // 2**20} are read")
    file = archive.extractfile(member)
    return NamedBytes(file.read() if file else b"", name)


# ---- tables ----


def _table(where: str) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise PerlclipError(f"{where}: {PARQUET}") from error
    try:
        return parquet.ParquetFile(opened(where))
    except (ArrowException, OSError) as error:
        raise PerlclipError(f"cannot read {where} as parquet: {first_line(error)}") from error


def _columns(table: Any, where: str) -> tuple[str, str | None]:
    """Which column has the images, or else their paths, and which the keys."""
    schema = table.schema_arrow
    images = [name for name in schema.names if holds_images(schema.field(name).type)]
    path = columns_of(schema.names).get("path")
    if len(images) > 1 or not (images or path):
        raise PerlclipError(f"{where} has {'more than one' if images else 'no'} column of image files or paths")
    key = next((name for name in KEYS if name in schema.names), None if images else path)
    return images[0] if images else str(path), key


def _read_table(piece: Piece, listed: Path) -> Iterator[Found]:
    from pyarrow import ArrowException

    where, base = piece.where, piece.where.replace(os.sep, "/").rpartition("/")[0]
    with _table(where) as table:
        image, key = _columns(table, where)
        row = sum(table.metadata.row_group(i).num_rows for i in range(piece.start))
        names = [image] if key in (None, image) else [image, key]
        groups = range(piece.start, piece.stop)
        try:
            for batch in table.iter_batches(batch_size=ROWS, row_groups=groups, columns=names):
                for cell, own in zip(batch[image].to_pylist(), batch[key or image].to_pylist(), strict=True):
                    said = f"{where}:{row}" if key is None or own is None else str(own)
                    yield said, _cell(cell, f"{where}:{row}", base)
                    row += 1
        except (ArrowException, OSError) as error:
            raise PerlclipError(f"cannot read {where} from row {row} on: {first_line(error)}") from error


def _cell(cell: Any, name: str, base: str) -> ImageSource | Unreadable:
    content, path = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
    if isinstance(content, bytes):
        return NamedBytes(content, name)
    path = content if isinstance(content, str) else path
    return source_of(path, base) if isinstance(path, str) and path else Unreadable(name, f"{name} has no image")


READERS: dict[str, Callable[[Piece, Path], Iterator[Found]]] = {
    "list": _read_list,
    "archive": _read_archive,
    "table": _read_table,
}
