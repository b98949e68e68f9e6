"""Every method against its plain form in `perlclip.reference`, written apart from it."""

import subprocess
import sys

import pytest
import torch
from transformers import CLIPModel

import perlclip
from perlclip.reference import FORMS, plain_form
from perlclip.reference.perl import PlainPerlVariants
from perlclip.text.classes import Classes
from tests.common import CLOSE, loud, random_pixels
from tests.families import model_of

# Settings under which a method takes another way through the code.
SETTINGS = {
    "perl": [{}],
    "coop": [{}, dict(tokens=7, init="")],
    "cocoop": [{}],
    "kgcoop": [dict(weight=3.0)],
    "provp": [dict(tokens=3), dict(alpha=0.4, weight=0.0), dict(alpha=1.0)],
    "tcp": [{}, dict(layer=0), dict(layer=9, tokens=2)],
    "maple": [{}, dict(depth=1), dict(depth=10, tokens=3), dict(tokens=6)],
    "promptsrc": [
        dict(templates=("a {}.", "many {} here.")),
        dict(depth=10, templates=("a {}.",)),
        dict(depth=1, templates=("{}",)),
        dict(tokens=5, templates=("a {}.",)),
    ],
    "mma": [{}, dict(start=9, rank=3, scale=0.1)],
    "mmrl": [{}, dict(start=9, tokens=2, dim=16), dict(start=0, alpha=0.2)],
    "mmrl++": [{}, dict(beta=1.0), dict(beta=0.3, start=8, rank=2, head_rank=5)],
}  # fmt: skip
CASES = [(name, settings) for name, several in SETTINGS.items() for settings in several]
CLASS_LISTS = {
    "beginning alike": Classes(("cat", "cattle", "very long striped horse", "ox"), "a photo of a {}, a type of pet."),
    "name first": Classes(("banded", "dotted", "lined"), "{} texture."),
    "single": Classes(("cat",), "a {}."),
}


@pytest.fixture
def make(any_backbone):
    def pair(name, settings):
        method = loud(perlclip.create_method(name, any_backbone, **settings))
        clip = CLIPModel.from_pretrained(any_backbone.name, attn_implementation="eager")
        return method, plain_form(name)(clip, any_backbone.tokenizer, method)

    return pair


@pytest.fixture
def pixels(any_backbone):
    return random_pixels(any_backbone)


def test_every_trained_method_has_a_plain_form():
    assert set(FORMS) == set(perlclip.list_methods())
    with pytest.raises(perlclip.PerlclipError, match="did you mean 'tcp'"):
        plain_form("tpc")


def test_the_plain_forms_are_found_without_importing_torch():
    lines = "import sys, perlclip.reference as r; r.FORMS; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", lines], check=True)


@pytest.mark.parametrize("classes", CLASS_LISTS.values(), ids=CLASS_LISTS)
@pytest.mark.parametrize(("name", "settings"), [("zero-shot", {}), ("ridge", {}), ("gaussian", {}), *CASES])
def test_logits_equal_the_plain_form(make, pixels, name, settings, classes):
    method, plain = make(name, settings)
    with torch.no_grad():
        for novel in (False, True):
            got = method.logits(pixels, method.class_state(classes, novel=novel))
            want = plain.logits(pixels, list(classes.names), classes.template, novel=novel)
            torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_loss_and_gradients_equal_the_plain_form(make, pixels, name, settings):
    method, plain = make(name, settings)
    classes, labels = CLASS_LISTS["beginning alike"], torch.tensor([0, 2, 1])
    ours = method.loss(pixels, labels, method.class_state(classes))
    theirs = plain.loss(pixels, labels, list(classes.names), classes.template)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    parameters = list(method.parameters())
    gradients = torch.autograd.grad(ours, parameters, allow_unused=True)
    expected = torch.autograd.grad(theirs, parameters, allow_unused=True)
    for got, want in zip(gradients, expected, strict=True):
        got, want = (torch.zeros(()) if g is None else g for g in (got, want))
        assert (got - want).abs().max() <= max(1e-5, 2e-3 * want.abs().max()), "relative to their size, too"
        assert (got - want).norm() <= 1e-3 * want.norm() + 1e-6


# Every method that carries over to a SigLIP, once; PERL also where thoughts enter late and at several depths.
OTHER_FAMILY = [
    (name, several[0]) for name, several in {"zero-shot": [{}], **SETTINGS}.items() if not name.startswith("mmrl")
]
OTHER_FAMILY += [("perl", dict(depth=11, steps=2)), ("perl", dict(depth=0)), ("perl", dict(readout="rising"))]


@pytest.mark.parametrize(("name", "settings"), OTHER_FAMILY)
def test_a_siglip_equals_its_plain_form(family_backbone, siglip, name, settings):
    """Logits, loss, gradients: thoughts and prompts stand before the rows, and the pooling head sees patches alone."""
    backbone, classes = family_backbone("siglip"), CLASS_LISTS["beginning alike"]
    method, labels = loud(perlclip.create_method(name, backbone, **settings)), torch.tensor([0, 2, 1])
    plain, words = plain_form(name)(siglip, backbone.tokenizer, method), (list(classes.names), classes.template)
    pixels, state = random_pixels(backbone), method.class_state(classes)
    with torch.no_grad():
        torch.testing.assert_close(method.logits(pixels, state), plain.logits(pixels, *words), atol=1e-4, rtol=1e-5)
    if not method.num_trainable:
        return
    ours, theirs = method.loss(pixels, labels, state), plain.loss(pixels, labels, *words)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    parameters = list(method.parameters())
    for got, want in zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True):
        assert (got - want).norm() <= 1e-3 * want.norm() + 1e-6


def test_perl_at_several_depths_of_a_siglip(family_backbone, siglip):
    backbone, classes = family_backbone("siglip"), CLASS_LISTS["beginning alike"]
    method = loud(perlclip.create_method("perl", backbone, variant="layerstep", steps=2))
    plain, pixels = PlainPerlVariants(siglip, backbone.tokenizer, method), random_pixels(backbone)
    with torch.no_grad():
        want = plain.trajectory(pixels, list(classes.names), classes.template)
        torch.testing.assert_close(method.trajectory(pixels, method.class_state(classes)), want, atol=1e-4, rtol=1e-5)


@pytest.fixture(scope="module")
def siglip(family_folder):
    return model_of(family_folder("siglip"), attn_implementation="eager")
