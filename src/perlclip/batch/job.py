"""Doing a job: on this machine, or by an executor that has others."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from torch import Tensor

from perlclip.batch.decoders import decoded
from perlclip.batch.shards import as_float16
from perlclip.batch.work import BATCH, Job, Labelled, Tag, Work, pieces_of
from perlclip.data.loading import Lost
from perlclip.errors import PerlclipError
from perlclip.files import held_folder, require_writable
from perlclip.inference.row_files import pyarrow_modules


def predict_all(job: Job, stdin: IO[bytes] | None = None) -> Labelled:
    """Do what is missing of a job."""
    pyarrow_modules()
    out = Path(job.out)
    asked = job.asked()
    require_writable(out)
    with held_folder(out) as alone:
        if not alone:
            raise PerlclipError(f"another process writes to {out}; wait for it, or give another folder")
        pieces = pieces_of(out, asked, job, stdin)
        work = Work(job, out, pieces)
        if not all(done.complete for done in work.done):
            try:
                with work.running():
                    _execute(job)(work)
                    work.shards.behind.wait()
            except BaseException:  # Ctrl-C, SIGTERM, a disk or a cluster that is gone: what was answered is kept
                with suppress(PerlclipError):
                    work.flush()
                raise
        if work.todo():  # a list or an address that has fewer images than it had
            raise PerlclipError(
                f"{pieces[work.todo()[0]].where} has changed since the job began; begin in another folder"
            )
        return work.labelled()


def _execute(job: Job) -> Callable[[Work], None]:
    if job.executor == "local":
        return _here
    from perlclip.batch.on_ray import execute

    return execute


def _here(work: Work) -> None:
    """On this machine: processes decode, the device answers."""
    job = work.job
    classifier = job.classifier()
    backbone = classifier.method.backbone
    work.width = backbone.embed_dim if job.embeddings else 0
    size = job.batch_size or BATCH.get(backbone.device.type, 32)
    crops, least = backbone.preprocess, job.least(backbone.preprocess.size)
    work.began = time.monotonic()
    feed = decoded(work.items(), crops, size, backbone.device, workers=job.processes(), least=least)
    tags: list[list[Tag]] = []

    def batches() -> Iterator[tuple[Tensor, Lost]]:
        for batch in feed:
            tags.append(batch.tags)
            yield batch.pixels, batch.lost

    try:
        ahead = backbone.device.type == "cuda" and job.max_ms is None
        for answers, v_BE in classifier.predict_batches(batches(), ahead=ahead, **job.options()):
            work.take(tags.pop(0), answers, as_float16(v_BE) if job.embeddings else None)
    finally:
        feed.close()
