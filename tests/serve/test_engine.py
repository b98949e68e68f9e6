"""Rows of many adapters in one batch: each is answered as by its adapter alone."""

import pytest
import torch

import perlclip
from perlclip.errors import PerlclipError
from perlclip.inference.classifier import Classifier
from perlclip.serve import engine, sheets
from perlclip.serve.engine import Engine, ImageRow, Loaded
from perlclip.thinking.limits import clock
from tests.common import random_pixels
from tests.serve.adapters import ALONE, KINDS, random_adapter

CLOSE = dict(abs=2e-5, rel=1e-3)


@pytest.fixture(scope="module")
def loaded(backbone):
    """Three of each kind: other seeds, class lists, heads; the third is asked about classes of which some are new."""
    found = []
    for n, kind in enumerate(KINDS):
        for turn in range(3):
            adapter = random_adapter(backbone, kind, 3 * n + turn, head=None if turn < 2 else True)
            names = adapter.class_names if turn < 2 else (*adapter.class_names[:2], "ant", "bee")
            found.append(Loaded.of(f"{kind}-{turn}", Classifier(adapter, names)))
    return found


@pytest.fixture(scope="module")
def pixels(backbone):
    return list(random_pixels(backbone, 5))


def row_of(view, one, wanted=None, **how):
    return ImageRow(pixels=view, adapter=one, wanted=wanted or one.classifier.judge.wanted(), **how)


def alone(row, **how):
    """What `Classifier.predict` does, from the view on."""
    classifier = row.adapter.classifier
    return classifier.answer(row.pixels[None], row.wanted, classifier.plan(row.steps, row.max_mean_steps, None))[0]


def assert_same(found, expected):
    assert not isinstance(found, PerlclipError), found
    assert (found.label, found.steps, found.rejected, found.labels) == (
        expected.label, expected.steps, expected.rejected, expected.labels,
    )  # fmt: skip
    assert [p for _, p in found.top] == pytest.approx([p for _, p in expected.top], **CLOSE)


def test_only_those_that_must_are_asked_alone(loaded):
    assert {one.name.rpartition("-")[0] for one in loaded if one.sheet is None} == ALONE


def test_every_kind_in_one_batch_answers_as_alone(backbone, loaded, pixels):
    rows = [
        row_of(pixels[i % 5], one, one.classifier.judge.wanted(top_k=1 + i % 9)) for i, one in enumerate(loaded * 2)
    ]
    for row, found in zip(rows, Engine(backbone).answer(rows), strict=True):
        expected = alone(row)
        assert_same(found, expected)
        assert len(found.top) == row.wanted.top_k


def test_steps_thresholds_and_budgets_are_each_rows_own(backbone, loaded, pixels):
    thinking = [one for one in loaded if one.steps and one.sheet]
    rows = []
    for i, one in enumerate(thinking * 2):
        how = [{"steps": 1}, {"steps": 0}, {"steps": "adaptive"}, {}][i % 4]
        wanted = one.classifier.judge.wanted(top_k=2)
        rows.append(row_of(pixels[i % 5], one, wanted, **how))
    found = Engine(backbone).answer(rows)
    for row, one in zip(rows, found, strict=True):
        assert_same(one, alone(row))
    adaptive = [one.steps for row, one in zip(rows, found, strict=True) if row.steps == "adaptive"]
    assert len(set(adaptive)) > 1  # some stop early, some do not
    # A budget is an adapter's, over all that it answers: three rows at 1 step each on average.
    adapter = next(one for one in thinking if one.name == "plain-0")
    spending = [row_of(view, adapter, max_mean_steps=1) for view in pixels]
    assert sum(one.steps for one in Engine(backbone).answer(spending)) <= 5


def test_what_is_late_takes_no_more_steps(backbone, loaded, pixels):
    plain = [one for one in loaded if one.name.startswith(("plain", "rising"))]
    mine = Engine(backbone)
    rows = [row_of(pixels[0], one, until=clock() - 1) for one in plain]
    assert {one.steps for one in mine.answer(rows)} == {0}
    rows = [row_of(pixels[0], one, steps=2, until=clock() + 99) for one in plain]
    assert {one.steps for one in mine.answer(rows)} == {2}


def test_rejection_and_sets_are_those_of_the_adapter(backbone, loaded, pixels):
    rows = []
    for i, one in enumerate(loaded):
        coverage = None if one.name.endswith("2") else 0.9
        wanted = one.classifier.judge.wanted(
            reject=True, reject_rate=0.3, coverage=coverage, sets=("lac", "raps")[i % 2]
        )
        rows.append(row_of(pixels[i % 5], one, wanted))
    found = Engine(backbone).answer(rows)
    for row, one in zip(rows, found, strict=True):
        assert_same(one, alone(row))
    assert {one.rejected for one in found} == {True, False}


def test_several_labels_are_those_of_the_adapter(backbone, loaded, pixels):
    """Beside rows that are asked for one label."""
    rows = [
        row_of(pixels[i % 5], one, one.classifier.judge.wanted(top_k=1 + i % 3, multi_label=bool(i % 4)))
        for i, one in enumerate(loaded * 2)
    ]
    found = Engine(backbone).answer(rows)
    for row, one in zip(rows, found, strict=True):
        assert_same(one, alone(row))
    assert len({len(one.labels) for one in found if one.labels is not None}) > 2


def test_one_image_through_many_adapters_has_one_base_pass(backbone, loaded, pixels, monkeypatch):
    mixed = [one for one in loaded if one.sheet]
    passes = []
    embed = backbone.vision.embed.forward
    monkeypatch.setattr(backbone.vision.embed, "forward", lambda x: (passes.append(len(x)), embed(x))[1])
    Engine(backbone).answer([row_of(pixels[0], one) for one in mixed])
    assert passes == [1] * len({one.lens for one in mixed}), "one for each lens"


def test_what_is_wrong_with_one_adapter_is_no_matter_of_the_others(backbone, loaded, pixels):
    good = next(one for one in loaded if one.name == "plain-1")
    spoilt = random_adapter(backbone, "plain", 1)
    with torch.no_grad():
        next(spoilt.method.parameters()).fill_(float("nan"))
    bad = Loaded.of("bad", Classifier(spoilt))
    rows = [row_of(pixels[i], one) for i, one in enumerate((good, bad, good))]
    first, wrong, last = Engine(backbone).answer(rows)
    assert isinstance(wrong, PerlclipError) and "not a number" in str(wrong)
    assert_same(first, alone(rows[0]))
    assert_same(last, alone(rows[2]))


def test_what_cuda_does_with_many_lists_is_the_same(backbone, loaded, pixels, monkeypatch):
    monkeypatch.setattr(sheets, "GATHERED_ON", ("cpu",))
    monkeypatch.setattr(sheets, "ROOM", 2000)
    rows = [row_of(pixels[1], one, one.classifier.judge.wanted(top_k=3)) for one in loaded if one.sheet]
    for row, found in zip(rows, Engine(backbone).answer(rows), strict=True):
        assert_same(found, alone(row))


def test_a_batch_as_it_is_recorded_for_cuda_is_the_same(backbone, loaded, pixels, monkeypatch):
    """Padded to a power of two, with the projectors as an input: here it is run without being recorded."""
    sizes = []

    class Plainly:
        on = True

        def __init__(self, work, device, mode):
            self.work = work

        def __call__(self, *inputs):
            sizes.append(tuple(len(each) for each in inputs))
            return self.work(*inputs)

    monkeypatch.setattr(engine, "Compiled", Plainly)
    of_one_shape = [one for one in loaded if one.name in ("plain-0", "plain-1", "plain-2", "vision-1", "vision-2")]
    for views in (pixels, [pixels[0]] * 5):
        rows = [
            row_of(view, one, one.classifier.judge.wanted(top_k=2))
            for view, one in zip(views, of_one_shape, strict=True)
        ]
        for row, found in zip(rows, Engine(backbone).answer(rows), strict=True):
            assert_same(found, alone(row))
    assert sizes == [(8, 8, 8), (1, 8, 8)]
    sizes.clear()
    monkeypatch.setattr(engine, "is_on", lambda mode, device: True)
    Engine(backbone).warm_up(of_one_shape[0], 5)
    assert (
        sizes
        == [(1, 1, 1)] * 2
        + [(2, 2, 2)] * 2
        + [(1, 2, 2)] * 2
        + [(4, 4, 4)] * 2
        + [(1, 4, 4)] * 2
        + [(8, 8, 8)] * 2
        + [(1, 8, 8)] * 2
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_recorded_before_they_come_answer_as_alone_on_cuda():
    backbone = perlclip.load_backbone("tiny", device="cuda")
    loaded = [Loaded.of(str(n), Classifier(random_adapter(backbone, "rising", n), compile="off")) for n in range(12)]
    views = list(random_pixels(backbone, 12).to(backbone.device))
    mine = Engine(backbone)
    mine.warm_up(loaded[0], 16)
    recorded = next(iter(mine._recorded.values())).seconds
    for some in (views, views[:1] * 12, views[:3]):
        rows = [row_of(view, one) for view, one in zip(some, loaded, strict=False)]
        for row, found in zip(rows, mine.answer(rows), strict=True):
            expected = alone(row)
            assert found.label == expected.label and found.probability == pytest.approx(expected.probability, abs=1e-3)
    assert next(iter(mine._recorded.values())).seconds == recorded > 0
