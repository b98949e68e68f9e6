"""How PERL's steps become an answer: each readout by its formula, and everywhere that something answers."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip.adapters.folder import read_info
from perlclip.methods.base import config_dict
from perlclip.methods.perl import READOUTS, RULES, Perl, PerlConfig
from perlclip.methods.recipe import Recipe, Rule, apply_rules
from tests.common import CLOSE, loud, random_pixels
from tests.methods.test_perl import PROMPTS, plain_of

LOOKING_BACK = [name for name in READOUTS if name != "last"]


def read(method: Perl, v_KBE: torch.Tensor, t_KCE: torch.Tensor) -> torch.Tensor:
    """The answer of these steps by the formula."""
    tau = method.backbone.logit_scale
    l_KBC = tau * torch.einsum("kbe,kce->kbc", v_KBE, t_KCE)
    p_KBC, rising_K11 = l_KBC.softmax(-1), torch.arange(1.0, len(l_KBC) + 1)[:, None, None]
    rising_BC = (rising_K11 * p_KBC).sum(0) / rising_K11.sum()
    return {"last": l_KBC[-1], "mean": p_KBC.mean(0).log(), "rising": rising_BC.log()}[method.config.readout]


@pytest.mark.parametrize("modalities", ["both", "vision", "text"])
@pytest.mark.parametrize("readout", READOUTS)
@torch.no_grad()
def test_the_answer_after_each_step_is_the_formula_of_the_steps_so_far(backbone, readout, modalities):
    method = loud(perlclip.create_method("perl", backbone, readout=readout, modalities=modalities))
    pixels, state = random_pixels(backbone), method.class_state(PROMPTS)
    v_KBE, t_KCE = method.encode_image_steps(pixels), method.encode_text_steps(state)
    found = method.trajectory(pixels, state)
    for k in range(5):
        torch.testing.assert_close(found[k], read(method, v_KBE[: k + 1], t_KCE[: k + 1]), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(method.logits(pixels, state), found[-1], **CLOSE)
    alone = backbone.logit_scale * torch.einsum("kbe,kce->kbc", v_KBE, t_KCE)
    torch.testing.assert_close(method.step_logits(pixels, state), alone, **CLOSE)
    assert torch.allclose(found, alone, atol=1e-3) == (readout == "last"), "the test tells readouts apart"


@torch.no_grad()
def test_the_mean_is_one_of_probabilities(backbone):
    method = loud(perlclip.create_method("perl", backbone, readout="mean"))
    pixels, state = random_pixels(backbone), method.class_state(PROMPTS)
    mean_BC = method.step_logits(pixels, state).softmax(-1).mean(0)
    torch.testing.assert_close(method.logits(pixels, state).softmax(-1), mean_BC, **CLOSE)


@pytest.mark.parametrize("readout", LOOKING_BACK)
def test_equals_the_plain_form(any_backbone, readout):
    method = loud(perlclip.create_method("perl", any_backbone, readout=readout, depth=3, loss_scale=0.25))
    plain, pixels, labels = plain_of(method), random_pixels(any_backbone), torch.tensor([0, 2, 1])
    state = method.class_state(PROMPTS)
    with torch.no_grad():
        want = plain.trajectory(pixels, PROMPTS, "{}")
        torch.testing.assert_close(method.trajectory(pixels, state), want, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(plain.logits(pixels, PROMPTS, "{}"), want[-1], **CLOSE)
    ours, theirs = method.loss(pixels, labels, state), plain.loss(pixels, labels, PROMPTS, "{}")
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_the_loss_is_softer_and_the_answer_is_not(backbone):
    usual, soft = (loud(perlclip.create_method("perl", backbone, loss_scale=s, anchor=0.0)) for s in (1.0, 0.25))
    pixels, labels = random_pixels(backbone), torch.tensor([0, 2, 1])
    states = [method.class_state(PROMPTS) for method in (usual, soft)]
    with torch.no_grad():
        logits_BC = usual.logits(pixels, states[0])
        assert torch.equal(soft.logits(pixels, states[1]), logits_BC)
        torch.testing.assert_close(soft.loss(pixels, labels, states[1]), F.cross_entropy(logits_BC / 4, labels))
        torch.testing.assert_close(usual.loss(pixels, labels, states[0]), F.cross_entropy(logits_BC, labels))


@pytest.mark.parametrize("readout", LOOKING_BACK)
def test_the_readout_does_not_change_the_training(backbone, readout):
    ours, paper = (loud(perlclip.create_method("perl", backbone, readout=name)) for name in (readout, "last"))
    pixels, labels = random_pixels(backbone), torch.tensor([0, 2, 1])
    losses = [method.loss(pixels, labels, method.class_state(PROMPTS)) for method in (ours, paper)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(readout="men"), "value of readout 'men'; did you mean 'mean'"),
        (dict(loss_scale=0.0), "loss_scale must be at least 0.001"),
        (dict(loss_scale=float("nan")), "loss_scale must be at least 0.001"),
    ],
)
def test_bad_settings_are_named(backbone, settings, words):
    with pytest.raises(perlclip.PerlclipError, match=words):
        perlclip.create_method("perl", backbone, **settings)


def test_a_recipe_may_want_a_readout():
    rules = [*RULES, Rule(recipes=("soft",), settings={"readout": "mean", "loss_scale": 0.25})]
    assert apply_rules(Recipe(), rules, "soft", "", "")[1] == {"readout": "mean", "loss_scale": 0.25}
    assert apply_rules(Recipe(), rules, "fast", "", "")[1] == {}


# ---- saved, loaded, asked ----


def test_files_have_what_is_not_the_default(tiny, tmp_path):
    """So that adapters, checkpoints and runs of a version without these settings are the same as those of now."""
    kept = dict(readout="mean", loss_scale=0.25)
    for settings in ({}, kept):
        method = perlclip.create_method("perl", tiny, **settings)
        folder = perlclip.save_adapter(method, tmp_path / str(len(settings)), class_names=["cat"], template="{}")
        saved = read_info(folder)["config"]
        assert {key: saved[key] for key in saved.keys() & kept.keys()} == settings
        assert saved == config_dict(method)
        assert perlclip.load_adapter(folder, backbone=tiny).method.config == PerlConfig(**settings)


@pytest.mark.parametrize("readout", READOUTS)
def test_classifier_and_evaluate_answer_by_the_readout(tiny, readout, tmp_path):
    method = loud(perlclip.create_method("perl", tiny, readout=readout))
    pictures = [np.random.default_rng(i).integers(0, 256, (64, 64, 3), dtype=np.uint8) for i in range(6)]
    names = ("cat", "ox", "green tree frog")
    images = perlclip.ImageSet(images=pictures, labels=[0, 1, 2, 0, 1, 2], class_names=names)
    folder = perlclip.save_adapter(method, tmp_path, class_names=names, template=images.template)
    state = method.class_state(images.classes)
    with torch.no_grad():
        pixels = torch.stack([tiny.preprocess.test_view(perlclip.data.images.read_image(one)) for one in pictures])
        want_KBC = method.trajectory(pixels, state)
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=tiny)
    for steps in (None, 4):
        found = classifier.predict(pictures, steps=steps)
        assert [one.probability for one in found] == pytest.approx(want_KBC[-1].softmax(-1).amax(-1).tolist(), abs=1e-5)
    result = perlclip.evaluate(method, images, progress=False)
    assert torch.equal(result.predictions_KB, want_KBC.argmax(-1))
    torch.testing.assert_close(result.probabilities_BC, want_KBC[-1].softmax(-1), **CLOSE)
    if readout != "last":  # which compares an image that stops early with the classes' last texts
        two = perlclip.evaluate(perlclip.load_adapter(folder, backbone=tiny), images, steps=2, progress=False)
        torch.testing.assert_close(two.probabilities_BC, want_KBC[2].softmax(-1), **CLOSE)
