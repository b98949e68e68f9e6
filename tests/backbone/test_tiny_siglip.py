"""The embedded SigLIP: what that family reaches, not only its shapes."""

import random

import pytest
import torch

import perlclip
from perlclip.backbone.load import EMBEDDED
from perlclip.data.toybox import load_toybox
from tests import families

FOLDER = EMBEDDED["tiny-siglip"]


@pytest.fixture(scope="module")
def siglip():
    return perlclip.load_backbone("tiny-siglip", device="cpu")


@pytest.fixture(scope="module")
def toys():
    """Of 72 classes, each a texture and a shape, 72 pictures."""
    test = load_toybox("toybox").test
    return test.select(range(0, len(test), len(test) // 72))


@pytest.fixture(scope="module")
def faint():
    """Four shots of the sixteen base classes, and a third of their test pictures."""
    data = load_toybox("faint_toys")
    test = data.test.base()
    return data.train.base().few_shot(4, random.Random(1)), test.select(range(0, len(test), 3))


def accuracy(trained, images) -> float:
    return perlclip.evaluate(trained, images, progress=False).accuracy


@torch.no_grad()
def test_it_is_the_model_in_the_package(siglip, toys):
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8e6
    assert (siglip.family, siglip.name, siglip.vision.depth, siglip.text.depth) == ("siglip", "tiny-siglip", 12, 12)
    model, few = families.model_of(FOLDER, dtype=torch.float32), toys.select(range(4))
    pixels = torch.stack([siglip.preprocess.test_view(perlclip.data.read_image(one)) for one in few.images])
    ids = siglip.tokenizer(toys.prompts, padding="max_length", max_length=32, return_tensors="pt")["input_ids"]
    method = perlclip.create_method("zero-shot", siglip)
    found = method.logits(pixels, method.class_state(toys.classes)) + siglip.logit_bias
    torch.testing.assert_close(found, model(input_ids=ids, pixel_values=pixels).logits_per_image, atol=1e-3, rtol=1e-4)


def test_zero_shot_accuracy(siglip, toys, faint):
    method = perlclip.create_method("zero-shot", siglip)
    assert accuracy(method, toys) > 75, "of 72 classes"
    assert accuracy(method, faint[1]) > 40, "of 16"


@pytest.mark.slow
def test_perl_learns_from_shots(siglip, faint):
    shots, test = faint
    before = accuracy(perlclip.create_method("zero-shot", siglip), test)
    method = perlclip.create_method("perl", siglip)
    fitted = perlclip.fit(method, shots, recipe="extended", thresholds=False, head=False, progress=False)
    assert method.num_trainable == 1122 and accuracy(fitted, test) > before + 3


def test_ridge_learns_from_shots_and_what_is_there(siglip, faint, tmp_path):
    shots, test = faint
    before = accuracy(perlclip.create_method("zero-shot", siglip), test)
    fitted = perlclip.fit(perlclip.create_method("ridge", siglip), shots, progress=False)
    assert accuracy(fitted, test) > before + 3
    perlclip.save_adapter(fitted, tmp_path / "a")
    loaded = perlclip.load_adapter(tmp_path / "a", device="cpu")
    assert loaded.method.backbone.name == "tiny-siglip" and loaded.info["backbone_family"] == "siglip"
    found = perlclip.Classifier(loaded).predict(test.images, multi_label=True)
    right = [test.class_names[label] in one.labels for one, label in zip(found, test.labels, strict=True)]
    assert sum(right) > 0.6 * len(right) and sum(len(one.labels) for one in found) < 2 * len(right)


def test_a_class_is_there_or_not_by_the_models_own_bias(siglip, toys):
    """A striped star is a star, too: each class is asked by itself, and nothing was held out."""
    shapes = sorted({name.split()[-1] for name in toys.class_names})
    classifier = perlclip.Classifier(perlclip.create_method("zero-shot", siglip), [*shapes, *toys.class_names])
    found = [set(one.labels) for one in classifier.predict(toys.images, multi_label=True)]
    wanted = [{name, name.split()[-1]} for name in (toys.class_names[label] for label in toys.labels)]
    pairs = list(zip(found, wanted, strict=True))
    assert sum(len(a & b) for a, b in pairs) > 0.6 * 2 * len(pairs), "most of what is there"
    assert sum(len(a - b) for a, b in pairs) < 0.5 * len(pairs), "and little else"
