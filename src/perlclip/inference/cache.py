"""What tests of several methods and seeds on the same images have in common, kept in memory.

Preprocessed pixels, the frozen image tower's rows at the depths that methods start from, its pooled states, and the
methods' frozen class texts. All of it exact: a tensor that is taken is the one that would be computed again. What comes
first is kept until `forget`, because tests go round and round over the same sets and the oldest is what is needed next.
"""

from collections.abc import Hashable, Iterator
from copy import copy
from threading import Lock

from torch import Tensor

from perlclip.backbone import Backbone, FrozenImages
from perlclip.data.loading import Lost, fixed_views
from perlclip.data.sets import ImageSet
from perlclip.methods.base import ClassState, Method
from perlclip.text.classes import Classes

LIMIT = 2 * 2**30  # bytes of image tensors, on the backbone's device
FOR_ALL = 0.75  # of it; the rest is for pooled states, which are small and save the most
STATES = 16  # class lists; a cross-data-set run has eleven


class EvalCache:
    """Tensors of test images up to `limit` bytes, and the frozen texts of the class lists used last."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.lock = Lock()  # for what changes it, never while something is computed
        self.forget()

    def forget(self) -> None:
        """Make room for other images."""
        self.used = 0
        self._batches: dict[Hashable, dict[int, FrozenImages]] = {}
        self._states: dict[Hashable, ClassState] = {}

    def of(self, images: Hashable) -> "SetCache":
        """What is known of one set of images, whatever stands for it."""
        return SetCache(self, images)

    def batches(self, key: Hashable) -> dict[int, FrozenImages]:
        """The batches of a set whose pixels are kept, by position."""
        return self._batches.setdefault(key, {})

    def take(self, tensor: Tensor, share: float = 1.0) -> bool:
        """Whether there is room for a tensor; if so, it counts from now on."""
        room = self.used + tensor.nbytes <= share * self.limit
        self.used += tensor.nbytes if room else 0
        return room

    def class_state(self, key: Hashable, method: Method, classes: Classes) -> ClassState:
        """The frozen part of a class list, which does not depend on what was trained, shared by all seeds."""
        state = self._states.get(key) or method.class_state(classes)
        with self.lock:
            self._states.pop(key, None)
            self._states[key] = state  # now the last one used
            if len(self._states) > STATES:
                del self._states[next(iter(self._states))]
        return state


class SetCache:
    """The cache of one test set, for `evaluate`."""

    def __init__(self, cache: EvalCache, images: Hashable) -> None:
        self.cache, self.images = cache, images

    def class_state(self, method: Method, classes: Classes, *, novel: bool) -> ClassState:
        """As `Method.class_state`; embeddings of texts that training has changed are not shared."""
        key = (_key(method.backbone), method.name, method.config, method.as_written, classes)
        state = copy(self.cache.class_state(key, method, classes))
        state.encoding, state.novel = None, novel
        return state

    def batches(
        self, test_set: ImageSet, method: Method, batch_size: int, workers: int = 0, lost: Lost | None = None
    ) -> Iterator[FrozenImages]:
        """Every image once, in order, through the method's lens; what was not kept is loaded, and kept in the end.

        `lost` is for images that cannot be read, as in `fixed_views`; nothing may be kept then.
        """
        backbone = method.backbone
        shared = self.cache.batches((_key(backbone), method.config.lens, self.images, batch_size))
        known = dict(shared)  # other threads add to it meanwhile; what is not in it now is loaded
        starts = range(0, len(test_set), max(1, batch_size))
        order = range(len(test_set))
        wanted = test_set.select(i for start in starts if start not in known for i in order[start : start + batch_size])
        loaded = fixed_views(wanted, backbone.preprocess, batch_size, backbone.device, workers, lost)
        for start in starts:
            kept = known.get(start)
            batch = method.frozen(next(loaded)[0] if kept is None else kept.pixels)
            if kept is not None:
                batch.known, batch.pooled_BD, batch.middles = dict(kept.known), kept.pooled_BD, dict(kept.middles)
            yield batch
            with self.cache.lock:
                self._keep(shared, start, batch)

    def _keep(self, known: dict[int, FrozenImages], start: int, batch: FrozenImages) -> None:
        """Of a batch that was looked at, what there is room for: without its pixels, nothing."""
        take = self.cache.take
        kept = known.get(start)
        if kept is None:
            if not take(batch.pixels, FOR_ALL):
                return
            kept = known[start] = FrozenImages(batch.tower, batch.pixels, batch.lens)
        if kept.pooled_BD is None and batch.pooled_BD is not None and take(batch.pooled_BD):
            kept.pooled_BD = batch.pooled_BD
        for depth, m_BF in batch.middles.items():
            if depth not in kept.middles and take(m_BF):
                kept.middles[depth] = m_BF
        for depth, x_BND in batch.known.items():
            # The embedding, depth 0, costs next to nothing.
            if depth and depth not in kept.known and take(x_BND, FOR_ALL):
                kept.known[depth] = x_BND


def _key(backbone: Backbone) -> Hashable:
    return backbone.fingerprint, backbone.dtype, backbone.device
