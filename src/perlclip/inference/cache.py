"""What tests of several methods and seeds on the same images have in common, kept in memory.

Preprocessed pixels, the frozen image tower's rows at the depths that methods start from, its pooled states, and the
methods' frozen class texts. All of it exact: a tensor that is taken is the one that would be computed again. What comes
first is kept until `forget`, because tests go round and round over the same sets and the oldest is what is needed next.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field

from torch import Tensor

from perlclip.backbone import Backbone
from perlclip.backbone.tower import FrozenBatch, Tower
from perlclip.data.loading import eval_batches, on_device
from perlclip.data.sets import ImageSet
from perlclip.methods.base import ClassState, Method
from perlclip.text.classes import Classes

LIMIT = 2 * 2**30  # bytes of image tensors, on the backbone's device
FOR_ALL = 0.75  # of it; the rest is for pooled states, which are small and save the most
STATES = 16  # class lists; a cross-data-set run has eleven


class Memory:
    """Tensors of test images up to `limit` bytes, and the frozen texts of the class lists used last."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.forget()

    def forget(self) -> None:
        """Make room for other images."""
        self.used = 0
        self._batches: dict[Hashable, dict[int, Batch]] = {}
        self._states: dict[Hashable, ClassState] = {}

    def of(self, images: Hashable) -> "SetMemory":
        """What is known of one set of images, whatever stands for it."""
        return SetMemory(self, images)

    def take(self, tensor: Tensor, share: float = 1.0) -> bool:
        """Whether there is room for a tensor; if so, it counts from now on."""
        room = self.used + tensor.nbytes <= share * self.limit
        self.used += tensor.nbytes if room else 0
        return room

    def batches(self, key: Hashable) -> "dict[int, Batch]":
        """The batches of a set, by position."""
        return self._batches.setdefault(key, {})

    def class_state(self, key: Hashable, method: Method, classes: Classes) -> ClassState:
        """The frozen part of a class list, which does not depend on what was trained, shared by all seeds."""
        state = self._states.pop(key, None) or method.class_state(classes)
        self._states[key] = state  # now the last one used
        if len(self._states) > STATES:
            del self._states[next(iter(self._states))]
        return state


@dataclass
class Batch:
    """One batch of images: its pixels, if there was room for them, and what the frozen image tower made of them."""

    pixels: Tensor | None = None
    frozen: FrozenBatch = field(default_factory=FrozenBatch)


@dataclass(frozen=True)
class SetMemory:
    """The memory of one test set, for `evaluate`."""

    memory: Memory
    images: Hashable

    def class_state(self, method: Method, classes: Classes, *, novel: bool) -> ClassState:
        """As `Method.class_state`; embeddings of texts that training has changed are not shared."""
        key = (_key(method.backbone), method.name, method.config, classes)
        state = copy(self.memory.class_state(key, method, classes))
        state.kept, state.novel = {}, novel
        return state

    def batches(
        self, test_set: ImageSet, backbone: Backbone, batch_size: int, workers: int = 0
    ) -> Iterator[tuple[Tensor, Batch]]:
        """Every image once, in order, on the backbone's device; only pixels that were not kept are loaded."""
        known = self.memory.batches((_key(backbone), self.images, batch_size))
        order = range(len(test_set))
        starts = range(0, len(test_set), max(1, batch_size))
        lacking = [start for start in starts if start not in known or known[start].pixels is None]
        wanted = test_set.select(i for start in lacking for i in order[start : start + batch_size])
        loaded = on_device(eval_batches(wanted, backbone.preprocess, batch_size, workers), backbone.device)
        for start in starts:
            batch = known.setdefault(start, Batch())
            pixels = batch.pixels
            if pixels is None:
                pixels = next(loaded)[0]
            yield pixels, batch

    @contextmanager
    def recall(self, batch: Batch, pixels: Tensor, tower: Tower) -> Iterator[None]:
        """Take what is known of a batch; what is new is kept, as far as there is room."""
        known, take = batch.frozen, self.memory.take
        found = FrozenBatch(dict(known.rows), known.pooled_BD)
        with tower.remembering(found, pixels):
            yield
        if known.pooled_BD is None and found.pooled_BD is not None and take(found.pooled_BD):
            known.pooled_BD = found.pooled_BD
        if batch.pixels is None and take(pixels, FOR_ALL):
            batch.pixels = pixels
        for depth, x_BND in found.rows.items():
            # The embedding, depth 0, costs next to nothing.
            if depth and depth not in known.rows and take(x_BND, FOR_ALL):
                known.rows[depth] = x_BND


def _key(backbone: Backbone) -> Hashable:
    return backbone.fingerprint, backbone.dtype, backbone.device
