"""An evaluation's tables are those of a count by hand, and one damaged image does not end it."""

import csv
import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import perlclip
from perlclip.data import Unreadable
from perlclip.inference.evaluation import ClassScore, Confused, Evaluation
from perlclip.inference.row_files import row_file
from tests.common import loud
from tests.conftest import draw_tree

NAMES = ("cat", "dog", "lynx", "cat")  # as in ImageNet, where a name comes twice
LABELS, ANSWERS = [0, 0, 0, 0, 1, 1, 2], [0, 1, 1, 2, 1, 0, 1]


@pytest.fixture
def found() -> Evaluation:
    labels_B, answers_B = torch.tensor(LABELS), torch.tensor(ANSWERS)
    return Evaluation(
        accuracy=200 / 7, class_accuracy={}, step_accuracy=[200 / 7], total=7, predictions_KB=answers_B[None],
        probabilities_BC=torch.nn.functional.one_hot(answers_B, 4) * 0.6 + 0.1, labels_B=labels_B,
        steps_B=torch.arange(7), class_names=NAMES, images=[f"{i}.png" for i in range(6)] + [np.zeros((8, 8, 3))],
        places_B=torch.arange(7),
    )  # fmt: skip


def test_the_confusion_matrix_counts_pairs(found):
    assert found.confusion.shape == (4, 4) and found.confusion.sum() == 7
    assert {(i, j): int(n) for i, row in enumerate(found.confusion) for j, n in enumerate(row) if n} == Counter(
        zip(LABELS, ANSWERS, strict=True)
    )


def test_precision_recall_and_f1_by_class(found):
    cat, dog, lynx, again = found.per_class()
    assert cat == ClassScore("cat (label 0)", 4, 2, 50.0, 25.0, pytest.approx(100 / 3))
    assert dog == ClassScore("dog", 2, 4, 25.0, 50.0, pytest.approx(100 / 3))
    assert lynx == ClassScore("lynx", 1, 1, 0.0, 0.0, 0.0)
    assert again == ClassScore("cat (label 3)", 0, 0, None, None, None)


def test_the_most_confused_come_first(found):
    first, *rest = found.most_confused()
    assert first == Confused("cat (label 0)", "dog", 2, 50.0) and len(rest) == 3
    assert found.most_confused(1) == [first] and found.most_confused(0) == []


def test_every_image_has_its_row(found, tmp_path):
    rows = list(found.answers())
    assert [row["image"] for row in rows] == [*(f"{i}.png" for i in range(6)), "image 6"]
    assert [row["correct"] for row in rows] == [a == b for a, b in zip(LABELS, ANSWERS, strict=True)]
    assert rows[1]["answer"] == "dog" and rows[1]["probability"] == pytest.approx(0.7)
    assert rows[1]["label_probability"] == pytest.approx(0.1) and rows[1]["steps"] == 1
    found.save_predictions(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        assert [row["answer"] for row in csv.DictReader(file)] == [row["answer"] for row in rows]
    found.save_predictions(tmp_path / "a.jsonl")
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == rows


def test_the_state_of_a_training_serves_classes_that_clip_reads_otherwise(backbone, tree):
    """A curly quote is a straight one in what is said, and stays one in the name."""
    images = perlclip.load_images(tree).select(range(4))
    named = dataclasses.replace(images, class_names=("l’or", *images.class_names[1:]))
    method = perlclip.create_method("zero-shot", backbone)
    state = method.class_state(named.classes)
    assert perlclip.evaluate(method, named, state=state).accuracy == perlclip.evaluate(method, named).accuracy
    with pytest.raises(perlclip.PerlclipError, match="not that of the test set's classes"):
        perlclip.evaluate(method, images, state=state)


# ---- files of rows ----

COLUMNS = {"image": str, "rank": int, "p": float, "right": bool}
ROW = {"image": "a,\n.png", "rank": 1, "p": 0.25, "right": True}


def test_parquet(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("perlclip.inference.row_files.GROUP", 2)
    with row_file(tmp_path / "a.parquet", COLUMNS) as write:
        for _ in range(5):
            write(ROW)
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.to_pylist() == [ROW] * 5 and str(table.schema.field("right").type) == "bool"
    with (
        pytest.raises(perlclip.PerlclipError, match="1 rows so far are in"),
        row_file(tmp_path / "a.parquet", COLUMNS) as write,
    ):
        write(ROW)
        raise perlclip.PerlclipError("the end of the world")
    assert parquet.read_table(tmp_path / "a.parquet.part").num_rows == 1, "what there is can be read"
    assert parquet.read_table(tmp_path / "a.parquet").num_rows == 5, "and what was there before stays"


@pytest.mark.parametrize("error", [KeyboardInterrupt, perlclip.PerlclipError])
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_what_is_interrupted_is_kept_under_another_name(tmp_path, error, ending):
    path = tmp_path / f"a.{ending}"
    path.write_text("old")
    with pytest.raises(error, match=r"the 2 rows so far are in .*\.part"), row_file(path, COLUMNS) as write:
        write(ROW)
        write(ROW)
        raise error
    assert path.read_text() == "old"
    assert (tmp_path / f"a.{ending}.part").read_text().lower().count("true") == 2
    with pytest.raises(error), row_file(tmp_path / f"b.{ending}", COLUMNS):
        raise error
    with row_file(path, COLUMNS) as write:
        write(ROW)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a.{ending}"], "nothing is left to lie"


def test_names_that_are_no_text(tmp_path):
    name = b"\xff.png".decode("utf-8", "surrogateescape")
    with row_file(tmp_path / "a.csv", COLUMNS) as write:
        write(ROW | {"image": name})
    assert b"\xff.png" in (tmp_path / "a.csv").read_bytes()


def test_files_that_cannot_be_written_are_found_out_before(tmp_path):
    (tmp_path / "f.csv").write_text("")
    for name, words in (("a.json", "must end in .csv, .jsonl"), ("f.csv/x.csv", "cannot write")):
        with pytest.raises(perlclip.PerlclipError, match=words), row_file(tmp_path / name, COLUMNS):
            raise AssertionError
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(perlclip.PerlclipError, match="it is a folder"), row_file(tmp_path / "d.csv", COLUMNS):
        raise AssertionError


# ---- images that cannot be read ----


@pytest.fixture
def adapter(backbone) -> perlclip.Adapter:
    method = loud(perlclip.create_method("perl", backbone, steps=2)).eval()
    return perlclip.Adapter(method=method, class_names=("red", "green grass", "blue"), template="a {}.")


@pytest.fixture
def data(tmp_path) -> perlclip.ImageSet:
    """Nine images; of those at 2, 3 and 4, a whole batch, and 7 there is half a file."""
    draw_tree(tmp_path / "data", images=3)
    images = perlclip.load_images(tmp_path / "data")
    for i in (2, 3, 4, 7):
        content = images.images[i].read_bytes()
        images.images[i].write_bytes(content[: len(content) // 2])
    return images


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluate_leaves_out_what_cannot_be_read(adapter, data, workers):
    with pytest.raises(perlclip.PerlclipError, match="is damaged"):
        perlclip.evaluate(adapter, data, workers=workers)
    kept = [0, 1, 5, 6, 8]
    found = perlclip.evaluate(adapter, data, on_error="skip", batch_size=3, workers=workers)
    alone = perlclip.evaluate(adapter, data.select(kept), batch_size=3)
    assert torch.allclose(found.probabilities_BC, alone.probabilities_BC, atol=1e-5)
    assert torch.equal(found.labels_B, alone.labels_B) and found.accuracy == alone.accuracy and found.total == 5
    assert [row["image"] for row in found.answers()] == [str(data.images[i]) for i in kept]
    assert [one.image for one in found.skipped] == [str(data.images[i]) for i in (2, 3, 4, 7)]
    assert perlclip.evaluate(adapter, data, on_error="skip", batch_size=3, steps=1).total == 5
    with pytest.raises(perlclip.PerlclipError, match="none of the 2 images can be read"):
        perlclip.evaluate(adapter, data.select([3, 4]), on_error="skip")
    with pytest.raises(perlclip.PerlclipError, match="unknown on_error 'skp'; did you mean 'skip'"):
        perlclip.evaluate(adapter, data, on_error="skp")


@pytest.mark.parametrize("workers", [0, 2])
def test_predict_says_in_its_place_why_an_image_has_no_answer(adapter, data, workers):
    classifier = perlclip.Classifier(adapter)
    found = classifier.predict(data.images, on_error="skip", batch_size=2, workers=workers)
    whole = [i for i, one in enumerate(found) if not isinstance(one, Unreadable)]
    assert len(found) == 9 and whole == [0, 1, 5, 6, 8]
    alone = classifier.predict([data.images[i] for i in whole])
    assert [found[i].label for i in whole] == [one.label for one in alone]
    assert "is damaged" in found[7].reason and found[7].image == str(data.images[7])
    assert classifier.predict(data.images[7], on_error="skip") == found[7]
    with pytest.raises(perlclip.PerlclipError, match="is damaged"):
        classifier.predict(data.images, workers=workers)


# ---- in a notebook ----


def test_a_classifier_and_a_prediction_show_what_they_are(backbone):
    names = ["<b>bold</b>", *(f"class {i}" for i in range(30))]
    adapter = perlclip.Adapter(
        method=perlclip.create_method("perl", backbone), class_names=tuple(names), template="a {}."
    )
    classifier = perlclip.Classifier(adapter)
    assert repr(classifier).startswith(f"Classifier(perl on {backbone.name}, 31 classes: <b>bold</b>, class 0, ")
    assert len(repr(classifier)) < 250
    view = classifier._repr_html_()
    assert "&lt;b&gt;bold" in view and "<b>" not in view and "and 11 more" in view and "no thresholds" in view
    one = classifier.predict(Image.new("RGB", (40, 40), "red"), top_k=31)
    assert repr(one).startswith(f"Prediction({one.label!r}, {one.probability:.4f}, top=[{one.label} ")
    assert "&lt;b&gt;bold" in one._repr_html_() and one._repr_html_().count("<meter") == 31
    assert "4 refinement steps" in one._repr_html_()
