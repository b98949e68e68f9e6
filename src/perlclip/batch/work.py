"""A job: what is asked for, the pieces that it was cut into, what of them is done, and where answers go.

What is asked for and the list of pieces are written to the folder before anything else; whoever gives the same command
again, after a kill or on another day, goes on with the pieces that are missing. Rows are neither lost nor doubled: a
shard takes its name when it is whole, and an image's place in the pieces does not change.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from perlclip.adapters.folder import read_info
from perlclip.batch.decoders import Source
from perlclip.batch.inputs import Piece, make_plan, read_piece
from perlclip.batch.shards import Shards, Writer
from perlclip.data.decoding import check_on_error
from perlclip.data.images import Unreadable, file_size
from perlclip.errors import PerlclipError, unknown_name
from perlclip.files import parse_json, read_file, write_files
from perlclip.inference.classifier import Classifier
from perlclip.inference.judging import Prediction
from perlclip.progress import Bar, progress_bar
from perlclip.thinking.policy import Steps
from perlclip.trust.conformal import KIND
from perlclip.trust.rejection import RATE

PLAN, LISTED = "_job/job.json", "_job/images.jsonl"
MAX_PLAN = 2**30  # bytes
SHARD = 10_000  # rows
BATCH = {"cuda": 256}  # images at once on a device; 32 on others
# How much of a JPEG is decoded: all of it, or no more than so many times what the tower sees of its shorter side.
DECODE: dict[str, int] = {"exact": 0, "half": 2, "fast": 1}
EXECUTORS = ("local", "ray")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Which adapter, which images, where to, and how; the words are those of `Classifier` and of the command line."""

    adapter: str | Path
    sources: Sequence[str]
    out: str | Path
    class_names: Sequence[str] | None = None
    template: str | None = None
    backbone: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    head: bool = True
    compile: str = "auto"
    top_k: int = 1
    steps: Steps = None
    max_mean_steps: float | None = None
    max_ms: float | None = None
    reject: bool = False
    reject_rate: float = RATE
    coverage: float | None = None
    sets: str = KIND
    multi_label: bool = False
    embeddings: bool = False
    decode: str = "exact"
    shard_size: int = SHARD
    batch_size: int | None = None  # 256 on CUDA, 32 elsewhere
    workers: int | None = None  # a process for each processor
    on_error: str = "skip"
    executor: str = "local"
    address: str = ""
    progress: bool = True

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        for what, word, known in (("decode", self.decode, DECODE), ("executor", self.executor, EXECUTORS)):
            if word not in known:
                raise unknown_name(what, word, known)
        if min(self.shard_size, 1 if self.batch_size is None else self.batch_size) < 1 or (self.workers or 0) < 0:
            raise PerlclipError("shard size and batch size must be at least 1, workers at least 0")

    def asked(self) -> dict[str, Any]:
        """All that decides what the rows are: a folder holds the answers to one question."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in FREE}
        info = json.dumps(read_info(self.adapter), sort_keys=True).encode()
        given["adapter"] = hashlib.sha256(info).hexdigest()
        plain: dict[str, Any] = json.loads(json.dumps(given, default=list))
        return plain

    def classifier(self, device: str | None = None) -> Classifier:
        """Ready to answer, on the job's device or another one."""
        return Classifier.from_pretrained(
            self.adapter, class_names=self.class_names, template=self.template, backbone=self.backbone,
            device=self.device if device is None else device, dtype=self.dtype, head=self.head, compile=self.compile,
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        """Of `Classifier.predict_batches`."""
        return {name: getattr(self, name) for name in ASKING}

    def least(self, size: int) -> int:
        """What no side of a decoded JPEG falls below, for a tower that sees so many pixels."""
        return DECODE[self.decode] * size

    def processes(self) -> int:
        """That decode."""
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Where and how fast it is computed is nobody's question; the adapter is known by what it holds.
FREE = {"adapter", "out", "backbone", "device", "compile", "batch_size", "workers", "on_error", "executor", "address"}
FREE |= {"progress"}
ASKING = (
    "top_k",
    "steps",
    "max_mean_steps",
    "max_ms",
    "reject",
    "reject_rate",
    "coverage",
    "sets",
    "multi_label",
    "embeddings",
)


@dataclass(frozen=True)
class Labelled:
    """What a job's folder holds in the end, and what this run has added."""

    folder: Path
    images: int
    errors: int
    added: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tag:
    """An image of a job: its piece and its place there, its key, and whether it is the piece's last."""

    piece: int
    place: int
    key: str
    last: bool


Item = tuple[Tag, Source]


def pieces_of(out: Path, asked: dict[str, Any], job: Job, stdin: IO[bytes] | None) -> list[Piece]:
    """The pieces as they were when the job began, or now."""
    path = out / PLAN
    if not path.exists():
        if any(entry.name != path.parent.name for entry in out.iterdir()):
            raise PerlclipError(f"{out} is not empty and holds no job; give a folder of its own")
        path.parent.mkdir(exist_ok=True)
        pieces = make_plan(job.sources, out / LISTED, job.shard_size, stdin)
        plan = {"format": 1, "asked": asked, "pieces": [asdict(piece) for piece in pieces]}
        write_files({path: json.dumps(plan, indent=1).encode()})
        return pieces
    try:
        plan = parse_json(read_file(path, MAX_PLAN))
        before, pieces = plan["asked"], [Piece(**piece) for piece in plan["pieces"]]
        format_ = plan["format"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PerlclipError(f"{path} is damaged: {error}; remove the folder to begin again") from error
    if format_ != 1:
        raise PerlclipError(f"{path} was written by another version of perlclip")
    for name, value in asked.items():
        if before.get(name) != value:
            what = f"{name} {before.get(name)!r}, not {value!r}" if name != "adapter" else "another adapter"
            raise PerlclipError(f"{out} holds a job with {what}; give the same again, or another folder")
    return pieces


class Work:
    """What is to do of a job, and where its answers go: what an executor gets."""

    def __init__(self, job: Job, out: Path, pieces: Sequence[Piece]) -> None:
        self.job, self.listed, self.pieces = job, out / LISTED, pieces
        more = tuple(
            name
            for name, asked in (("rejected", job.reject), ("labels", job.coverage is not None or job.multi_label))
            if asked
        )
        self.shards = Shards(out, max(5, len(str(len(pieces) - 1))), job.shard_size, more)
        self.done = [self.shards.done(piece) for piece in range(len(pieces))]
        self.before = sum(done.images for done in self.done)
        self.began, self.estimated, self.width = time.monotonic(), 0.0, 0
        self.added, self.seen, self.seen_bytes = 0, 0, 0
        self.writers: dict[int, Writer] = {}
        self.bar = Bar()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Progress for as long as it lasts; what was there before counts, but not for the rate."""
        with progress_bar("predict", self.total(), show=self.job.progress, done=self.before) as self.bar:
            yield

    def todo(self) -> list[int]:
        """Pieces that are not complete."""
        return [piece for piece, done in enumerate(self.done) if not done.complete]

    def items(self) -> Iterator[Item]:
        """Every image that has no row yet."""
        for piece in self.todo():
            for tag, source in items_of(self.pieces[piece], piece, self.listed, self.done[piece].images):
                self.look(source)
                yield tag, source

    def look(self, source: Source) -> None:
        """How large images are, so that it can be said how many there will be."""
        if not isinstance(source, Unreadable | Path):
            self.seen += 1
            self.seen_bytes += file_size(source) or 0

    def take(self, tags: Sequence[Tag], answers: Sequence[Prediction | Unreadable], v_BE: np.ndarray | None) -> None:
        """Answers to images, those of a piece in their order; embeddings are of those that could be read."""
        views = iter(() if v_BE is None else v_BE)
        for tag, answer in zip(tags, answers, strict=True):
            lost = isinstance(answer, Unreadable)
            if isinstance(answer, Unreadable) and self.job.on_error == "stop":
                raise PerlclipError(answer.reason)
            done = self.done[tag.piece]
            if tag.piece not in self.writers:
                self.writers[tag.piece] = self.shards.writer(tag.piece, done, self.width)
            view = None if lost or v_BE is None else next(views)
            self.writers[tag.piece].add(tag.key, answer, view, last=tag.last)
            done.images, done.errors, done.complete = done.images + 1, done.errors + lost, tag.last
            if tag.last:
                del self.writers[tag.piece]
        self.added += len(tags)
        rate = self.added / max(time.monotonic() - self.began, 1e-9)
        now = time.monotonic()
        again = now - self.estimated > 1  # of very many pieces it takes a moment
        self.estimated = now if again else self.estimated
        note = f"{rate:,.1f} images/s" if rate < 100 else f"{rate:,.0f} images/s"
        self.bar(len(tags), note, self.total() if again else None)

    def flush(self) -> None:
        """Write what there is of shards that are not full: it is over before its time."""
        for writer in self.writers.values():
            writer.flush()
        self.shards.behind.wait()

    def total(self) -> int:
        """Images of the job; those of archives that are not read yet are estimated by their size."""
        mean = self.seen_bytes / self.seen if self.seen else 2**17
        counts = (
            done.images if done.complete else max(done.images, piece.count or int(piece.size / max(mean, 1)))
            for piece, done in zip(self.pieces, self.done, strict=True)
        )
        return sum(counts)

    def labelled(self) -> Labelled:
        """What there is in the end."""
        images, errors = (sum(getattr(done, name) for done in self.done) for name in ("images", "errors"))
        return Labelled(self.shards.folder, images, errors, self.added, time.monotonic() - self.began)


def items_of(piece: Piece, number: int, listed: Path, start: int, stop: int | None = None) -> Iterator[Item]:
    """The images of a piece from one place to another; the last of all is known by nothing coming behind it."""
    waiting: tuple[Tag, Source] | None = None
    for place, (key, source) in enumerate(read_piece(piece, listed)):
        if waiting is not None:
            yield waiting
        if place == stop:
            return
        waiting = (Tag(number, place, key, False), source) if place >= start else None
    if waiting is not None:
        yield replace(waiting[0], last=True), waiting[1]
