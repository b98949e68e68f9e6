"""Answers in files of a job's folder, each whole or not there.

    predictions/predictions_00003.parquet     key, label, probability, top_labels, top_probabilities, steps, error
    img_emb/img_emb_00003.npy                 the frozen CLIP's embeddings, float16, of the images that could be read
    metadata/metadata_00003.parquet           a row for each of them: image_path, label, probability

The number is that of the piece that was read; if it has more images than a shard, there are 00003_001 and so on. The
predictions get their name last, so that what has none is made again, and the last of a piece says that it is the last.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from perlclip.data.images import Unreadable
from perlclip.errors import PerlclipError, first_line
from perlclip.files import write_files
from perlclip.inference.judging import Prediction
from perlclip.inference.row_files import pyarrow_modules

LAST, ERRORS = b"perlclip.last", b"perlclip.errors"  # of a shard: nothing of its piece comes behind it; rows with one


@dataclass(frozen=True)
class Shards:
    """The folder, how many digits a number has, and how many rows a shard."""

    folder: Path
    digits: int
    size: int
    columns: tuple[str, ...] = ()  # beside those that are always there: rejected, labels
    behind: "Behind" = field(default_factory=lambda: Behind())

    def predictions(self, piece: int, part: int) -> Path:
        """Where the answers are."""
        return self._path("predictions", piece, part, ".parquet")

    def beside(self, piece: int, part: int) -> tuple[Path, Path]:
        """The embeddings, and what they are of."""
        return self._path("img_emb", piece, part, ".npy"), self._path("metadata", piece, part, ".parquet")

    def _path(self, name: str, piece: int, part: int, ending: str) -> Path:
        number = f"{piece:0{self.digits}}" + (f"_{part:03}" if part else "")
        return self.folder / name / f"{name}_{number}{ending}"

    def done(self, piece: int) -> "Done":
        """What there is of a piece."""
        _, parquet = pyarrow_modules()
        found = Done()
        while not found.complete and (path := self.predictions(piece, found.parts)).exists():
            try:
                about = parquet.read_metadata(path)
            except Exception as error:  # a disk's fault: nothing of ours has half a name
                raise PerlclipError(
                    f"{path} is damaged: {first_line(error)}; remove it, and it is made again"
                ) from error
            found.parts += 1
            found.images += about.num_rows
            found.errors += int(about.metadata[ERRORS])
            found.complete = about.metadata[LAST] == b"1"
        return found

    def writer(self, piece: int, done: "Done", width: int = 0) -> "Writer":
        """For what is missing of a piece, with embeddings if they have a width."""
        return Writer(self, piece, done.parts, width)


class Behind:
    """A thread that writes a shard while answers to the next images come; what fails there is raised here."""

    def __init__(self) -> None:
        self._thread, self._last = ThreadPoolExecutor(1), Future[None]()
        self._last.set_result(None)

    def write(self, work: Callable[[], None]) -> None:
        """Begin, when the last one is done: memory holds no more than two. Behind a failure nothing is written."""
        self.wait()
        self._last = self._thread.submit(work)

    def wait(self) -> None:
        """Until all is written."""
        self._last.result()


@dataclass
class Done:
    """How much of a piece is written."""

    parts: int = 0
    images: int = 0
    errors: int = 0
    complete: bool = False


@dataclass
class _Open:
    """A shard that is not written yet."""

    part: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    views: list[np.ndarray] = field(default_factory=list)

    @property
    def about(self) -> dict[bytes, bytes]:
        errors = sum(row["error"] is not None for row in self.rows)
        return {LAST: str(int(self.rows[-1]["last"])).encode(), ERRORS: str(errors).encode()}


class Writer:
    """Rows of one piece; a shard is written when it is full and more rows come, or at the end.

    What is open is one object, so that an interrupt at any moment finds it before or after a shard.
    """

    def __init__(self, shards: Shards, piece: int, part: int, width: int) -> None:
        self.shards, self.piece, self.width = shards, piece, width  # the width of embeddings; 0 without them
        self.open = _Open(part)

    def add(self, key: str, answer: Prediction | Unreadable, v_E: np.ndarray | None, *, last: bool) -> None:
        """A row, and the image's embedding if there is one; behind the last of a piece nothing comes."""
        if len(self.open.rows) == self.shards.size:
            self.flush()
        if v_E is not None:
            self.open.views.append(v_E)
        self.open.rows.append({**_row(key, answer, self.shards.columns), "last": last})
        if last:
            self.flush()

    def flush(self) -> None:
        """Have written what there is; more rows of the piece may follow in another shard."""
        if self.open.rows:
            self.shards.behind.write(partial(self._write, self.open))
            self.open = _Open(self.open.part + 1)  # an interrupt before this has the same shard written again

    def _write(self, shard: _Open) -> None:
        files = dict[Path, bytes]()
        if self.width:
            vectors, about = self.shards.beside(self.piece, shard.part)
            read = [row for row in shard.rows if row["error"] is None]
            views = shard.views[: len(read)]  # an interrupt may have come between a view and its row
            buffer = io.BytesIO()
            np.save(buffer, np.stack(views) if views else np.zeros((0, self.width), np.float16), allow_pickle=False)
            files[vectors] = buffer.getvalue()
            files[about] = _parquet([_about(row) for row in read], _schema(METADATA), {})
        content = _parquet(shard.rows, _schema((*COLUMNS, *self.shards.columns, "error")), shard.about)
        write_files({**files, self.shards.predictions(self.piece, shard.part): content})


COLUMNS = ("key", "label", "probability", "top_labels", "top_probabilities", "steps")
METADATA = ("image_path", "label", "probability")


def answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Every row of a job's folder, in order."""
    _, parquet = pyarrow_modules()
    for path in sorted((folder / "predictions").glob("*.parquet")):
        yield from parquet.read_table(path).to_pylist()


def _row(key: str, answer: Prediction | Unreadable, more: Sequence[str]) -> dict[str, Any]:
    key = as_text(key)
    if isinstance(answer, Unreadable):
        empty = dict.fromkeys((*COLUMNS, *more))
        return empty | {"key": key, "error": as_text(answer.reason)}
    return {
        "key": key,
        "label": answer.label,
        "probability": answer.probability,
        "top_labels": [label for label, _ in answer.top],
        "top_probabilities": [p for _, p in answer.top],
        "steps": answer.steps,
        **{name: getattr(answer, name) for name in more},
        "error": None,
    }


def as_text(words: str) -> str:
    """What a table takes: a file's name may have bytes that are no text."""
    return words.encode("utf-8", "replace").decode()


def _about(row: dict[str, Any]) -> dict[str, Any]:
    return {"image_path": row["key"], "label": row["label"], "probability": row["probability"]}


def _schema(names: Sequence[str]) -> Any:
    arrow, _ = pyarrow_modules()
    text, number = arrow.string(), arrow.float32()
    kinds = {"probability": number, "top_labels": arrow.list_(text), "top_probabilities": arrow.list_(number)}
    kinds |= {"steps": arrow.int32(), "rejected": arrow.bool_(), "labels": arrow.list_(text)}
    return arrow.schema([(name, kinds.get(name, text)) for name in names])


def _parquet(rows: Sequence[dict[str, Any]], schema: Any, about: dict[bytes, bytes]) -> bytes:
    arrow, parquet = pyarrow_modules()
    buffer = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows, schema.with_metadata(about)), buffer)
    return buffer.getvalue()


def as_float16(v_BE: Tensor | None) -> np.ndarray | None:
    """Embeddings as they are kept."""
    return None if v_BE is None else v_BE.detach().half().cpu().numpy()
