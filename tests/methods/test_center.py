"""The center: the shots' mean embedding taken off images before they meet texts."""

import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

import perlclip
from perlclip import PerlclipError
from perlclip.data.loading import fixed_views
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.methods.parts import CENTER
from perlclip.reference import plain_form
from perlclip.text.classes import Classes
from perlclip.training.shots import center_of
from tests.common import loud, random_pixels

QUICK = perlclip.Recipe(lr=1e-3, epochs=1, crop_scale=(0.8, 1.0))


@pytest.fixture(scope="module")
def shots():
    return load_toybox("tiny_toys").train.few_shot(4, random.Random(1)).base()


def centered(backbone, name="perl", **settings):
    method = loud(perlclip.create_method(name, backbone, center=0.5, **settings)).eval()
    method.take_center(torch.nn.functional.normalize(torch.randn(backbone.embed_dim), dim=0))
    return method


@pytest.mark.parametrize("readout", ["last", "mean", "rising"])
@torch.no_grad()
def test_every_step_is_met_without_the_center(tiny, readout):
    method, pixels = centered(tiny, readout=readout, steps=2), random_pixels(tiny, 5)
    state = method.class_state(["a cat", "a dog", "an old boat"])
    v_KBE, t_KCE = method.encode_image_steps(pixels), method.encode_text_steps(state)
    l_KBC = torch.stack([tiny.logit_scale * (v - method.center_E) @ t.T for v, t in zip(v_KBE, t_KCE, strict=True)])
    weights_K = {"last": [0.0, 0, 1], "mean": [1.0, 1, 1], "rising": [1.0, 2, 3]}[readout]
    p_BC = torch.einsum("k,kbc->bc", torch.tensor(weights_K), l_KBC.softmax(-1)) / sum(weights_K)
    assert torch.allclose(method.logits(pixels, state).softmax(-1), p_BC, atol=1e-5)
    bare = replace(method.config, center=0.0)
    assert (method.step_logits(pixels, state) - l_KBC).abs().max() < 1e-4
    other = perlclip.create_method("perl", tiny, **{**bare.as_dict(), "readout": readout})
    other.load_state_dict(method.state_dict())
    assert (other.step_logits(pixels, state) - l_KBC).abs().max() > 0.1, "the center changes something"


def test_it_is_the_mean_of_the_classes_means_however_many_shots_each_has(tiny, shots):
    uneven = shots.select([0, 1, 2, *range(4, len(shots))])
    views = fixed_views(uneven, tiny.preprocess, 8, tiny.device, 0)
    v_NE = torch.cat([tiny.encode_image(pixels) for pixels, _ in views])
    wanted = torch.stack([v_NE[where].mean(0) for where in uneven.by_class().values()]).mean(0)
    assert torch.allclose(center_of(perlclip.create_method("perl", tiny), uneven), wanted, atol=1e-6)
    assert not torch.allclose(v_NE.mean(0), wanted, atol=1e-4)


def test_fit_centers_by_its_recipe_and_trains_as_without(tiny, shots):
    """Unless `loss_center` says so, the center is there for answers alone."""
    kinds = [perlclip.create_method("perl", tiny, readout="rising", center=share) for share in (CENTER, 0.0)]
    one, other = (perlclip.fit(m, shots, recipe=QUICK, lens="plain", head=False, thresholds=False) for m in kinds)
    assert all(torch.equal(a, b) for a, b in zip(one.method.parameters(), other.method.parameters(), strict=True))
    assert torch.allclose(one.method.center_E, CENTER * center_of(one.method, shots), atol=1e-6)
    assert not other.method.center_E.any() and one.num_learned == other.num_learned + tiny.embed_dim
    few = shots.select(range(8))
    found = perlclip.fit(perlclip.create_method("gaussian", tiny), few, lens="plain")
    assert found.method.center == CENTER and found.method.center_E.any()
    kept = perlclip.fit(perlclip.create_method("gaussian", tiny, center=0.25), few, lens="plain")
    assert kept.method.center == 0.25, "what its maker chose is kept"


def test_a_method_that_was_fitted_before_is_not_changed_by_another_fit(tiny, shots):
    method = perlclip.create_method("gaussian", tiny)
    first = perlclip.fit(method, shots.select(range(8)), lens="plain")
    before = first.method.center_E.clone()
    perlclip.fit(method, shots, lens="plain")
    assert torch.equal(first.method.center_E, before) and method.center == 0


def test_adapters_keep_it_and_are_refused_without(tiny, tmp_path):
    method, pixels = centered(tiny, readout="rising"), random_pixels(tiny, 3)
    perlclip.save_adapter(method, tmp_path / "a", class_names=["cat", "dog"], template="a {}.")
    loaded = perlclip.load_adapter(tmp_path / "a", backbone=tiny)
    state = method.class_state(["cat", "dog"])
    with torch.no_grad():
        assert torch.equal(loaded.method.logits(pixels, state), method.logits(pixels, state))
    weights = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert weights["center"].shape == (tiny.embed_dim,)
    bare = perlclip.create_method("perl", tiny)
    perlclip.save_adapter(bare, tmp_path / "b", class_names=["cat"], template="a {}.")
    assert "center" not in load_file(tmp_path / "b" / "adapter_model.safetensors")
    for broken, sentence in (({}, "missing"), ({"center": torch.zeros(3)}, "shape")):
        rest = {key: each for key, each in weights.items() if key != "center"}
        save_file({**rest, **broken}, tmp_path / "a" / "adapter_model.safetensors", {"format": "pt"})
        with pytest.raises(PerlclipError):
            perlclip.load_adapter(tmp_path / "a", backbone=tiny)
        with pytest.raises(PerlclipError, match=sentence):
            perlclip.adapters.folder._put_weights(method, {**rest, **broken}, tmp_path)


@torch.no_grad()
def test_zero_shot_is_centered_where_the_head_says_so(tiny, shots):
    """Else what an adapter's share of it says is the frozen CLIP's own answer; a list with new classes adds up."""
    result = perlclip.fit(perlclip.create_method("gaussian", tiny), shots, lens="plain")
    pixels, names = random_pixels(tiny, 4), list(shots.class_names)
    state = result.method.class_state(names)
    half = Answering(result.method, state, replace(result.head, share=0.0).texts_alone())
    plain = tiny.similarity(tiny.encode_image(pixels), tiny.encode_text(names))
    assert (half.logits(pixels) - plain).abs().max() < 1e-4
    told = Answering(result.method, state, replace(result.head, share=0.0, centered=True).texts_alone())
    wanted = result.method.similarity(tiny.encode_image(pixels), tiny.encode_text(names))
    assert (told.logits(pixels) - wanted).abs().max() < 1e-4 and (wanted - plain).abs().max() > 0.1
    # Trained and new classes: the rule that says how probable either are reads centered texts, too.
    every = Classes((*names, "grand piano"), shots.template)
    mixed = Answering(result.method, result.method.class_state(every), result.head)
    rule, kept = result.head.unseen.among, result.head.gaussians
    assert mixed.mixed and mixed.mass is not None and rule.text > 0 and kept is not None
    v_BE, t_CE = tiny.encode_image(pixels), tiny.encode_text(every.prompts())
    scores = v_BE @ mixed.mass[0].T + mixed.mass[1]
    w_CE, b_C = kept.scores_of(kept.means_CE, rule.strength)
    wanted = rule.scale * (v_BE.double() @ w_CE.T + b_C) + result.head.unseen.offset
    wanted = wanted + rule.text * result.method.similarity(v_BE, t_CE)[:, : len(names)]
    assert (scores[:, : len(names)] - wanted).abs().max() < 1e-3


def test_the_loss_takes_off_a_share_of_its_own(any_backbone):
    """By the plain form, and by hand; without a center for answers there is nothing to take off."""
    pixels, names, labels = random_pixels(any_backbone, 3), ["cat", "old boat"], torch.tensor([0, 1, 1])
    method = centered(any_backbone, steps=2, loss_center=0.3, loss_scale=0.25, anchor=0.0)
    state = method.class_state(Classes(tuple(names), "a {}."))
    loss = method.loss(pixels, labels, state)
    v_BE, t_CE = method.encode_image(pixels), method.encode_text(state)
    l_BC = 0.25 * any_backbone.logit_scale * (v_BE - 0.3 / 0.5 * method.center_E) @ t_CE.T
    assert abs(loss - torch.nn.functional.cross_entropy(l_BC, labels)) < 1e-5
    clip = CLIPModel.from_pretrained(any_backbone.name, attn_implementation="eager")
    assert (
        abs(plain_form("perl")(clip, any_backbone.tokenizer, method).loss(pixels, labels, names, "a {}.") - loss) < 1e-4
    )
    for other in (dict(loss_center=0.0), dict(center=0.0)):
        method.config = replace(method.config, **other)
        l_BC = 0.25 * any_backbone.logit_scale * v_BE @ t_CE.T
        assert abs(method.loss(pixels, labels, state) - torch.nn.functional.cross_entropy(l_BC, labels)) < 1e-5


def test_nothing_is_saved_of_a_loss_that_has_no_center(tiny):
    assert "loss_center" not in perlclip.create_method("perl", tiny, loss_center=0.5).config.as_dict()
    assert perlclip.create_method("perl", tiny, center=0.5, loss_center=0.5).config.as_dict()["loss_center"] == 0.5


def test_fit_trains_through_it_from_the_first_step_on(tiny, shots):
    """The center is known before the first step, of the shots that are trained on."""
    one, other = (
        perlclip.fit(
            perlclip.create_method("perl", tiny, center=CENTER, loss_center=share), shots, recipe=QUICK, lens="plain",
            head=False, thresholds=False,
        )
        for share in (0.5, 0.0)
    )  # fmt: skip
    assert one.losses[0] != other.losses[0], "from the first step on"
    assert not torch.equal(one.method.projectors["text"].up.weight, other.method.projectors["text"].up.weight)


@torch.no_grad()
@pytest.mark.parametrize("name", ["perl", "gaussian"])
def test_the_plain_form_takes_it_off_as_well(any_backbone, name):
    pixels, names = random_pixels(any_backbone, 3), ["cat", "old boat"]
    method = centered(any_backbone, name, **({"readout": "rising", "steps": 2} if name == "perl" else {}))
    clip = CLIPModel.from_pretrained(any_backbone.name, attn_implementation="eager")
    found = plain_form(name)(clip, any_backbone.tokenizer, method).logits(pixels, names, "a {}.")
    wanted = method.logits(pixels, method.class_state(Classes(tuple(names), "a {}.")))
    assert (found.log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < 1e-4


def test_a_training_that_is_resumed_has_the_same_center(tiny, shots, tmp_path):
    few, path = shots.select(range(8)), tmp_path / "checkpoint.safetensors"
    how = dict(recipe=QUICK, lens="plain", head=False, thresholds=False, checkpoint=path)
    first = perlclip.fit(perlclip.create_method("perl", tiny, center=CENTER), few, **how)
    again = perlclip.fit(perlclip.create_method("perl", tiny, center=CENTER, seed=5), few, resume=True, **how)
    assert first.method.center_E.any() and torch.equal(again.method.center_E, first.method.center_E)
    assert torch.equal(again.method.projectors["text"].up.weight, first.method.projectors["text"].up.weight)


def test_another_recipe_takes_the_center_back(tiny, shots):
    method, pixels = perlclip.create_method("perl", tiny, recipe="strong"), random_pixels(tiny, 3)
    how = dict(lens="plain", head=False, thresholds=False)
    perlclip.fit(method, shots.select(range(8)), **how)
    assert method.center == CENTER
    perlclip.fit(method, shots.select(range(8)), recipe="fast", **how)
    state = method.class_state(["cat", "dog"])
    with torch.no_grad():
        plain = tiny.similarity(method.encode_image(pixels), method.encode_text(state))
        assert method.center == 0 and torch.equal(method.logits(pixels, state), plain)
