"""Lists of labelled images: CSV and JSON lines, parquet files with image bytes, and Hugging Face's `datasets`."""

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perlclip.data.images import ImageSource, NamedBytes, Packed, as_source
from perlclip.data.splits import split_named
from perlclip.errors import PerlclipError, first_line

MAX_TABLE = 2**28  # bytes of a text list
MAX_PARQUET = 2**31  # bytes of all columns, which are held in memory
COLUMNS = {
    "path": ("path", "file_name", "filename", "image"),
    "label": ("label", "labels", "class", "class_name"),
    "split": ("split",),
}  # and what they may be called
PARQUET = "to read parquet files, pip install 'perlclip[parquet]'"
DATASETS = "to read a saved data set of Hugging Face, pip install 'perlclip[datasets]'"


@dataclass(frozen=True)
class Listed:
    """An image of a list, its label as it is written, and its split if the list says one."""

    image: ImageSource
    label: str
    split: str = ""


def text_rows(content: bytes, where: str) -> list[Listed]:
    """The rows of a CSV file (with commas, semicolons or tabs) or of JSON lines, checked one by one.

    Columns are found whatever the case of their names; `image` of a row is the path as it is written.
    """
    if len(content) > MAX_TABLE:
        raise PerlclipError(f"{where} has more than the {MAX_TABLE // 2**20} MiB that are read of a list")
    text = _decoded(content, where)
    found = _json_lines(text, where) if text.lstrip().startswith("{") else _csv_lines(text, where)
    rows = []
    for line, cells in found:
        path, label = cells.get("path", ""), cells.get("label", "")
        if not path or not label:
            raise PerlclipError(f"{where}, line {line}: path and label must both be given")
        split = split_named(cells["split"]) if "split" in cells else ""
        if split is None:
            raise PerlclipError(f"{where}, line {line}: split {cells['split']!r} is not train, val or test")
        rows.append(Listed(path, label, split))
    return rows


def _decoded(content: bytes, where: str) -> str:
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # "Unicode text" of spreadsheets
    try:
        text = content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise PerlclipError(
            f"{where} is neither a list in UTF-8 (save it as 'CSV UTF-8'), nor JSON lines, parquet, zip or tar"
        ) from error
    if "\0" in text:
        raise PerlclipError(f"{where} is not a text: it has zero bytes in it; save it as 'CSV UTF-8'")
    return text


def columns_of(names: Iterable[str]) -> dict[str, str]:
    """Which of a table's columns has the path, the label and the split, as far as there are such."""
    plain = {name.strip().casefold(): name for name in reversed(list(names))}
    found = {key: next((plain[word] for word in words if word in plain), None) for key, words in COLUMNS.items()}
    return {key: name for key, name in found.items() if name is not None}


def _csv_lines(text: str, where: str) -> Iterator[tuple[int, dict[str, str]]]:
    header = text.partition("\n")[0]

    def found_by(sign: str) -> tuple[int, bool]:
        return len(columns_of(next(csv.reader([header], delimiter=sign), []))), sign == ","

    try:
        mark = max(",;\t", key=found_by)
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=mark)
        columns = columns_of(reader.fieldnames or ())
        lines = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise PerlclipError(f"cannot read {where} as CSV: {error}") from error
    if not lines or not {"path", "label"} <= columns.keys():
        said = ",".join(name or "" for name in reader.fieldnames or ())
        has = f"; its header is {said[:100]!r}" if lines else ""
        raise PerlclipError(f"{where} needs a header 'path,label' (and optionally 'split') and at least one row{has}")
    for line, row in lines:
        yield line, {key: (row.get(name) or "").strip() for key, name in columns.items()}


def _json_lines(text: str, where: str) -> Iterator[tuple[int, dict[str, str]]]:
    for line, content in enumerate(text.splitlines(), start=1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise PerlclipError(f"{where}, line {line} is not JSON: {first_line(error)}") from error
        columns = columns_of(row) if isinstance(row, dict) else {}
        if not {"path", "label"} <= columns.keys():
            raise PerlclipError(f"{where}, line {line} needs the keys 'path' (or 'file_name') and 'label'")
        cells = {key: row[name] for key, name in columns.items()}
        yield line, {key: "" if cell is None else str(cell).strip() for key, cell in cells.items()}


# ---- tables that hold the images themselves ----


def parquet_rows(path: Path, split: str = "") -> list[Listed]:
    """The rows of a parquet file with a column of image files and one of labels."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise PerlclipError(f"{path}: {PARQUET}") from error
    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
            if sum(groups) > MAX_PARQUET:
                raise PerlclipError(
                    f"{path} holds more than {MAX_PARQUET // 2**30} GiB; load it with `datasets`, which reads row by "
                    "row, and give that data set to load_images"
                )
            schema = file.schema_arrow
            about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            names = about.get("info", {}).get("features", {}) if isinstance(about, dict) else {}
            label = _label_column(schema.names, names, str(path))
            images = [name for name in schema.names if holds_images(schema.field(name).type)]
            image = _only(images, "column with image files (bytes, or bytes and path)", str(path))
            table = file.read(columns=[image, label]).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise PerlclipError(f"cannot read {path} as parquet: {first_line(error)}") from error
    texts = names[label].get("names") if isinstance(names.get(label), dict) else None
    return [
        Listed(_image_cell(row[image], f"{path}, row {i}"), _label_text(row[label], texts, f"{path}, row {i}"), split)
        for i, row in enumerate(table)
    ]


def holds_images(kind: Any) -> bool:
    """Whether a column of this type has image files in it: bytes, or a struct with bytes."""
    from pyarrow import types

    if types.is_struct(kind):
        return "bytes" in [kind.field(i).name for i in range(kind.num_fields)]
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _image_cell(cell: Any, where: str) -> ImageSource:
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise PerlclipError(f"{where} has no image bytes")
    return NamedBytes(content, where)


def _label_column(names: Iterable[str], features: Mapping[str, Any], where: str) -> str:
    """The column with the labels: one that is called so, or the only one of class labels."""
    found = columns_of(names).get("label")
    if found is not None:
        return found
    kinds = {
        name: kind.get("_type") if isinstance(kind, dict) else type(kind).__name__ for name, kind in features.items()
    }
    return _only([name for name, kind in kinds.items() if kind == "ClassLabel"], "column 'label'", where)


def _only(found: list[str], what: str, where: str) -> str:
    if len(found) != 1:
        raise PerlclipError(f"{where} has {'no' if not found else 'more than one'} {what}")
    return found[0]


def _label_text(value: Any, names: Any, where: str) -> str:
    if isinstance(value, int) and isinstance(names, list) and not isinstance(value, bool):
        value = names[value] if 0 <= value < len(names) else None  # -1 is the mark of an unlabelled row
    text = "" if value is None else str(value).strip()
    if not text:
        raise PerlclipError(f"{where} has no label")
    return text


@dataclass(frozen=True)
class _DatasetRow(Packed):
    """An image of a `datasets` data set, which reads it from its own files."""

    rows: Any
    column: str
    index: int

    def __str__(self) -> str:
        return f"row {self.index}"

    def read(self) -> bytes:
        cell = self.rows[self.index][self.column]
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        try:
            found = as_source(Path(cell["path"]).open("rb"))  # noqa: SIM115 (read at once)
        except (OSError, TypeError) as error:
            raise PerlclipError(f"cannot read the image of {self}: {error}") from error
        assert isinstance(found, bytes)
        return found


def is_dataset(given: object) -> bool:
    """Whether something is a data set of `datasets`, or a dictionary of its splits; the library is not imported."""
    return type(given).__module__.partition(".")[0] == "datasets"


def saved_dataset(folder: Path) -> Any | None:
    """The data set that `save_to_disk` wrote into a folder; none if there is none."""
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    try:
        import datasets
    except ImportError as error:
        raise PerlclipError(f"{folder}: {DATASETS}") from error
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever another library finds wrong with its own files
        raise PerlclipError(f"cannot read {folder} as a data set of `datasets`: {first_line(error)}") from error


def dataset_rows(given: Any) -> list[Listed]:
    """The rows of a `datasets` data set with an image column and a label column, or of a dictionary of splits."""
    if isinstance(given, Mapping):
        rows = []
        for name, part in given.items():
            split = split_named(name)
            if split is None:
                raise PerlclipError(f"split {name!r} of the data set is not train, val or test")
            rows += [Listed(row.image, row.label, split) for row in dataset_rows(part)]
        return rows
    import datasets

    features = getattr(given, "features", None)
    if not isinstance(given, datasets.Dataset) or features is None:
        raise PerlclipError(f"of `datasets`, a Dataset or DatasetDict can be read, not a {type(given).__name__}")
    where = "the data set"
    image = _only([name for name, kind in features.items() if isinstance(kind, datasets.Image)], "image column", where)
    label = _label_column(features, features, where)
    names = getattr(features[label], "names", None)
    undecoded = given.cast_column(image, datasets.Image(decode=False))
    return [
        Listed(_DatasetRow(undecoded, image, i), _label_text(value, names, f"row {i}"))
        for i, value in enumerate(given[label])
    ]
