"""How `fit` chooses a lens: where shots are clearly better off, by texts and head alike, and none otherwise."""

import json
import re

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip import Recipe
from perlclip.backbone import PLAIN
from perlclip.data.toybox import load_toybox
from perlclip.training.choose_lens import IMAGES, Through, best_lens, choose_lens, some_shots
from tests.cli.test_cli import run

QUICK = Recipe(lr=1e-3, epochs=1, crop_scale=(0.5, 1.0))
CLASSES, WIDTH = 6, 24


def embedded(text: float, own: float, shots: int = 8, seed: int = 0) -> Through:
    """Shots whose embeddings have so much of their class's text, and of something that is the class's own."""
    draw = torch.Generator().manual_seed(seed)
    texts_CE, own_CE = (
        texts(),
        F.normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9)), dim=-1),
    )
    labels_N = torch.arange(CLASSES).repeat_interleave(shots)
    noise_NE = F.normalize(torch.randn(len(labels_N), WIDTH, generator=draw), dim=-1)
    v_NE = F.normalize(text * texts_CE[labels_N] + own * own_CE[labels_N] + noise_NE, dim=-1)
    return Through(v_NE, v_NE)


def texts() -> torch.Tensor:
    return F.normalize(torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(5)), dim=-1)


@pytest.mark.parametrize(
    ("plain", "other", "shots", "taken"),
    [
        ((0.3, 0.3), (1.2, 1.2), 8, True),
        ((0.0, 0.0), (3.0, 3.0), 2, True),
        ((0.0, 0.0), (3.0, 3.0), 1, False),  # six shots say nothing clearly
        ((0.3, 0.3), (0.3, 0.3), 8, False),
        ((1.2, 1.2), (0.3, 0.3), 8, False),
        ((0.3, 0.3), (0.3, 1.5), 8, False),  # the head alone gains: new classes would not
        ((0.2, 1.5), (0.8, 0.0), 8, False),  # the texts alone gain
    ],
)
def test_a_lens_is_taken_where_texts_and_head_are_clearly_better(plain, other, shots, taken):
    seen = {PLAIN: embedded(*plain, shots), "negative": embedded(*other, shots, seed=1)}
    labels_N = torch.arange(CLASSES).repeat_interleave(shots)
    choice = best_lens(seen, labels_N, texts(), 100.0)
    assert choice.name == ("negative" if taken else PLAIN) and choice.images == len(labels_N)


def test_as_many_shots_are_looked_at_as_are_needed():
    shots = load_toybox("toybox").train
    some = some_shots(shots, seed=1)
    by_class = some.by_class()
    assert IMAGES <= len(some) < IMAGES + 16 and max(map(len, by_class.values())) == 16
    assert some_shots(shots, seed=1).labels == some.labels and some.class_names == shots.class_names
    two = shots.select(i for i, label in enumerate(shots.labels) if int(label) < 2)
    assert len(some_shots(two, seed=1)) == 32


@pytest.fixture(scope="module")
def negatives():
    """Four shots of each base class of a set of negatives, and other images of these classes."""
    data = load_toybox("negative_toys")
    train = data.train.base()
    places = [i for where in train.by_class().values() for i in where[:4]]
    return train.select(places), data.val.base()


def test_a_negative_is_seen_to_be_one_and_training_looks_through_the_lens(tiny, negatives, tmp_path):
    shots, others = negatives
    method = perlclip.create_method("perl", tiny)
    fitted = perlclip.fit(method, shots, recipe=QUICK, rehearse=False, thresholds=False, progress=False)
    assert fitted.lens is not None and fitted.lens.name == fitted.method.config.lens == "negative"
    record = fitted.training["lens"]
    assert record["name"] == "negative" and record["zero_shot"]["negative"] > record["zero_shot"][PLAIN] + 20
    perlclip.save_adapter(fitted, tmp_path / "a")
    assert "negative" in (tmp_path / "a" / "README.md").read_text()
    loaded = perlclip.load_adapter(tmp_path / "a", backbone=tiny)
    plain = perlclip.evaluate(perlclip.create_method("zero-shot", tiny), others, progress=False).accuracy
    assert perlclip.evaluate(loaded, others, progress=False).accuracy > plain + 20


def test_what_was_fitted_before_keeps_its_own_lens(tiny, negatives):
    """A method that trains nothing may be fitted again and again; only the head is each result's own."""
    shots, _ = negatives
    method = perlclip.create_method("gaussian", tiny)
    clean = load_toybox("toybox").train.base()
    first = perlclip.fit(method, clean.select([i for where in clean.by_class().values() for i in where[:3]]))
    again = perlclip.fit(method, shots)
    assert [each.method.config.lens for each in (first, again)] == [PLAIN, "negative"] and first.lens.name == PLAIN
    assert method.config.lens == PLAIN and "no lens" in first.lens.sentence
    coop = perlclip.create_method("coop", tiny)
    with pytest.raises(perlclip.PerlclipError, match="nonsense"):
        perlclip.fit(coop, shots, recipe="nonsense")
    assert coop.config.lens == PLAIN


def test_a_training_goes_on_with_the_lens_that_it_began_with(tiny, negatives, tmp_path):
    shots, _ = negatives
    how = dict(recipe=QUICK, head=False, thresholds=False, progress=False, checkpoint=tmp_path / "c")
    for lens, then in ((PLAIN, PLAIN), ("auto", "negative")):
        perlclip.fit(perlclip.create_method("perl", tiny), shots, lens=lens, **how)
        again = perlclip.fit(perlclip.create_method("perl", tiny), shots, resume=True, **how)
        assert again.method.config.lens == then and ("lens" in again.training) == (then == "negative")


def test_clean_drawings_need_no_lens(tiny):
    data = load_toybox("toybox").train.base()
    places = [i for where in data.by_class().values() for i in where[:4]]
    assert choose_lens(perlclip.create_method("perl", tiny), data.select(places)).name == PLAIN


def test_who_names_a_lens_has_it(tiny, negatives):
    shots, _ = negatives
    how = dict(recipe=QUICK, head=False, thresholds=False, progress=False)
    given = perlclip.fit(perlclip.create_method("perl", tiny, lens="near"), shots, **how)
    assert (given.method.config.lens, given.lens) == ("near", None)
    told = perlclip.fit(perlclip.create_method("perl", tiny), shots, lens="plain", **how)
    assert (told.method.config.lens, told.lens) == (PLAIN, None) and "lens" not in told.training


def test_the_command_says_what_the_lens_does(tmp_path):
    how = ("--backbone", "tiny", "--method", "gaussian", "--shots", 4, "--out")
    said = run("fit", "toybox:negative_toys/base", *how, tmp_path / "a").stdout
    assert "lens 'negative', dark for bright" in said and "→ through the lens " in said
    assert "lens" not in run("fit", "toybox:negative_toys/base", "--lens", PLAIN, *how, tmp_path / "b").stdout
    wrong = run("fit", "toybox:negative_toys/base", "--lens", "smoth", *how, tmp_path / "c")
    assert wrong.exit_code and "unknown lens 'smoth'; did you mean 'smooth'" in wrong.stderr


def test_the_command_tells_zero_shot_the_lens_and_the_head_apart(tmp_path):
    how = ("fit", "toybox:negative_toys/base", "--backbone", "tiny", "--method", "zero-shot", "--shots", 4)
    said = run(*how, "--out", tmp_path / "a").stdout
    assert re.search(r"zero-shot 5\d\.\d % → through the lens \d+\.\d % → zero-shot \+ head", said), said
    assert "(each left out): zero-shot through the lens" in said and ", lens " in said
    bare = run(*how, "--no-head", "--lens", "negative", "--out", tmp_path / "b").stdout
    assert "→ through the lens" in bare and "head" not in bare
    assert perlclip.load_adapter(tmp_path / "b").method.config.lens == "negative"
    plain = run(*how, "--no-head", "--out", tmp_path / "c").stdout
    assert re.search(r"images: zero-shot 5\d\.\d %$", plain, re.M), plain


def test_a_benchmark_has_rows_with_the_lens_chosen_beside_those_without(tmp_path):
    how = ("bench", "generalised", "--datasets", "negative_toys", "--methods", "gaussian", "--shots", 2, "--seeds", 1)
    for more in ((), ("--lens",)):
        assert run(*how, "--out", tmp_path, *more).exit_code == 0
    report = (tmp_path / "report.md").read_text() if (tmp_path / "report.md").exists() else ""
    told = report or "\n".join(path.read_text() for path in tmp_path.rglob("*.csv"))
    assert "gaussian" in told and "+ lens" in told
    names = sorted(path.parent.name for path in tmp_path.rglob("run.json"))
    assert len(names) == 2 and names[1] == f"{names[0]}-lens"
    (record,) = (json.loads(path.read_text()) for path in tmp_path.rglob(f"{names[1]}/run.json"))
    adapter = perlclip.load_adapter(next(tmp_path.rglob(names[1])))
    assert record["lens"]["name"] == adapter.method.config.lens == "negative" == adapter.training["lens"]["name"]
