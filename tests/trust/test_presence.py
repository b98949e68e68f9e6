"""Several labels for an image: sigmoids of scores that no other class has a part in, and a threshold from shots."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import perlclip
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.trust.presence import Presence, Sigmoid
from tests.common import loud, random_pixels


def test_a_fit_finds_the_sigmoid_that_made_the_pairs():
    """Equal weights: half way between the two kinds it is 1/2, and the slope is that of their log-odds."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4000, 5, generator=generator) * 2 + 20
    labels = torch.randint(0, 5, (4000,), generator=generator)
    scores[torch.arange(4000), labels] += 6  # normal with equal deviation: log-odds 6 (s - 23) / 4
    found = Sigmoid.fit(scores, labels)
    assert found.slope == pytest.approx(1.5, rel=0.05) and -found.offset / found.slope == pytest.approx(23, abs=0.1)
    assert 0.5 < found.threshold < 0.95, "of the pairs, four in five are of the other kind"


@pytest.mark.parametrize("apart", [0.0, 50.0])
def test_a_fit_stays_finite_where_pairs_are_all_alike_or_wholly_apart(apart):
    scores = torch.zeros(3, 2)
    scores[[0, 1, 2], [0, 1, 0]] = apart
    found = Sigmoid.fit(scores, torch.tensor([0, 1, 0]))
    assert 0 < found.slope <= 100 and abs(found.offset) < 1e4
    if apart:
        p = found.probabilities(scores)
        assert torch.equal(p >= found.threshold, scores > 0)


def test_a_threshold_is_the_best_by_f1():
    scores = torch.tensor([[3.0, 1.0], [0.9, 2.0], [2.5, 0.5], [0.2, 0.1]])
    found = Sigmoid.fit(scores, torch.tensor([0, 1, 0, 1]))
    said = found.probabilities(scores) >= found.threshold
    assert said.tolist() == [[True, False], [False, True], [True, False], [False, False]]


def test_what_is_read_is_checked():
    good = {"answers": [1.0, -2.0, 0.5], "texts": [0.5, 1.0, 0.25]}
    assert Presence.from_json(good).as_json() == good
    for bad in (
        {},
        {**good, "texts": [1.0, 2.0]},
        {**good, "texts": [0.0, 1.0, 0.5]},
        {**good, "answers": ["1", 0, 0]},
    ):
        with pytest.raises(perlclip.PerlclipError):
            Presence.from_json(bad)


@pytest.fixture(scope="module")
def pictures():
    return [np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8) for i in range(3)]


def test_a_class_does_not_depend_on_the_others(family_backbone, pictures):
    """A SigLIP needs nothing held out: its own bias, and a half."""
    backbone = family_backbone("siglip")
    method = loud(perlclip.create_method("perl", backbone, readout="rising"))
    few, many = (perlclip.Classifier(method, names) for names in (["cat", "ox"], ["eel", "cat", "striped horse", "ox"]))
    for one, other in zip(few.predict(pictures, multi_label=True, top_k=2),
                          many.predict(pictures, multi_label=True, top_k=4), strict=True):  # fmt: skip
        assert dict(one.top) == pytest.approx({name: p for name, p in other.top if name in ("cat", "ox")}, abs=1e-5)
        assert one.labels == tuple(name for name, p in one.top if p >= 0.5)
    with torch.no_grad():
        pixels = torch.stack([backbone.preprocess.test_view(perlclip.data.read_image(one)) for one in pictures])
        state = method.class_state(perlclip.text.classes.Classes(("cat", "ox")))
        want = torch.sigmoid(method.step_logits(pixels, state)[-1] + backbone.logit_bias)
    assert dict(few.predict(pictures[0], multi_label=True, top_k=2).top) == pytest.approx(
        dict(zip(("cat", "ox"), want[0].tolist(), strict=True)), abs=1e-5
    )


def test_a_clip_has_nothing_to_go_by_without_images_held_out(tiny, pictures):
    classifier = perlclip.Classifier(perlclip.create_method("zero-shot", tiny), ["cat", "ox"])
    with pytest.raises(perlclip.PerlclipError, match="multi_label=True needs images that were held out"):
        classifier.predict(pictures, multi_label=True)
    for other in (dict(reject=True), dict(steps=0), dict(max_ms=5.0)):
        with pytest.raises(perlclip.PerlclipError):
            classifier.predict(pictures, multi_label=True, **other)


@pytest.fixture(scope="module")
def fitted(tiny):
    shots = load_toybox("noisy_shapes").train.base()
    some = [i for c in range(4) for i in [j for j, label in enumerate(shots.labels) if label == c][:6]]
    four = replace(shots.select(some), class_names=shots.class_names[:4])
    return perlclip.fit(perlclip.create_method("ridge", tiny), four, progress=False), four


def test_an_adapter_knows_from_its_shots(fitted, tiny, tmp_path):
    adapter, shots = fitted
    known = adapter.trust.presence
    perlclip.save_adapter(adapter, tmp_path / "a")
    loaded = perlclip.load_adapter(tmp_path / "a", backbone=tiny)
    assert loaded.trust.presence == known is not None
    classifier = perlclip.Classifier(loaded)
    found = classifier.predict(shots.images, multi_label=True, top_k=4)
    right = [shots.class_names[int(y)] in one.labels for one, y in zip(found, shots.labels, strict=True)]
    assert sum(right) >= 0.8 * len(right) and sum(len(one.labels) for one in found) < 1.5 * len(found)
    pixels = torch.stack([tiny.preprocess.test_view(perlclip.data.read_image(one)) for one in shots.images[:2]])
    with torch.no_grad():
        both, texts = Answering(loaded.method, loaded.method.class_state(shots.classes), loaded.head).scores(pixels)
    p = torch.sigmoid(known.answers.slope * both + known.answers.offset)
    assert dict(found[0].top) == pytest.approx(dict(zip(shots.class_names, p[0].tolist(), strict=True)), abs=1e-5)
    novel = perlclip.Classifier(loaded, ["green ring", *shots.class_names[:1]])
    one = dict(novel.predict(shots.images[0], multi_label=True, top_k=2).top)
    assert one[shots.class_names[0]] == pytest.approx(dict(found[0].top)[shots.class_names[0]], abs=1e-5)
    bare = dict(perlclip.Classifier(loaded, head=False).predict(shots.images[0], multi_label=True, top_k=4).top)
    q = torch.sigmoid(known.texts.slope * texts + known.texts.offset)
    assert bare == pytest.approx(dict(zip(shots.class_names, q[0].tolist(), strict=True)), abs=1e-5)


def test_own_images_set_it_anew(fitted, tiny):
    adapter, shots = fitted
    classifier = perlclip.Classifier(adapter)
    trust = classifier.calibrate(shots, progress=False)
    assert trust.presence is not None and trust.presence != adapter.trust.presence
    assert (
        perlclip.Classifier(replace(adapter, trust=trust)).predict(shots.images[0], multi_label=True).labels is not None
    )


def test_the_score_of_a_readout_that_looks_back_is_the_last_steps(tiny):
    method = loud(perlclip.create_method("perl", tiny, readout="mean"))
    pixels, state = random_pixels(tiny), method.class_state(["cat", "ox"])
    with torch.no_grad():
        found = method.scores(*method.look(pixels, state), state)
        torch.testing.assert_close(found, method.step_logits(pixels, state)[-1])
