"""What earlier versions have saved still loads and answers as it did (`stored/README.md`)."""

import json
from pathlib import Path

import numpy as np
import pytest

from perlclip import Classifier, list_methods, load_adapter, save_adapter
from perlclip.adapters.folder import CONFIG, WEIGHTS, read_info

ADAPTERS = Path(__file__).parent / "stored" / "0.1.0" / "adapters"
EXPECTED = json.loads((ADAPTERS / "expected.json").read_text())
NOVEL = ["green ring", "red_star", "blue cross"]
CLOSE = dict(rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    draws = (np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8) for i in range(4))
    return [draw.repeat(9, 0).repeat(9, 1) for draw in draws]


def test_every_method_of_that_version_is_stored():
    folders = {path.parent.name for path in ADAPTERS.glob(f"*/{CONFIG}")}
    assert folders == set(EXPECTED)
    assert {read_info(ADAPTERS / name)["method"] for name in folders} <= set(list_methods())
    assert len(folders) == 15, "twelve methods, and three more of PERL's variants"


@pytest.mark.parametrize("name", EXPECTED)
def test_an_adapter_answers_as_it_did(name, tiny, pictures):
    for class_names, wanted in ((None, EXPECTED[name]["own"]), (NOVEL, EXPECTED[name]["novel"])):
        classifier = Classifier.from_pretrained(ADAPTERS / name, class_names=class_names, backbone=tiny)
        for found, expected in zip(classifier.predict(pictures, top_k=4), wanted, strict=True):
            assert [label for label, _ in found.top] == [label for label, _ in expected]
            assert [p for _, p in found.top] == pytest.approx([p for _, p in expected], **CLOSE)


def test_images_stop_where_they_did(tiny, pictures):
    classifier = Classifier.from_pretrained(ADAPTERS / "perl", backbone=tiny)
    found = classifier.predict(pictures, steps="adaptive")
    assert [(p.label, p.steps) for p in found] == [(label, steps) for label, _, steps in EXPECTED["perl"]["adaptive"]]
    assert {p.steps for p in found} == {1, 4}, "one of them is settled early"
    assert [p.probability for p in found] == pytest.approx([p for _, p, _ in EXPECTED["perl"]["adaptive"]], **CLOSE)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_adapter_saved_again_is_the_same(name, tiny, tmp_path):
    adapter = load_adapter(ADAPTERS / name, backbone=tiny)
    save_adapter(adapter, tmp_path)
    assert (tmp_path / WEIGHTS).read_bytes() == (ADAPTERS / name / WEIGHTS).read_bytes()
    old, new = read_info(ADAPTERS / name), read_info(tmp_path)
    assert {key: new[key] for key in old if key != "perlclip_version"} == {
        key: value for key, value in old.items() if key != "perlclip_version"
    }
