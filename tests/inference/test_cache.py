"""What tests of several methods and seeds share: not one number changes, the work is spared, cache is bounded."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import perlclip
from perlclip.backbone import Preprocess
from perlclip.data import ImageSet, load_images
from perlclip.inference import cache as caches
from perlclip.inference.cache import EvalCache

BATCH = 5


@pytest.fixture(scope="module")
def images(tree) -> ImageSet:
    return load_images(tree).select(range(13))


def answers(method, images, cache=None, batch_size=BATCH, novel=False) -> tuple:
    result = perlclip.evaluate(method, images, cache=cache, batch_size=batch_size, novel=novel, progress=False)
    return result.predictions_KB.tolist(), result.probabilities_BC.tolist()


def test_every_method_and_seed_answers_the_same_to_the_bit(backbone, images):
    """One cache for all of them, in an order in which depths come up from below and from above."""
    shared, names = EvalCache().of("images"), perlclip.list_methods()
    methods = [perlclip.create_method(name, backbone, seed=seed) for name in names for seed in (1, 2)]
    for case in (dict(novel=True), dict(batch_size=4), dict()):
        plain = {method: answers(method, images, **case) for method in methods}
        for method in (*methods, *reversed(methods)):
            assert answers(method, images, shared, **case) == plain[method], method.name


@pytest.mark.parametrize("depth", [0, 4, 11])
def test_settings_of_a_method_do_not_get_mixed_up(backbone, images, depth):
    shared = EvalCache().of("images")
    for other in (7, depth, 7):
        method = perlclip.create_method("perl", backbone, depth=other)
        assert answers(method, images, shared) == answers(method, images)


def test_sets_and_backbones_do_not_get_mixed_up(backbone, images, clip_folders):
    cache = EvalCache()
    reverse = images.select(reversed(range(len(images))))
    other = perlclip.load_backbone(str(clip_folders["small"]), dtype="bfloat16")
    for one in (backbone, other):
        method = perlclip.create_method("mmrl", one)
        assert answers(method, images, cache.of("images")) == answers(method, images)
        assert answers(method, reverse, cache.of("reverse")) == answers(method, reverse)


class Count:
    """How often a function of some objects is called."""

    def __init__(self, monkeypatch, name: str, *owners) -> None:
        self.calls = 0
        for owner in owners:
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, function):
        def call(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return call

    def during(self, action) -> int:
        before = self.calls
        action()
        return self.calls - before


def test_frozen_blocks_pixels_and_texts_are_computed_once(backbone, images, monkeypatch):
    shared = EvalCache().of("images")
    batches, depth = 3, backbone.vision.depth
    blocks, views = (
        Count(monkeypatch, "forward", *backbone.vision.blocks),
        Count(monkeypatch, "test_view", Preprocess),
    )

    def test(name: str, seed: int = 1, **config) -> tuple[int, int]:
        method = perlclip.create_method(name, backbone, seed=seed, **config)
        before = views.calls
        return blocks.during(lambda: answers(method, images, shared)) // batches, views.calls - before

    assert test("zero-shot") == (depth - 1, 13), "all but the last block, which is read at one row"
    assert test("zero-shot") == test("coop") == test("tcp", seed=2) == (0, 0)
    # Four steps through blocks 8..11, of which the first is entered with kept keys; blocks 1..7 only the first time.
    assert test("perl") == (7 + 4 * 3, 0) and test("perl", seed=2) == (4 * 3, 0)
    assert test("mma", start=9) == (2 + 2, 0), "from the depth that is known"
    texts = Count(monkeypatch, "prepare", type(perlclip.create_method("mmrl", backbone)))
    for seed in (1, 2, 3):
        test("mmrl", seed)
    assert texts.calls == 1


def test_trained_texts_are_never_shared(backbone, images):
    """Two methods of one state: each has embeddings of its own."""
    shared = EvalCache().of("images")
    one, two = (perlclip.create_method("coop", backbone, init="", seed=seed) for seed in (1, 2))
    assert answers(one, images, shared) != answers(two, images, shared)
    with torch.no_grad():
        one.context.mul_(-1)
    assert answers(one, images, shared) == answers(one, images)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_cache_is_bounded(backbone, images, share):
    whole = EvalCache()
    methods = [perlclip.create_method(name, backbone) for name in ("mmrl", "zero-shot", "perl")]
    for method in methods:
        answers(method, images, whole.of("images"))
    small = EvalCache(int(share * whole.used))
    for method in (*methods, *methods):
        assert answers(method, images, small.of("images")) == answers(method, images)
    held = [
        tensor
        for batches in small._batches.values()
        for batch in batches.values()
        for tensor in (batch.pixels, batch.pooled_BD, *batch.known.values())
        if tensor is not None
    ]
    assert sum(tensor.nbytes for tensor in held) == small.used <= small.limit
    assert bool(held) == (share > 0.1), "less than a batch of pixels is of no use"
    small.forget()
    assert small.used == 0 and not small._batches


def test_only_the_class_lists_used_last_are_kept(backbone, images, monkeypatch):
    monkeypatch.setattr(caches, "STATES", 2)
    cache, method = EvalCache(), perlclip.create_method("zero-shot", backbone)
    prepared = Count(monkeypatch, "prepare", type(method))
    lists = [replace(images, template=template).classes for template in ("{}", "a {}", "the {}")]
    calls = Counter()
    for number in (0, 1, 0, 2, 0, 1):
        calls[number] += prepared.during(lambda n=number: cache.of("").class_state(method, lists[n], novel=False))
    assert calls == {0: 1, 1: 2, 2: 1} and len(cache._states) == 2


def test_an_error_leaves_nothing_behind(backbone, images, monkeypatch):
    cache = EvalCache()
    method = perlclip.create_method("perl", backbone)
    monkeypatch.setattr(type(method), "similarity", None)
    with pytest.raises(TypeError):
        answers(method, images, cache.of("images"))
    assert cache.used == 0
