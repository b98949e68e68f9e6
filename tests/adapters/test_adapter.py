"""Adapters: what is written, what is checked, what is refused; and the classifier on top."""

import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file, save

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.card import model_card
from perlclip.adapters.folder import CARD, CONFIG, OWN_HASH, WEIGHTS, read_info
from perlclip.backbone.clip import vit_b16_shape
from perlclip.files import write_files
from perlclip.methods.perl import Perl
from tests.conftest import SIZES, build_clip

NAMES = ["red", "green grass", "blue"]
TEMPLATE = "a photo of a {}."


@pytest.fixture
def folder(backbone, tmp_path):
    method = perlclip.create_method("perl", backbone, seed=3, steps=2)
    training = {"seed": 3, "recipe": {"lr": 1e-3}}
    return perlclip.save_adapter(
        method,
        tmp_path / "adapter",
        class_names=NAMES,
        template=TEMPLATE,
        training=training,
        metrics={"accuracy": 81.25},
    )


def test_the_folder_has_three_ordinary_files_and_no_litter(folder, tmp_path):
    assert sorted(path.name for path in folder.iterdir()) == sorted([CARD, CONFIG, WEIGHTS])
    (tmp_path / "ordinary").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "ordinary").stat().st_mode}


def test_the_adapter_of_vit_b16_has_26_kb(tmp_path):
    method = Perl(vit_b16_shape(), Perl.config_class())
    perlclip.save_adapter(method, tmp_path, class_names=["a"], template=TEMPLATE)
    assert 25_608 < (tmp_path / WEIGHTS).stat().st_size < 27_000


def test_the_card_says_what_one_needs(folder, backbone):
    card = (folder / CARD).read_text()
    header = ModelCard.load(folder / CARD).data
    assert (header.library_name, header.base_model) == ("perlclip", backbone.name)
    assert header.pipeline_tag == "zero-shot-image-classification" and "perl" in header.tags
    for words in (
        "- green grass",
        "81.25",
        "0.001",
        backbone.fingerprint,
        "`a photo of a {}.`",
    ):
        assert words in card
    assert f'Classifier.from_pretrained("{folder.name}")' in card


@pytest.mark.parametrize("name", ["/data/my: clip #1", "- clip", "'it''s'", "x" * 200 + " y", "été", "no", "1.0"])
def test_any_name_of_a_backbone_survives_the_cards_header(folder, name):
    info = read_info(folder) | {"base_model_name_or_path": name}
    card = ModelCard(model_card(info, "title"))
    assert card.data.base_model == name and card.text.lstrip().startswith("# title")


def test_importing_waits_for_no_hub():
    words = "import sys, perlclip, perlclip.cli, perlclip.adapters.card; print('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stdout == "False\n"


def test_truncated_anywhere_is_refused(folder, backbone):
    for name in (WEIGHTS, CONFIG):
        content = (folder / name).read_bytes()
        for size in [*range(0, 40), *range(40, len(content) - 1, max(1, len(content) // 60)), len(content) - 2]:
            (folder / name).write_bytes(content[:size])
            with pytest.raises(PerlclipError) as caught:
                perlclip.load_adapter(folder, backbone=backbone)
            assert "\n" not in str(caught.value)
        (folder / name).write_bytes(content)
    perlclip.load_adapter(folder, backbone=backbone)


def test_a_flipped_bit_is_refused(folder, backbone):
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-7] ^= 4
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(PerlclipError, match="do not match the hash"):
        perlclip.load_adapter(folder, backbone=backbone)


def change(folder, **changes):
    """Edit fields and drop their hash, as adapters of 0.1.0 have none."""
    info = json.loads((folder / CONFIG).read_text()) | changes
    info.pop(OWN_HASH, None)
    (folder / CONFIG).write_text(json.dumps(info))


def rewrite(folder, edit):
    """Change the tensors and keep the hash right, as a hostile or careless tool would."""
    import hashlib

    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    content = save(tensors)
    (folder / WEIGHTS).write_bytes(content)
    change(folder, weights_sha256=hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("projectors.text.up.bias"), "'projectors.text.up.bias' is missing"),
        (lambda t: t.update(extra=torch.ones(1)), "'extra' is missing or unexpected"),
        (lambda t: t.update({"projectors.text.up.bias": torch.ones(5)}), r"has shape \(5,\), expected \(32,\)"),
        (lambda t: t["projectors.text.up.bias"].fill_(torch.inf), "not finite"),
        (lambda t: t["projectors.vision.norm.weight"].fill_(torch.nan), "not finite"),
    ],
)
def test_wrong_tensors_are_refused(folder, backbone, edit, words):
    rewrite(folder, edit)
    with pytest.raises(PerlclipError, match=words):
        perlclip.load_adapter(folder, backbone=backbone)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format_version": 7}, "format version 7; this perlclip reads versions 1, 2, 3, 4, 5, 6"),
        ({"method": "perll"}, "did you mean 'perl'"),
        ({"config": {"stepz": 1}}, "did you mean 'steps'"),
        ({"class_names": []}, "no class names"),
        ({"class_names": ["a", 5]}, "is not a printable text"),
        ({"templates": [5]}, "must contain one"),
        ({"config": {"steps": "four"}}, "must be of type int"),
        ({"templates": ["no hole"]}, "must contain one"),
        ({"backbone_fingerprint": 7}, "'backbone_fingerprint' is missing or not a str"),
    ],
)
def test_wrong_settings_are_refused(folder, backbone, changes, words):
    change(folder, **changes)
    with pytest.raises(PerlclipError, match=words):
        perlclip.load_adapter(folder, backbone=backbone)


def test_another_backbone_is_refused(folder, tmp_path):
    other = perlclip.load_backbone(str(build_clip(tmp_path / "other", **SIZES["small"], seed=7)))
    with pytest.raises(PerlclipError, match=r"was trained on backbone .* it does not fit"):
        perlclip.load_adapter(folder, backbone=other)


def test_a_full_disk_leaves_the_old_adapter(folder, backbone, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    method, written = perlclip.create_method("perl", backbone, seed=4), []
    fsync = os.fsync

    def full(descriptor):
        written.append(descriptor)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PerlclipError, match=r"cannot write .*No space left on device"):
        perlclip.save_adapter(method, folder, class_names=NAMES, template=TEMPLATE)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_files_are_made_with_their_folder_and_replaced(tmp_path):
    write_files({tmp_path / "new" / "a": b"1", tmp_path / "new" / "b": b"2"})
    write_files({tmp_path / "new" / "a": b"3"})
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == {"a": b"3", "b": b"2"}


# ---- Classifier ----


def test_predictions_are_labels_with_probabilities(folder, tree, backbone):
    classifier = perlclip.Classifier.from_pretrained(folder)
    paths = sorted(tree.rglob("*.png"))[:5]
    predictions = classifier.predict(paths, top_k=3, batch_size=2)
    assert len(predictions) == 5
    for prediction in predictions:
        assert sorted(label for label, _ in prediction.top) == sorted(NAMES)
        assert sum(p for _, p in prediction.top) == pytest.approx(1)
        assert prediction.top[0] == (prediction.label, prediction.probability)
        assert prediction.probability == max(p for _, p in prediction.top)
    with torch.no_grad():
        pixels = torch.stack([backbone.preprocess.test_view(perlclip.data.read_image(path)) for path in paths])
        state = classifier.method.class_state([f"a photo of a {name}." for name in NAMES])
        best = classifier.method.logits(pixels, state).argmax(-1).tolist()
    assert [prediction.label for prediction in predictions] == [NAMES[i] for i in best]


def test_one_image_of_any_kind_gives_one_prediction(folder, tree):
    classifier = perlclip.Classifier.from_pretrained(folder)
    path = tree / "red" / "0.png"
    image = Image.open(path)
    kinds = [classifier.predict(kind) for kind in (path, str(path), image, np.asarray(image))]
    assert all(isinstance(prediction, perlclip.Prediction) for prediction in kinds)
    assert len({(prediction.label, round(prediction.probability, 6)) for prediction in kinds}) == 1


def test_inference_mode_works(folder, tree):
    with torch.inference_mode():
        inside = perlclip.Classifier.from_pretrained(folder).predict(tree / "red" / "0.png")
    assert inside.label == perlclip.Classifier.from_pretrained(folder).predict(tree / "red" / "0.png").label


def test_class_names_must_be_a_list_with_something_in_it(folder):
    for names, words in (([], "no class names"), ("red", "got the one string 'red'")):
        with pytest.raises(PerlclipError, match=words):
            perlclip.Classifier.from_pretrained(folder, class_names=names)


def test_the_vocabulary_is_open(folder, tree):
    classifier = perlclip.Classifier.from_pretrained(folder, class_names=["sky", "lawn"], template="{} in a picture.")
    assert classifier.predict(tree / "red" / "0.png", top_k=9).top[0][0] in ("sky", "lawn")
    with pytest.raises(PerlclipError, match="top_k must be at least 1"):
        classifier.predict(tree / "red" / "0.png", top_k=0)


def test_images_decoded_by_workers_get_the_same_answers(folder, tree, tmp_path, backbone):
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=backbone)
    paths = sorted(tree.rglob("*.png")) or sorted(tree.rglob("*.jpg"))
    want, got = (classifier.predict(iter(paths), batch_size=3, workers=workers) for workers in (0, 2))
    assert [one.label for one in got] == [one.label for one in want] and len(got) == len(paths) > 6
    assert max(abs(a.probability - b.probability) for a, b in zip(got, want, strict=True)) < 1e-5
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    with pytest.raises(PerlclipError, match=r"^[^\n]*broken.png is not an image[^\n]*$"):
        classifier.predict([*paths, broken], workers=1)
    assert classifier.predict([], workers=2) == []
