"""The same job on Ray Data (extra `ray`): tasks read and decode, actors with the backbone answer, here shards are made.

Ray divides the processors of its cluster between the stages, starts more actors where answers are waited for, and
repeats what a dead worker had in hand. Rows come back in any order; a piece's are put in theirs, and one that comes
twice counts once. Sources, adapter and backbone are on paths that all machines share, `--out` is only this one's.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perlclip.batch.decoders import Crops, crop_of
from perlclip.batch.inputs import Piece, source_of
from perlclip.batch.shards import as_float16, as_text
from perlclip.batch.work import BATCH, Job, Tag, Work, items_of
from perlclip.bench.executors.ray import cluster
from perlclip.data.images import ImageSource, NamedBytes, Unreadable, content_of, image_name
from perlclip.errors import PerlclipError, first_line
from perlclip.inference.judging import Prediction

OBJECT_STORE = 2**30  # bytes on this machine, if the cluster is our own
BLOCK = 2**24  # bytes that one task makes or takes: some hundred images
READ = 256  # images of a list that a task reads

Row = dict[str, Any]
PLACES = tuple(field.name for field in fields(Tag))


def execute(work: Work) -> None:
    """Images flow from the pieces through decoders to actors, and their rows to this process."""
    job = replace(work.job, adapter=Path(work.job.adapter).absolute(), backbone=_absolute(work.job.backbone))
    backbone = job.classifier("cpu").method.backbone
    work.width = backbone.embed_dim if job.embeddings else 0
    with cluster(job.address, max(2, job.processes()), OBJECT_STORE) as ray:
        there = ray.cluster_resources()
        cards = int(there.get("GPU", 0)) if job.device != "cpu" else 0
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars, context.target_max_block_size = False, BLOCK
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        least = job.least(backbone.preprocess.size)
        # Ray makes one stage of those that ask for the same: read and decode ask for a processor together, and apart.
        rows = (
            ray.data.from_items(list(_parts(work)))
            .flat_map(_Read(tuple(work.pieces), work.listed.absolute()), num_cpus=0.25)
            .map_batches(_Decode(backbone.preprocess, least), batch_size=32, num_cpus=0.75)
            .map_batches(
                _Answer,
                fn_constructor_args=(job, "cuda" if cards else "cpu"),
                batch_size=job.batch_size or BATCH.get("cuda" if cards else "cpu", 32),
                num_cpus=0 if cards else 1,
                num_gpus=1 if cards else 0,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=cards or max(1, int(there["CPU"]) // 2)),
            )
        )
        try:
            _collect(work, rows)
        except ray.exceptions.RayError as error:
            raise PerlclipError(f"Ray has given up: {first_line(error)}; the same command goes on") from error


def _collect(work: Work, rows: Any) -> None:
    """Rows as they come, to the shards in the order of their pieces."""
    waiting: dict[int, dict[int, Row]] = defaultdict(dict)
    following = {piece: work.done[piece].images for piece in work.todo()}
    for table in rows.iter_batches(batch_size=None, batch_format="pyarrow"):
        for row in table.to_pylist():
            if row["place"] >= following[row["piece"]]:
                waiting[row["piece"]][row["place"]] = row
        for piece, found in list(waiting.items()):
            ready = []
            while following[piece] in found:
                ready.append(found.pop(following[piece]))
                following[piece] += 1
            if ready:
                views = [np.frombuffer(row["v"], np.float16) for row in ready if row["v"] is not None]
                tags = [Tag(piece, row["place"], row["key"], row["last"]) for row in ready]
                work.take(tags, [_answer_of(row) for row in ready], np.stack(views) if views else None)


def _parts(work: Work) -> Iterator[Row]:
    """What a task reads: of a list a few hundred images, of an archive or a table all that is missing."""
    for number in work.todo():
        piece, start = work.pieces[number], work.done[number].images
        step = READ if piece.kind == "list" else 2**62
        end = piece.count if piece.kind == "list" and piece.count else 2**62
        for first in range(start, end, step):
            yield {"piece": number, "start": first, "stop": min(first + step, end)}


@dataclass(frozen=True)
class _Read:
    """A part to its images: paths, or bytes of what lies in an archive or a table."""

    pieces: tuple[Piece, ...]
    listed: Path

    def __call__(self, part: Row) -> Iterator[Row]:
        piece = self.pieces[part["piece"]]
        for tag, source in items_of(piece, part["piece"], self.listed, part["start"], part["stop"]):
            told = {**asdict(tag), "content": b"", "error": "", **_told(source)}
            # A file's name may have bytes that are no text, which a table does not take: JSON says them in letters.
            yield told | {"key": as_text(tag.key), "path": json.dumps(told["path"]), "error": as_text(told["error"])}


def _told(source: ImageSource | Unreadable) -> Row:
    if isinstance(source, Unreadable):
        return {"path": source.image, "error": source.reason}
    if isinstance(source, Path):
        return {"path": str(source)}
    try:
        return {"path": image_name(source), "content": content_of(source)}
    except PerlclipError as error:
        return {"path": image_name(source), "error": str(error)}


@dataclass(frozen=True)
class _Decode:
    """Paths and bytes to crops."""

    crops: Crops
    least: int

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        empty = np.zeros((3, self.crops.size, self.crops.size), np.uint8)
        made, errors = [], []
        paths = map(json.loads, batch["path"])
        for path, content, error in zip(paths, batch["content"], batch["error"], strict=True):
            source: Any = Unreadable(path, error) if error else NamedBytes(content, path) if content else None
            view = crop_of(source_of(path, "") if source is None else source, self.crops, self.least)
            errors.append(as_text(view.reason) if isinstance(view, Unreadable) else "")
            made.append(empty if isinstance(view, Unreadable) else view)
        kept = {name: batch[name] for name in PLACES}
        return {**kept, "crop": np.stack(made), "error": np.array(errors, dtype=object)}


class _Answer:
    """An actor: a classifier, loaded once."""

    def __init__(self, job: Job, device: str) -> None:
        self.classifier, self.job = job.classifier(device), job

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        reasons, backbone = list(batch["error"]), self.classifier.method.backbone
        lost = {i: Unreadable("", reason) for i, reason in enumerate(reasons) if reason}
        read = [i for i in range(len(reasons)) if i not in lost]
        pixels = backbone.preprocess.pixels(torch.from_numpy(batch["crop"][read]).to(backbone.device))
        ((answers, v_BE),) = self.classifier.predict_batches([(pixels, lost)], **self.job.options())
        v = as_float16(v_BE) if self.job.embeddings else None
        views = iter(() if v is None else v)
        rows = [_row_of(answer) for answer in answers]
        for i, row in enumerate(rows):
            row["v"] = next(views).tobytes() if v is not None and i not in lost else None
        columns: dict[str, Any] = {name: list(batch[name]) for name in PLACES}
        return columns | {name: [row[name] for row in rows] for name in rows[0]}


FIELDS = ("label", "probability", "steps", "rejected", "labels")


def _row_of(answer: Prediction | Unreadable) -> Row:
    if isinstance(answer, Unreadable):
        return dict.fromkeys((*FIELDS, "top_labels", "top_probabilities")) | {"error": answer.reason}
    top = {"top_labels": [label for label, _ in answer.top], "top_probabilities": [p for _, p in answer.top]}
    return {name: getattr(answer, name) for name in FIELDS} | top | {"error": None}


def _answer_of(row: Row) -> Prediction | Unreadable:
    if row["error"] is not None:
        return Unreadable(row["key"], row["error"])
    top = tuple(zip(row["top_labels"], row["top_probabilities"], strict=True))
    labels = None if row["labels"] is None else tuple(row["labels"])
    return Prediction(**{name: row[name] for name in FIELDS} | {"top": top, "labels": labels})


def _absolute(name: str | None) -> str | None:
    return str(Path(name).absolute()) if name and Path(name).is_dir() else name
