"""Batches: processes that load them, memory that is pinned for them."""

import threading
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch.utils.data import dataloader

import perlclip
from perlclip import PerlclipError
from perlclip.data import loading, readable
from perlclip.data.images import Held
from perlclip.methods import Recipe


def test_workers_start_once_for_all_epochs(backbone, tree, monkeypatch):
    """They used to start anew every epoch."""
    started = []
    begin = dataloader._MultiProcessingDataLoaderIter.__init__
    monkeypatch.setattr(
        dataloader._MultiProcessingDataLoaderIter,
        "__init__",
        lambda self, loader: (started.append(loader.num_workers), begin(self, loader))[1],
    )
    images = perlclip.load_images(tree).select(range(6))
    runs = []
    for workers in (0, 1):
        method = perlclip.create_method("coop", backbone)
        recipe = Recipe(epochs=3)
        how = dict(recipe=recipe, workers=workers, lens="plain", head=False, progress=False)
        runs.append(perlclip.fit(method, images, **how).losses)
    assert started == [1] and runs[0] == runs[1]


def test_memory_is_pinned_for_cuda_only(backbone, tree, monkeypatch):
    """It used to be wherever there is CUDA: a context of its own for every process that works on the CPU."""
    pinned = []
    loader = loading.DataLoader
    monkeypatch.setattr(loading, "DataLoader", lambda *a, **k: (pinned.append(k["pin_memory"]), loader(*a, **k))[1])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    images = perlclip.load_images(tree).select(range(2))
    list(loading.fixed_views(images, backbone.preprocess, 2, backbone.device))
    assert pinned == [False]


def test_bytes_are_images(backbone, tree):
    """In memory a set has the same fingerprint and the same views; what does not fit stays on disk."""
    images = perlclip.load_images(tree)
    pixels, none = readable(images)
    assert none == [] and readable(pixels)[0] is pixels
    assert all(isinstance(image.data, Image.Image) for image in pixels.images)
    size = images.images[0].stat().st_size
    files = readable(images, hold=size)[0]  # not enough for the pixels of one, and for the file of one alone
    assert size < 40 * 46 * 3
    assert isinstance(files.images[0].data, bytes) and files.images[-1] is images.images[-1]
    known = replace(images, images=[*pixels.images[:4], *images.images[4:]])  # of which there was room for five
    more = readable(known, hold=sum(3 * image.data.width * image.data.height for image in pixels.images[:5]))[0]
    held = [i for i, image in enumerate(more.images) if isinstance(image, Held) and isinstance(image.data, Image.Image)]
    assert held == [0, 1, 2, 3, 4]
    assert pixels.fingerprint() == files.fingerprint() == images.fingerprint()
    classifier = perlclip.Classifier(perlclip.create_method("zero-shot", backbone), images.class_names)
    assert classifier.predict(pixels.images[0]) == classifier.predict(images.images[0])
    assert classifier.predict(files.images[0]) == classifier.predict(images.images[0])


def test_views_made_ahead_by_threads_are_the_same(backbone, tree):
    """What a card's batches come from: same order and same views, and an image that cannot be read stops it."""
    images = perlclip.load_images(tree).select(range(6))
    order = [(0, [3, 1]), (0, [5]), (1, [1, 0, 2]), (1, [4]), (2, [3])]
    made = loading._Loaded(images, backbone.preprocess, (0.5, 1.0), seed=3)
    wanted = list(loading.random_views(images, backbone.preprocess, (0.5, 1.0), order, backbone.device, seed=3))
    found = list(loading._ahead(made, order))
    assert len(found) == len(order)
    for (pixels, labels, lost), (same, names) in zip(found, wanted, strict=True):
        assert torch.equal(pixels, same) and torch.equal(labels, names) and lost == []
    sources = [*images.images[:5], b"no image"]
    broken = perlclip.ImageSet(images=sources, labels=images.labels, class_names=images.class_names)
    coming = loading._ahead(loading._Loaded(broken, backbone.preprocess), order)
    assert len(next(coming)[0]) == 2
    with pytest.raises(PerlclipError, match="is not an image"):
        next(coming)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("views")]
