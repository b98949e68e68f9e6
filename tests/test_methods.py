"""The contract, as a matrix: every registered method on every architecture. A new method is a new row by itself."""

import random

import pytest
import torch

import perlclip
from perlclip.data.toybox import load_toybox

PROMPTS = ["a photo of a cat.", "a photo of a striped horse.", "ox"]
OTHER = ["a photo of a tree.", "a photo of a house."]
METHODS = perlclip.list_methods()
TRAINED = [name for name in METHODS if name in perlclip.RECIPES]


@pytest.fixture(params=METHODS)
def method(request, any_backbone):
    return perlclip.create_method(request.param, any_backbone)


@pytest.fixture
def pixels(any_backbone):
    size = any_backbone.preprocess.size
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


def shaken(method, size=0.05):
    torch.manual_seed(1)
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p) * size)
    return method


def test_embeddings_are_unit_vectors_and_logits_their_scaled_cosine(method, pixels):
    state = method.class_state(PROMPTS)
    with torch.no_grad():
        v, t = method.encode_image(pixels), method.encode_text(state)
        assert v.shape == (4, method.backbone.embed_dim) and t.shape == (3, method.backbone.embed_dim)
        for embedding in (v, t):
            torch.testing.assert_close(embedding.norm(dim=-1), torch.ones(len(embedding)))
        torch.testing.assert_close(method.logits(pixels, state), method.backbone.logit_scale * v @ t.T)


def test_parameters_are_the_methods_own(method):
    own = {id(p) for p in method.parameters()}
    frozen = {id(p) for tower in (method.backbone.vision, method.backbone.text) for p in tower.parameters()}
    assert not own & frozen
    assert method.num_trainable == sum(p.numel() for p in method.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", TRAINED)
def test_every_parameter_gets_a_gradient_and_nothing_else_does(name, any_backbone, pixels):
    method = shaken(perlclip.create_method(name, any_backbone))
    method.loss(pixels, torch.tensor([0, 1, 2, 0]), method.class_state(PROMPTS)).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in method.parameters())
    assert all(p.grad is None for tower in (any_backbone.vision, any_backbone.text) for p in tower.parameters())


def test_class_lists_can_be_swapped(method, pixels):
    shaken(method)
    with torch.no_grad():
        method.logits(pixels, method.class_state(PROMPTS))
        swapped = method.logits(pixels, method.class_state(OTHER))
        fresh = shaken(perlclip.create_method(method.name, method.backbone))
        torch.testing.assert_close(swapped, fresh.logits(pixels, fresh.class_state(OTHER)))


def test_the_result_does_not_depend_on_the_batch(method, pixels):
    state = method.class_state(PROMPTS)
    with torch.no_grad():
        whole = method.logits(pixels, state)
        parts = torch.cat([method.logits(pixels[i : i + 1], state) for i in range(4)])
    torch.testing.assert_close(whole, parts, atol=1e-4, rtol=1e-4)


def test_a_class_does_not_depend_on_its_neighbours(method):
    """Prompts are cut after the longest EOS of the list; a longer neighbour must not change a shorter prompt."""
    with torch.no_grad():
        alone = method.encode_text(method.class_state(["ox"]))
        beside = method.encode_text(method.class_state(["ox", "a photo of a very long name."]))[:1]
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_save_and_load_give_the_same_answers(name, any_backbone, pixels, tmp_path):
    method = shaken(perlclip.create_method(name, any_backbone))
    perlclip.save_adapter(method, tmp_path / "a", class_names=["cat", "horse"], templates="a {}.")
    loaded = perlclip.load_adapter(tmp_path / "a").method
    with torch.no_grad():
        want = method.logits(pixels, method.class_state(PROMPTS))
        assert torch.equal(loaded.logits(pixels, loaded.class_state(PROMPTS)), want)


@pytest.mark.parametrize("name", METHODS)
def test_bfloat16_is_close(name, tiny):
    """On the trained tiny CLIP, where closeness means something: the same answers on nearly all images."""
    test = load_toybox("faint_toys").test
    half = perlclip.load_backbone("tiny", dtype="bfloat16")
    some = test.select(random.Random(0).sample(range(len(test)), 100))
    full, rough = (perlclip.evaluate(perlclip.create_method(name, b), some) for b in (tiny, half))
    agree = (full.predictions_KB[-1] == rough.predictions_KB[-1]).double().mean().item()
    assert agree >= 0.97


def test_names():
    assert perlclip.list_methods("p*") == ["perl"]
    assert {"perl", "zero-shot"} <= set(perlclip.list_methods())
