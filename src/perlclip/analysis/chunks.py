"""Measuring a data set chunk by chunk: what is measured is on disk at once, and is not measured again.

FOLDER/00000.safetensors, 00100.safetensors, …: the tensors of `Trajectories`, with a fingerprint of adapter and data.
"""

import hashlib
import json
import random
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensors_to_bytes

from perlclip.adapters.folder import Adapter
from perlclip.analysis.trajectories import Trajectories, join, measure, require_perl
from perlclip.data.loading import fixed_views
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError
from perlclip.files import write_files
from perlclip.methods.base import config_dict
from perlclip.progress import progress_bar

CHUNK = 100  # images
BATCH = 32  # images in one pass
VERSION = 1


def spread(images: ImageSet, count: int) -> ImageSet:
    """So many of the images, drawn once and for all, in their order."""
    if len(images) <= count:
        return images
    return images.select(sorted(random.Random(0).sample(range(len(images)), count)))


def measure_all(
    adapter: Adapter, images: ImageSet, folder: Path, *, novel: bool = False, workers: int = 0, title: str = "analyze"
) -> Trajectories:
    """The trajectories of all images; chunks that lie in `folder` and fit are taken from there."""
    method = require_perl(adapter.method)
    if not len(images):
        raise PerlclipError("there are no images to analyze")
    stamp = fingerprint(adapter, images)
    chunks = {start: _read(folder / f"{start:05}.safetensors", stamp) for start in range(0, len(images), CHUNK)}
    done = sum(len(chunk) for chunk in chunks.values() if chunk is not None)
    try:
        with progress_bar(title, len(images), done=done) as bar:
            backbone, state = method.backbone, method.class_state(images.classes, novel=novel)
            for start in (start for start, chunk in chunks.items() if chunk is None):
                part = images.select(range(start, min(start + CHUNK, len(images))))
                batches = []
                for pixels, labels in fixed_views(part, backbone.preprocess, BATCH, backbone.device, workers):
                    batches.append(measure(method, pixels, labels, state, adapter.head))
                    bar(len(pixels))
                chunk = join(batches)
                content = tensors_to_bytes(chunk.tensors(), {"fingerprint": stamp})
                write_files({folder / f"{start:05}.safetensors": content})
                chunks[start] = chunk
    except KeyboardInterrupt as error:
        done = sum(chunk is not None for chunk in chunks.values())
        kept = f"interrupted; {done} of {len(chunks)} chunks are kept in {folder}"
        raise KeyboardInterrupt(f"{kept}, and the same command goes on from there") from error
    return join([chunk for chunk in chunks.values() if chunk is not None])


def fingerprint(adapter: Adapter, images: ImageSet) -> str:
    """Of everything that the numbers depend on."""
    backbone, config = adapter.method.backbone, config_dict(adapter.method)
    parts = [VERSION, CHUNK, adapter.fingerprint, config, backbone.fingerprint, str(backbone.dtype)]
    return hashlib.sha256(json.dumps([*parts, images.fingerprint()], sort_keys=True).encode()).hexdigest()


def _read(path: Path, stamp: str) -> Trajectories | None:
    """A chunk that fits, or None for whatever else is there."""
    try:
        with safe_open(path, "pt") as file:
            if file.metadata().get("fingerprint") != stamp:
                return None
            return Trajectories(**{f.name: file.get_tensor(f.name) for f in fields(Trajectories)})
    except (OSError, SafetensorError):
        return None
