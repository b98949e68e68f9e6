"""Every image of a set decoded once, before anything depends on it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from itertools import islice

import numpy as np
from PIL import Image

from perlclip.data.images import ON_ERROR, Held, ImageSource, Unreadable, content_of, image_name, try_image
from perlclip.data.sets import ImageSet
from perlclip.errors import PerlclipError, unknown_name
from perlclip.progress import progress_bar

HELD_BYTES = 2**28  # for pixels, and as many for files whose pixels take more: what fits is not read again


def check_on_error(on_error: str) -> None:
    """One of the two words."""
    if on_error not in ON_ERROR:
        raise unknown_name("on_error", on_error, ON_ERROR)


def readable(
    images: ImageSet, *, on_error: str = "stop", hold: int = HELD_BYTES, progress: bool = True
) -> tuple[ImageSet, list[Unreadable]]:
    """The images that can be decoded, and those that cannot: the first of these is an error unless `on_error="skip"`.

    All are decoded, by a thread for each processor. The first so many are kept as they were read, up to `hold` bytes of
    pixels and as many of files, so that they are not decoded, or at least not read, again.
    """
    check_on_error(on_error)
    if images.readable:
        return images, []
    taken = {"pixels": 0, "files": 0}  # by what was read before
    for source in images.images:
        if isinstance(source, Held):
            taken["files" if isinstance(source.data, bytes) else "pixels"] += _bytes(source.data)
    room = {kind: hold - size for kind, size in taken.items()}
    kept: list[ImageSource] = []
    chosen: list[int] = []
    skipped: list[Unreadable] = []
    with progress_bar("read images", len(images), show=progress) as bar:
        for index, (found, image) in enumerate(_looked_at(images)):
            bar()
            if isinstance(image, Unreadable):
                if on_error == "stop":
                    raise PerlclipError(image.reason)
                skipped.append(image)
                continue
            chosen.append(index)
            kept.append(_kept(images.images[index], found, image, room))
    whole = images if len(chosen) == len(images) else images.select(chosen)
    return replace(whole, images=kept, readable=True), skipped


def _looked_at(images: ImageSet) -> Iterator[tuple[ImageSource, Image.Image | Unreadable]]:
    """Of each image its bytes, or itself if it has none, and what they decode to; in order, a few of them ahead."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sources = iter(images.images)
    with ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(_look, source) for source in islice(sources, 2 * threads)]
        try:
            while waiting:
                yield waiting.pop(0).result()
                waiting += [pool.submit(_look, source) for source in islice(sources, 1)]
        finally:
            for future in waiting:
                future.cancel()


def _look(source: ImageSource) -> tuple[ImageSource, Image.Image | Unreadable]:
    if isinstance(source, Held | Image.Image | np.ndarray):
        return source, try_image(source)
    name = image_name(source)
    try:
        content = content_of(source)
    except PerlclipError as error:
        return source, Unreadable(name, str(error))
    found = Held(name, sha256(content).digest(), content)
    return found, try_image(found)


def _kept(source: ImageSource, found: ImageSource, image: Image.Image, room: dict[str, int]) -> ImageSource:
    """What stands for an image from now on: its pixels, its file or, as far as there is no room for either, itself."""
    if not isinstance(found, Held) or not isinstance(found.data, bytes):
        return found
    pixels, size = _bytes(image), _bytes(found.data)
    if pixels <= room["pixels"]:
        room["pixels"] -= pixels
        return replace(found, data=image)
    if size <= room["files"]:
        room["files"] -= size
        return found
    return source


def _bytes(data: Image.Image | bytes) -> int:
    return len(data) if isinstance(data, bytes) else 3 * data.width * data.height
