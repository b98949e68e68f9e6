"""Heads: what they add to a text classifier, for which classes, at every step, and that it is saved whole."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip import Classifier, PerlclipError
from perlclip.adapters.folder import CONFIG, OWN_HASH, WEIGHTS, Adapter, read_info
from perlclip.heads.answering import Answering
from perlclip.heads.head import FEATURES, Head, features, make_head
from perlclip.text.classes import Classes
from tests.common import check_early_stops, loud, random_pixels

NAMES = ("red", "green grass", "blue")
OTHERS = ("violet", "Green_Grass", "white", "red")


@pytest.fixture(scope="module")
def images(backbone):
    return random_pixels(backbone, 6)


def random_head(backbone, width=1, **numbers) -> Head:
    generator = torch.Generator().manual_seed(1)
    weight_CE = torch.randn(len(NAMES), width * backbone.embed_dim, generator=generator).double()
    return make_head(NAMES, (weight_CE, torch.randn(len(NAMES), generator=generator).double()), **numbers)


def answering(method, names, head) -> Answering:
    return Answering(method, method.class_state(Classes.spoken(names)), head)


@pytest.mark.parametrize("name", ["perl", "zero-shot", "coop", "cocoop", "mmrl"])
@torch.no_grad()
def test_for_trained_classes_it_is_the_sum(backbone, images, name):
    method = perlclip.create_method(name, backbone, seed=3).eval()
    head = random_head(backbone, text=0.5, scale=2.0, share=0.25, features="mean")
    asked = answering(method, NAMES, head)
    v_KBE = method.encode_image_steps(images)
    seen_KBE = torch.stack([F.normalize(v_KBE[: k + 1].mean(0), dim=-1) for k in range(len(v_KBE))])
    zero = perlclip.create_method("zero-shot", backbone)
    zero_BC = zero.logits(images, zero.class_state(asked.state.classes))
    text_KBC = 0.25 * method.trajectory(images, asked.state) + 0.75 * zero_BC
    expected = 0.5 * text_KBC + 2 * (seen_KBE @ head.weight_CE.T + head.bias_C)
    torch.testing.assert_close(asked.trajectory(images), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(asked.logits(images), expected[-1], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_list_with_new_classes_keeps_what_the_texts_give_to_the_trained_ones(backbone, images):
    """However the names are spelt and ordered; among the trained ones it is the sum again."""
    method = perlclip.create_method("perl", backbone, seed=3, steps=2).eval()
    asked, plain = (answering(method, OTHERS, head) for head in (random_head(backbone, scale=5.0), None))
    got, text = (each.trajectory(images).softmax(-1) for each in (asked, plain))
    torch.testing.assert_close(got[..., [0, 2]], text[..., [0, 2]])
    assert (got[..., [1, 3]] - text[..., [1, 3]]).abs().max() > 0.01
    alone = answering(method, ("green grass", "red"), random_head(backbone, scale=5.0)).trajectory(images).softmax(-1)
    among = got[..., [1, 3]]
    torch.testing.assert_close(among / among.sum(-1, keepdim=True), alone, atol=1e-4, rtol=1e-4)
    moved = answering(method, OTHERS, random_head(backbone, scale=5.0, offset=1.5)).trajectory(images).softmax(-1)
    odds = (moved[..., [1, 3]].sum(-1) / moved[..., [0, 2]].sum(-1)).log()
    torch.testing.assert_close(odds, (among.sum(-1) / got[..., [0, 2]].sum(-1)).log() + 1.5, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_new_classes_alone_do_not_see_it(backbone, images):
    method = perlclip.create_method("perl", backbone, seed=3).eval()
    asked = answering(method, ("violet", "white"), random_head(backbone, scale=5.0))
    assert torch.equal(asked.logits(images), method.trajectory(images, asked.state)[-1])
    mixed = answering(method, ("violet", "white"), random_head(backbone, scale=5.0, share=0.0))
    zero = perlclip.create_method("zero-shot", backbone)
    assert torch.allclose(mixed.logits(images), zero.logits(images, zero.class_state(mixed.state.classes)), atol=1e-4)


@torch.no_grad()
def test_a_head_that_does_nothing_changes_no_bit(backbone, images):
    method = perlclip.create_method("perl", backbone, seed=3).eval()
    asked = answering(method, NAMES, random_head(backbone, scale=0.0))
    assert torch.equal(asked.logits(images), method.logits(images, asked.state))


@pytest.mark.parametrize(("readout", "kind"), [("last", "first"), ("last", "all"), ("mean", "mean"), ("mean", "last")])
@torch.no_grad()
def test_an_image_that_stops_early_is_read_up_to_there(backbone, images, readout, kind):
    method = perlclip.create_method("perl", backbone, seed=3, readout=readout).eval()
    width = 5 if kind == "all" else 1
    head = random_head(backbone, width=width, text=0.5, scale=3.0, share=0.5, features=kind)
    asked = answering(method, NAMES, head)
    check_early_stops(asked, images)


@pytest.mark.parametrize("how", ["gradient", "occlusion"])
def test_evidence_is_that_of_the_answer_given(backbone, images, how):
    """With weights of 0 for the texts, what a patch says is what it says to ridge regression."""
    method = loud(perlclip.create_method("perl", backbone, seed=3, steps=2, readout="mean")).eval()
    state, classes_BM = method.class_state(Classes.spoken(NAMES)), torch.tensor([[0, 2]] * len(images))
    maps = {
        name: perlclip.analysis.evidence_maps(method, images, classes_BM, state, how, head)
        for name, head in {
            "bare": None,
            "head": random_head(backbone, text=0.0, scale=3.0),
            "both": random_head(backbone, text=1.0, scale=3.0),
        }.items()
    }
    assert not torch.allclose(maps["bare"].maps_KBMGG, maps["both"].maps_KBMGG, atol=1e-3)
    total = maps["bare"].maps_KBMGG + maps["head"].maps_KBMGG
    torch.testing.assert_close(maps["both"].maps_KBMGG, total, atol=1e-3, rtol=1e-3)
    asked = answering(method, NAMES, random_head(backbone, text=1.0, scale=3.0))
    with torch.no_grad():
        expected = asked.trajectory(images)[..., [0, 2]]
    torch.testing.assert_close(maps["both"].logits_KBM, expected, atol=1e-3, rtol=1e-3)


def saved(backbone, tmp_path, **numbers):
    method = perlclip.create_method("perl", backbone, seed=3, steps=2)
    adapter = Adapter(method=method, class_names=NAMES, template="a {}.", head=random_head(backbone, **numbers))
    return adapter, adapter.save(tmp_path / "adapter")


@pytest.mark.parametrize("centered", [False, True])
def test_saved_and_loaded_it_answers_the_same(backbone, tmp_path, images, centered):
    numbers = dict(scale=4.0, share=0.5, strength=0.3, offset=0.25, centered=centered)
    adapter, folder = saved(backbone, tmp_path, **numbers)
    loaded = perlclip.load_adapter(folder, backbone=backbone)
    assert loaded.fingerprint == adapter.fingerprint == read_info(folder)["weights_sha256"]
    with torch.no_grad():
        one, two = (answering(each.method, NAMES, each.head).logits(images) for each in (adapter, loaded))
    assert torch.equal(one, two)
    assert loaded.num_learned == adapter.method.num_trainable + 3 * (backbone.embed_dim + 1)
    info = read_info(folder)
    assert info["format_version"] == (5 if centered else 2) and info["head"]["numbers"] == 3 * (backbone.embed_dim + 1)
    assert loaded.head.centered == centered and ("centered" in info["head"]) == centered
    for changes in (dict(share=0.75), dict(centered=not centered)):
        other = replace(adapter, head=replace(adapter.head, **changes))
        assert other.fingerprint != adapter.fingerprint, "a mixture is a part of what an adapter is"
    perlclip.save_adapter(loaded, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_a_mixture_alone_has_no_weights(backbone, tmp_path):
    adapter, folder = saved(backbone, tmp_path, scale=0.0, share=0.0)
    assert adapter.head.numbers == 0 and (folder / WEIGHTS).stat().st_size < 8000
    assert perlclip.load_adapter(folder, backbone=backbone).head.share == 0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda info: info["head"].update(scale=9.0), "not those in its tensor file"),
        (lambda info: info["head"].update(centered=True), "not those in its tensor file"),
        (lambda info: info["head"].update(centered=1.0), "not those in its tensor file"),
        (lambda info: info["head"].update(features="sum"), "unknown features of a head 'sum'"),
        (lambda info: info["head"].pop("strength"), "lacks some of its settings"),
        (lambda info: info.pop("head"), "versions 2 to 4 have a head"),
        (lambda info: info.update(format_version=1), "version 1 has none"),
        (lambda info: info.update(class_names=["red", "blue"]), "a head for 2 classes has tensors of shape"),
    ],
)
def test_a_damaged_head_is_refused(backbone, tmp_path, edit, words):
    _, folder = saved(backbone, tmp_path, scale=4.0)
    info = json.loads((folder / CONFIG).read_text())
    del info[OWN_HASH]  # as in files of 0.1.0
    edit(info)
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in info.items() if key != OWN_HASH}))
    with pytest.raises(PerlclipError, match=words):
        perlclip.load_adapter(folder, backbone=backbone)


def test_classifier_and_evaluate_answer_with_it_unless_told_not_to(backbone, tmp_path, tree):
    adapter, _ = saved(backbone, tmp_path, scale=50.0)
    data = perlclip.data.for_classes(perlclip.load_images(tree), NAMES)
    bare = replace(adapter, head=None)
    with_head, without, never = (
        [p.top for p in Classifier(each, head=head).predict(data.images, top_k=3)]
        for each, head in ((adapter, True), (adapter, False), (bare, True))
    )
    assert without == never != with_head
    tested = {head: perlclip.evaluate(adapter, data, head=head, progress=False) for head in (True, False)}
    best = [max(top, key=lambda pair: pair[1])[0] for top in with_head]
    assert [NAMES[i] for i in tested[True].predictions_KB[-1].tolist()] == best
    assert torch.equal(
        tested[False].probabilities_BC, perlclip.evaluate(adapter.method, data, progress=False).probabilities_BC
    )
    # One look gives both.
    without = tested[True].without_head
    assert without is not None and tested[False].without_head is None
    torch.testing.assert_close(without.probabilities_BC, tested[False].probabilities_BC)
    assert without.step_accuracy == tested[False].step_accuracy


def test_features_of_a_method_that_answers_at_once_are_its_embedding():
    v_1BE = F.normalize(torch.randn(1, 5, 8), dim=-1)
    for kind in FEATURES:
        torch.testing.assert_close(features(kind, v_1BE, None), v_1BE)


@pytest.mark.parametrize("kind", FEATURES)
def test_features_are_unit_vectors_after_every_step_and_know_nothing_of_later_ones(kind):
    v_kBE = F.normalize(torch.randn(4, 5, 8), dim=-1)
    seen = features(kind, v_kBE, 3)
    torch.testing.assert_close(seen.norm(dim=-1), torch.ones(4, 5))
    for k in range(4):
        torch.testing.assert_close(features(kind, v_kBE[: k + 1], 3)[-1], seen[k])
    width = 8 * (4 if kind == "all" else 1)
    assert seen.shape == (4, 5, width)
