"""Rows as a file, by its ending: CSV, JSON lines or parquet.

They are written to `NAME.part`, which takes its name when the last row is in it. So what has the name is whole, and
what an interrupt or an error leaves is not lost.
"""

import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from perlclip.errors import PerlclipError
from perlclip.files import require_writable

Row = Mapping[str, Any]
Columns = Mapping[str, type]  # str, int, float or bool
WriteRow = Callable[[Row], None]
GROUP = 5000  # rows that parquet takes at once


def check_row_file(path: str | Path) -> Path:
    """Fail before the work is done, not after it, where rows cannot be written."""
    path = Path(path)
    if path.suffix.lower() not in FORMS:
        raise PerlclipError(f"cannot tell what to write to {path}: its name must end in {', '.join(FORMS)}")
    if path.suffix.lower() == ".parquet":
        pyarrow_modules()
    if path.is_dir():
        raise PerlclipError(f"cannot write to {path}: it is a folder")
    require_writable(path.parent)
    return path


@contextmanager
def row_file(path: str | Path, columns: Columns) -> Iterator[WriteRow]:
    """A function that writes a row with these columns; JSON lines take whatever a row has."""
    path = check_row_file(path)
    part, written = _part(path), 0
    try:
        with FORMS[path.suffix.lower()](part, columns) as write:

            def count(row: Row) -> None:
                nonlocal written
                write(row)
                written += 1

            yield count
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (PerlclipError, KeyboardInterrupt, OSError) as error:
        sentence = str(error) or "interrupted"
        if isinstance(error, OSError):
            sentence = f"cannot write to {part}: {error.strerror or error}"
        if written:
            sentence += f"; the {written:,} rows so far are in {part}"
        else:
            part.unlink(missing_ok=True)
        raise (KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else PerlclipError)(sentence) from error


@contextmanager
def rows_to(stream: TextIO, form: str, columns: Columns) -> Iterator[WriteRow]:
    """The same to a stream: `csv` or `json`, a row at a time."""
    yield _csv_writer(stream, columns) if form == "csv" else _json_writer(stream)


def _csv_writer(stream: TextIO, columns: Columns) -> WriteRow:
    writer = csv.DictWriter(stream, list(columns), lineterminator="\n")
    writer.writeheader()
    return writer.writerow


def _json_writer(stream: TextIO) -> WriteRow:
    return lambda row: print(json.dumps(row, ensure_ascii=False), file=stream)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


@contextmanager
def _csv(path: Path, columns: Columns) -> Iterator[WriteRow]:
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        yield _csv_writer(file, columns)


@contextmanager
def _json_lines(path: Path, columns: Columns) -> Iterator[WriteRow]:
    with path.open("w", encoding="utf-8", errors="surrogateescape") as file:
        yield _json_writer(file)


@contextmanager
def _parquet(path: Path, columns: Columns) -> Iterator[WriteRow]:
    arrow, parquet = pyarrow_modules()
    types = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(name, types[kind]) for name, kind in columns.items()])
    rows: list[Row] = []

    def flush() -> None:
        if rows:
            # A file's name may have bytes that are no text.
            texts = [{k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in row.items()}
                     for row in rows]  # fmt: skip
            file.write_table(arrow.Table.from_pylist(texts, schema))
            rows.clear()

    def write(row: Row) -> None:
        rows.append(row)
        if len(rows) >= GROUP:
            flush()

    with parquet.ParquetWriter(path, schema) as file:
        try:
            yield write
        finally:
            flush()  # also what there is when it ends before its time: without an end such a file cannot be read


def pyarrow_modules() -> tuple[Any, Any]:
    """`pyarrow` and its parquet, or a sentence."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise PerlclipError("parquet files need pyarrow: pip install 'perlclip[parquet]'") from error


FORMS = {".csv": _csv, ".jsonl": _json_lines, ".ndjson": _json_lines, ".parquet": _parquet}
