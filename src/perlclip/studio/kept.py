"""What is computed of an image once and kept in the project: its small picture, and what the frozen backbone sees.

Both go by the file's identity, features also by the backbone's fingerprint and number format: a file that was changed
is looked at again, another backbone looks at all. They are only kept, never the truth: a damaged file is thrown away.

Shapes: N images, B of a batch, E embedding width.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from perlclip.backbone import Backbone
from perlclip.data.images import read_image
from perlclip.errors import PerlclipError
from perlclip.files import write_files
from perlclip.viz.mistakes import small_picture

SIDE = 256  # pixels of a thumbnail
SHARD = 512  # images of a file, at most
ENDS = (b"\xff\xd9", b"IEND\xaeB`\x82")  # of a whole JPEG, of a whole PNG


class Features:
    """Unit embeddings of a project's images, as far as they are there; added in batches, written now and then."""

    def __init__(self, folder: Path, backbone: Backbone, keys: Sequence[str]) -> None:
        kind = backbone.dtype_name
        self.folder, self.keys = folder / f"features-{backbone.fingerprint[:16]}-{kind}", keys
        self.v_NE = torch.zeros(len(keys), backbone.embed_dim)
        self.have_N = torch.zeros(len(keys), dtype=torch.bool)
        self._waiting: list[int] = []
        self._next = 0
        place = {key: i for i, key in enumerate(keys)}
        for path in sorted(self.folder.glob("*.safetensors")):
            if found := re.fullmatch(r"(\d+)\.safetensors", path.name):
                self._next = max(self._next, int(found[1]) + 1)
                self._load(path, place)

    def _load(self, path: Path, place: dict[str, int]) -> None:
        try:
            with safe_open(path, "pt") as file:
                v_BE, known = file.get_tensor("v"), json.loads(file.metadata()["keys"])
                if v_BE.shape != (len(known), self.v_NE.shape[1]) or not torch.isfinite(v_BE).all():
                    raise ValueError(f"shape {tuple(v_BE.shape)}")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            return
        pairs = [(place[key], row) for row, key in enumerate(known) if key in place]
        here = torch.tensor([i for i, _ in pairs], dtype=torch.long)
        self.v_NE[here], self.have_N[here] = v_BE[[row for _, row in pairs]].float(), True

    def add(self, places: Sequence[int], v_BE: Tensor) -> None:
        """What was seen of some images; a full file's worth of them is written."""
        self.v_NE[list(places)], self.have_N[list(places)] = v_BE.float().cpu(), True
        self._waiting += places
        if len(self._waiting) >= SHARD:
            self.write()

    def write(self) -> None:
        """Write what is not on disk yet."""
        if self._waiting:
            metadata = {"keys": json.dumps([self.keys[i] for i in self._waiting])}
            content = save({"v": self.v_NE[self._waiting].contiguous()}, metadata)
            write_files({self.folder / f"{self._next:06}.safetensors": content})
            self._next, self._waiting = self._next + 1, []


class Thumbnails:
    """Small pictures in files, each made when it is first asked for."""

    def __init__(self, folder: Path, paths: Sequence[Path], keys: Sequence[str]) -> None:
        self.folder, self.paths, self.keys = folder / "thumbnails", paths, keys
        self._locks = [Lock() for _ in range(16)]

    def get(self, place: int, image: Image.Image | None = None) -> tuple[bytes, str]:
        """The file's contents and its media type; `image` is the image, if somebody has it already."""
        key = self.keys[place]
        path = self.folder / key[:2] / key
        with self._locks[place % len(self._locks)]:
            content = b""
            with suppress(OSError):
                content = path.read_bytes()
            if not content.endswith(ENDS):
                content, _ = small_picture(image or read_image(self.paths[place], 2 * SIDE), SIDE)
                with suppress(OSError):  # a full disk, say: it is made again when it is asked for
                    path.parent.mkdir(parents=True, exist_ok=True)
                    staged = path.with_name(f".{key}")
                    staged.write_bytes(content)  # not synced, which takes longer than making it: its end is looked at
                    staged.replace(path)
        return content, "image/png" if content.startswith(b"\x89PNG") else "image/jpeg"

    def has(self, place: int) -> bool:
        """Whether it is made already."""
        return (self.folder / self.keys[place][:2] / self.keys[place]).exists()

    def view(self, place: int, side: int = 1024) -> tuple[bytes, str]:
        """The image as large as a screen needs it; always made anew from pixels, never a user's file as it is."""
        try:
            return small_picture(read_image(self.paths[place], side), side)
        except OSError as error:
            raise PerlclipError(f"cannot read {self.paths[place]}: {error}") from error
