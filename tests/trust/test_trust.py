"""Probabilities to act on: calibrated, "none of these", sets with a guarantee; saved, loaded, refused."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.folder import CARD, CONFIG, OWN_HASH
from perlclip.text.classes import Classes
from perlclip.trust import rejection
from perlclip.trust.calibration import HIGHEST, Calibration, carried_temperature, fit_temperature
from perlclip.trust.conformal import KINDS, LabelSets
from perlclip.trust.record import Trust
from perlclip.trust.rejection import FarWords, Rejection, class_means, known_words, word_list
from perlclip.trust.reliability import reliability
from perlclip.viz.mistakes import mistakes_page
from tests.cli.test_cli import fails, run

NAMES = ("red", "green grass", "blue")


def drawn(images: int, classes: int = 10, seed: int = 0, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels drawn from the probabilities that they stand for: calibrated by construction."""
    generator = torch.Generator().manual_seed(seed)
    logits_NC = scale * torch.randn(images, classes, generator=generator, dtype=torch.float64)
    return logits_NC, torch.multinomial(logits_NC.softmax(-1), 1, generator=generator)[:, 0]


def test_reliability_of_a_case_worked_by_hand():
    p_BC = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.62, 0.38], [0.38, 0.62]])
    found = reliability(p_BC, torch.tensor([0, 1, 0, 1]))
    assert found.ece == pytest.approx(100 * (abs(1.8 - 1) + abs(1.24 - 2)) / 4)
    assert found.ece_equal_mass == pytest.approx(100 * (0.1 + 0.9 + 0.38 + 0.38) / 4)  # four bins of one image
    assert found.brier == pytest.approx((0.02 + 1.62 + 2 * 2 * 0.38**2) / 4)
    assert [(one.images, one.accuracy) for one in found.bins] == [(2, 1.0), (2, 0.5)]


def test_a_temperature_makes_answers_as_sure_as_they_are_right():
    logits_NC, labels_N = drawn(4000)
    for factor in (0.3, 1.0, 5.0):
        found = fit_temperature(factor * logits_NC, labels_N)
        assert found == pytest.approx(factor, rel=0.08)
        assert reliability((factor * logits_NC / found).softmax(-1), labels_N).ece < 4
    assert fit_temperature(100 * logits_NC, (logits_NC.argmin(-1))) == pytest.approx(HIGHEST, rel=1e-3)
    assert fit_temperature(logits_NC[:0], labels_N[:0]) == 1.0


def test_a_temperature_is_carried_to_new_classes_only_as_far_as_it_serves():
    """Where all classes are as overconfident it is carried whole; where some are and others are not, in part."""
    logits_NC, labels_N = drawn(3000, 12)
    assert carried_temperature(4 * logits_NC, labels_N) == pytest.approx(4, rel=0.1)
    # Images of each class are right about themselves (scale 1) or far too sure of a wrong class.
    sure_NC = 8 * F.one_hot(labels_N, 12) + logits_NC
    wrong_NC = 8 * F.one_hot((labels_N + 2) % 12, 12) + logits_NC
    mixed_NC = torch.where((labels_N % 2 == 0)[:, None], sure_NC, wrong_NC)
    assert 1 <= carried_temperature(mixed_NC, labels_N) < 0.8 * fit_temperature(mixed_NC, labels_N)
    assert carried_temperature(4 * logits_NC[:, :3], labels_N % 3) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_sets_hold_the_true_class_as_often_as_asked(kind):
    """However wrong the probabilities are: these are far too sure."""
    logits_NC, labels_N = drawn(6000)
    p_NC = (3 * logits_NC).softmax(-1)
    sets = LabelSets.of(p_NC[:3000], labels_N[:3000])
    within_BC = sets.of_images(p_NC[3000:], kind, 0.9)
    covered = within_BC.gather(1, labels_N[3000:, None]).double().mean().item()
    assert covered == pytest.approx(0.9, abs=0.02)
    assert within_BC.gather(1, p_NC[3000:].argmax(-1, keepdim=True)).all() and within_BC.sum(1).double().mean() < 8
    assert sets.of_images(p_NC[3000:], kind, 0.99).sum() > within_BC.sum()


def test_too_few_images_are_refused_with_the_number_needed():
    p_NC = drawn(18)[0].softmax(-1)
    top_N = p_NC.amax(-1)
    sets, rejects = LabelSets.of(p_NC, p_NC.argmin(-1)), Rejection.of("probability", top_N, top_N, torch.eye(2))
    with pytest.raises(PerlclipError, match=r"coverage=0\.95 needs 19 images held out, and there are 18"):
        sets.bound("lac", 0.95)
    with pytest.raises(PerlclipError, match=r"reject_rate=0\.05 needs 19 images held out, and there are 18"):
        rejects.threshold(0.05)
    assert sets.bound("lac", 0.9) < 1 and rejects.threshold(0.1) == rejects.scores[0]
    for wrong in (0, 1, -0.5, "many", None, float("nan")):
        with pytest.raises(PerlclipError, match="between 0 and 1"):
            sets.bound("lac", wrong)
    with pytest.raises(PerlclipError, match="did you mean 'lac'"):
        sets.bound("lak", 0.9)


def test_images_of_a_class_are_rejected_at_the_rate_named_and_outsiders_more_often():
    """Two classes on a circle; outsiders lie between them, and their texts say nothing."""
    generator = torch.Generator().manual_seed(0)
    angles_N = torch.randn(8000, generator=generator) * 0.2 + 1.5 * (torch.arange(8000) % 2)
    v_NE, texts_N = torch.stack([angles_N.cos(), angles_N.sin()], 1), torch.randn(8000, generator=generator)
    means_CE, near_N = class_means(v_NE[:4000], torch.arange(4000) % 2, 2)
    found = Rejection.of("words", texts_N[:4000], near_N, means_CE)
    for classes, alone in (([0, 1], False), (None, True)):
        scores_B = found.score(texts_N[4000:], v_NE[4000:], classes)
        rejected = (scores_B < found.threshold(0.05, alone=alone)).double().mean().item()
        assert rejected == pytest.approx(0.05, abs=0.012)
    between_B = found.score(torch.zeros(1), torch.tensor([[1.0, 1.0]]) / 2**0.5, [0, 1])
    assert between_B < found.threshold(0.05)
    assert found.score(torch.zeros(1), v_NE[:1], [1]) < found.score(torch.zeros(1), v_NE[:1], [0])
    with pytest.raises(PerlclipError, match="not those of its classes"):
        found.means_of([2], v_NE)


def test_a_shot_is_left_out_of_its_own_mean():
    v_NE = F.normalize(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), dim=-1)
    labels_N = torch.tensor([0, 1, 0, 1, 1, 0, 2])
    means_CE, near_N = class_means(v_NE, labels_N, 3)
    for i in range(7):
        rest = [j for j in range(7) if j != i]
        others = [F.normalize(v_NE[[j for j in rest if labels_N[j] == c]].sum(0), dim=-1) for c in range(3)]
        nearest = max(float(v_NE[i] @ mean) for c, mean in enumerate(others) if c != 2 or i != 6)
        assert near_N[i] == pytest.approx(nearest, abs=1e-5)
    assert torch.allclose(means_CE[2], v_NE[6])


def test_the_words_are_plain_and_some_thousands():
    words = word_list()
    assert len(words) > 2000 and len(set(words)) == len(words)
    assert all(word and word == word.strip().lower() for word in words)


class Speller:
    """A tokenizer that has every word, as CLIP's nearly does."""

    def __call__(self, words, **_):
        return {"input_ids": [[0] * len(word.split()) for word in words]}


def test_far_words_name_no_class_and_are_not_the_nearest(backbone, tiny):
    assert len(known_words(tiny)) < rejection.FEWEST and FarWords.of(tiny, Classes(("cat",))) is None

    class Knowing:
        """The vocabulary of one backbone, the texts of another."""

        tokenizer, logit_scale, encode_text = Speller(), 100.0, staticmethod(backbone.encode_text)

    far = FarWords.of(Knowing(), Classes(("Polar bear", "teapot"), "a photo of a {}."))
    assert not {"bear", "polar bear", "grizzly bear", "teapot"} & set(far.words) and "violin" in word_list()
    assert len(far.words) == len(far.t_WE) and rejection.FEWEST < len(far.words) < 0.8 * len(word_list())
    everything = backbone.encode_text([f"a photo of a {word}." for word in word_list()])
    near = (everything @ far.t_CE.T).amax(-1)
    assert (far.t_WE @ far.t_CE.T).amax() < near.quantile(0.8)
    assert far.odds(far.t_CE).min() > far.odds(far.t_WE[:50]).max()


@pytest.fixture(scope="module")
def fitted(backbone, tree):
    """Ridge regression: seconds, and every shot is left out in turn."""
    data, _ = perlclip.train_val(perlclip.load_images(tree), shots=7, val=1, seed=1)
    return perlclip.fit(perlclip.create_method("ridge", backbone), data, progress=False), data


def test_fit_calibrates_on_what_it_held_out_and_no_answer_changes(fitted, tree):
    adapter, _ = fitted
    trust = adapter.trust
    assert (trust.images, trust.how, trust.rejection.first) == (21, "each left out", "probability")
    assert trust.calibration.temperature != 1
    images = perlclip.load_images(tree)
    plain, calibrated = (
        perlclip.evaluate(one, images, progress=False) for one in (replace(adapter, trust=None), adapter)
    )
    assert torch.equal(plain.predictions_KB, calibrated.predictions_KB)
    assert not torch.equal(plain.probabilities_BC, calibrated.probabilities_BC)
    assert calibrated.uncalibrated == plain.reliability and plain.uncalibrated is None
    assert calibrated.metrics()["reliability"]["ece"] == calibrated.reliability.ece
    answers = perlclip.Classifier(adapter).predict(images.images, top_k=3)
    found = [one.probability for one in answers]
    assert found == pytest.approx(calibrated.probabilities_BC.amax(-1).tolist(), abs=1e-5)


def test_evaluate_says_what_predict_would(fitted, tree):
    """How many of the sets hold the label, how large they are, and which images are rejected."""
    adapter, images = fitted[0], perlclip.load_images(tree)
    found = perlclip.evaluate(adapter, images, reject=True, reject_rate=0.2, progress=False)
    answers = perlclip.Classifier(adapter).predict(images.images, reject=True, reject_rate=0.2, coverage=0.9)
    assert found.rejected_B.tolist() == [one.rejected for one in answers]
    assert found.metrics()["rejected"] == found.rejected == pytest.approx(100 * sum(found.rejected_B.tolist()) / 24)
    named = [images.class_names[label] in one.labels for label, one in zip(images.labels, answers, strict=True)]
    assert found.sets["lac"].coverage == pytest.approx(100 * sum(named) / len(named))
    assert found.sets["lac"].size == pytest.approx(sum(len(one.labels) for one in answers) / len(answers))
    assert "sets of labels that are to hold" in mistakes_page(found) and "none of the\nclasses" in mistakes_page(found)
    some = perlclip.evaluate(adapter, images.base(), progress=False)
    assert not some.sets and some.rejected is None and set(found.metrics()["sets"]) == set(KINDS)
    with pytest.raises(PerlclipError, match="needs images that were held out"):
        perlclip.evaluate(replace(adapter, trust=None), images, reject=True, progress=False)


def test_without_shots_held_out_there_is_nothing_to_go_by(backbone, tree):
    data, _ = perlclip.train_val(perlclip.load_images(tree), shots=1, val=1, seed=1)
    once = perlclip.fit(perlclip.create_method("ridge", backbone), data, progress=False)
    assert once.trust is None
    classifier = perlclip.Classifier(once)
    assert classifier.temperature == 1
    for options in ({"reject": True}, {"coverage": 0.9}):
        with pytest.raises(PerlclipError, match="needs images that were held out, and the adapter knows of none"):
            classifier.predict(data.images, **options)


def test_each_list_of_classes_gets_its_own_temperature(fitted):
    adapter, data = fitted
    adapter = replace(
        adapter, trust=replace(adapter.trust, calibration=Calibration(temperature=0.5, texts=3.0, novel=2.0))
    )
    asked = {None: 0.5, ("blue", "red"): 0.5, ("blue", "violet"): 2.0}
    for names, wanted in asked.items():
        assert perlclip.Classifier(adapter, names).temperature == wanted
    assert perlclip.Classifier(adapter, head=False).temperature == 3.0
    with pytest.raises(PerlclipError, match="another list"):
        perlclip.Classifier(adapter, ["blue", "violet"]).predict(data.images, coverage=0.8)


def test_answers_are_rejected_and_have_sets(fitted):
    adapter, data = fitted
    classifier = perlclip.Classifier(adapter)
    plain = classifier.predict(data.images)
    assert {(one.rejected, one.labels) for one in plain} == {(None, None)}
    found = classifier.predict(data.images, reject=True, reject_rate=0.2, coverage=0.8, sets="raps")
    preprocess, rejects = adapter.method.backbone.preprocess, adapter.trust.rejection
    views = torch.stack([preprocess.test_view(perlclip.data.read_image(image)) for image in data.images])
    texts_B, v_BE = torch.tensor([one.probability for one in found]).log(), adapter.method.backbone.encode_image(views)
    wanted_B = rejects.score(texts_B, v_BE, [0, 1, 2]) < rejects.threshold(0.2)
    assert [one.rejected for one in found] == wanted_B.tolist()
    assert all(one.labels[0] == one.label and set(one.labels) <= set(NAMES) for one in found)
    assert [one.label for one in found] == [one.label for one in plain]
    assert "rejected=" in repr(found[0]) and "one of: " in found[0]._repr_html_()
    again = pickle.loads(pickle.dumps(classifier)).predict(data.images, reject=True, reject_rate=0.2)
    assert [one.rejected for one in again] == [one.rejected for one in found]


def test_words_reject_by_the_frozen_embedding_whatever_the_steps(backbone, tree, monkeypatch):
    """With a tokenizer that has the words; PERL's first step is the frozen embedding, however many follow."""
    known = sorted(word_list())[:600]
    monkeypatch.setattr(rejection, "known_words", lambda _: known)
    method, images = perlclip.create_method("perl", backbone, steps=2), perlclip.load_images(tree)
    classifier = perlclip.Classifier(method, NAMES)
    found = classifier.calibrate(perlclip.data.for_classes(images, NAMES), progress=False)
    assert found.rejection.first == "words"
    whole, short = (
        [one.rejected for one in classifier.predict(images.images, reject=True, reject_rate=0.25, steps=steps)]
        for steps in (None, 1)
    )
    assert whole == short and 0 < sum(whole) < len(whole)
    other = perlclip.Classifier(method, NAMES, trust=found)
    assert [one.rejected for one in other.predict(images.images, reject=True, reject_rate=0.25)] == whole


def test_calibration_on_own_images_is_for_any_list(fitted, tree):
    adapter, _ = fitted
    names = ("blue", "crimson", "green grass")
    images = perlclip.load_images(tree, class_names={"red": "crimson", "blue": "blue", "green_grass": "green grass"})
    classifier = perlclip.Classifier(adapter, names)
    with pytest.raises(PerlclipError, match="the classifier's classes"):
        classifier.calibrate(perlclip.load_images(tree))
    found = classifier.calibrate(perlclip.data.for_classes(images, names), progress=False)
    assert (found.images, found.how) == (24, "own images") and classifier.temperature == found.calibration.temperature
    assert classifier.predict(images.images[0], coverage=0.9).labels


def test_it_survives_saving_and_is_covered_by_the_hash(fitted, backbone, tmp_path):
    adapter, data = fitted
    perlclip.save_adapter(adapter, tmp_path)
    loaded = perlclip.load_adapter(tmp_path, backbone=backbone)
    assert loaded.trust == adapter.trust
    ours, theirs = (perlclip.Classifier(one).predict(data.images, coverage=0.9) for one in (adapter, loaded))
    assert ours == theirs
    assert "## How sure" in (tmp_path / CARD).read_text() and "calibrated on 21 images" in (tmp_path / CARD).read_text()
    info = json.loads((tmp_path / CONFIG).read_text())
    info["trust"]["calibration"]["temperature"] = 1.5
    (tmp_path / CONFIG).write_text(json.dumps(info))
    with pytest.raises(PerlclipError, match="damaged or edited"):
        perlclip.load_adapter(tmp_path, backbone=backbone)


@pytest.mark.parametrize(
    "change",
    [
        lambda trust: trust.update(images=3),
        lambda trust: trust.pop("sets"),
        lambda trust: trust["sets"]["lac"].reverse(),
        lambda trust: trust["rejection"].update(first="guess"),
        lambda trust: trust["rejection"].update(means="no text of a file"),
        lambda trust: trust["rejection"].update(near=[0.5, 0]),
        lambda trust: trust["calibration"].update(temperature=0),
        lambda trust: trust["calibration"].update(temperature="2"),
        lambda trust: trust.update(how=3),
    ],
)
def test_numbers_that_cannot_be_are_refused(fitted, backbone, tmp_path, change):
    perlclip.save_adapter(fitted[0], tmp_path)
    info = json.loads((tmp_path / CONFIG).read_text())
    change(info["trust"])
    del info[OWN_HASH]
    (tmp_path / CONFIG).write_text(json.dumps(info))
    with pytest.raises(PerlclipError, match="is damaged"):
        perlclip.load_adapter(tmp_path, backbone=backbone)
    assert Trust.from_json(fitted[0].trust.as_json()) == fitted[0].trust


def test_the_commands(fitted, tree, tmp_path):
    adapter = tmp_path / "adapter"
    perlclip.save_adapter(fitted[0], adapter)
    table = run("inspect", adapter).stdout
    assert "21 (each left out)" in table and "nearness to shots" in table
    said = run("predict", adapter, tree / "red", "--reject", "--coverage", "0.8", "--reject-rate", "0.2").stdout
    assert len(said.splitlines()) == 8 and "labels=red" in said and ("one of these" in said or "none of these" in said)
    rows = run("predict", adapter, tree / "red", "--coverage", "0.8", "--json").stdout.splitlines()
    assert json.loads(rows[0])["labels"][0] == json.loads(rows[0])["label"]
    assert (
        "image,rank,label,probability,rejected\n" in run("predict", adapter, tree / "red", "--reject", "--csv").stdout
    )
    assert "coverage=0.99 needs 99 images" in fails("predict", adapter, tree / "red", "--coverage", "0.99")
    picture, page = tmp_path / "r.svg", tmp_path / "page.html"
    said = run("eval", adapter, tree, "--reliability", picture, "--page", page).stdout
    assert "without calibration: confidence" in said and "as answered: confidence" in said
    assert b"calibration error" in picture.read_bytes() and "<h2>How sure</h2>" in page.read_text()
    assert "calibrated on 3 images" in run("calibrate", adapter, tree).stdout  # the others were trained on
    assert "3 (own images)" in run("inspect", adapter).stdout
    assert "needs 9 images held out, and there are 3" in fails("predict", adapter, tree / "red", "--coverage", "0.9")
