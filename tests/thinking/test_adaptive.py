"""Adaptive thinking: where images stop, what they answer, and that budgets, deadlines and thresholds hold."""

import csv
import io
import json
import random

import numpy as np
import pytest
import torch

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.folder import CONFIG, OWN_HASH
from perlclip.backbone.accel import cuda_graphs
from perlclip.data.toybox import load_toybox
from perlclip.methods.perl import READOUTS
from perlclip.thinking import limits
from perlclip.thinking.limits import Budget, Deadline, Pace
from perlclip.thinking.policy import ALL_STEPS, NEVER, Plan, Policy, Stages, image_trajectory, settled, simulate
from perlclip.thinking.thresholds import Thresholds
from perlclip.training import choose_thresholds
from perlclip.training.choose_thresholds import choose
from tests.cli.test_cli import QUICK, fails, run
from tests.common import CLOSE, loud, random_pixels
from tests.conftest import draw_tree
from tests.methods.test_perl import PROMPTS

AT_ONCE = Policy(first=0.0, lead=0.0)


@pytest.fixture(scope="module")
def method(backbone):
    return loud(perlclip.create_method("perl", backbone))


@pytest.fixture(scope="module")
def state(method):
    state = method.class_state(PROMPTS)
    with torch.no_grad():
        method.class_embeddings(state)  # encoded before any test takes the time
    return state


@pytest.fixture(scope="module")
def pixels(backbone):
    return random_pixels(backbone, 40)


@pytest.fixture(scope="module")
def logits_KBC(method, pixels, state):
    with torch.no_grad():
        return image_trajectory(method, method.encode_image_steps(pixels), state)


@pytest.fixture(scope="module")
def mixed(logits_KBC) -> Policy:
    """A policy with which images stop at every step."""
    values_KB = torch.stack([settled(logits_KBC[0]), settled(logits_KBC[1], logits_KBC[0])])
    policy = Policy(first=values_KB[0].quantile(0.8).item(), lead=values_KB[1].quantile(0.7).item())
    assert set(simulate(policy, logits_KBC).tolist()) == {0, 1, 2, 3, 4}
    return policy


@torch.no_grad()
def answer(method, pixels, state, **plan):
    return Plan(method=method, **{"steps": 4, **plan}).answer(pixels, Stages(method, state))


# ---- where images stop ----


@torch.no_grad()
def test_recorded_stages_answer_like_those_that_are_not(method, pixels, state, mixed, tape, monkeypatch):
    """As on CUDA, with a tape for each graph: padded sizes, and outputs that the next batch overwrites."""
    monkeypatch.setattr(cuda_graphs, "is_on", lambda mode, device: mode != "off")
    stages = Stages(method, state, compile="auto")
    plan = Plan(method=method, steps=4, policy=mixed)
    batches = [pixels, pixels[:3], pixels, pixels[:3], pixels.flip(0), pixels[1:4]]
    asked = [method.frozen(some) for some in batches]
    answers = [plan.answer(images, stages) for images in asked]
    for some, images, found in zip(batches, asked, answers, strict=True):  # now that all have been overwritten
        wanted = plan.answer(some, Stages(method, state))
        assert found.steps_B.tolist() == wanted.steps_B.tolist()
        torch.testing.assert_close(found.logits_BC, wanted.logits_BC, **CLOSE)
        torch.testing.assert_close(images.pooled(), method.frozen(some).pooled(), **CLOSE)
    assert tape.made > 4 and tape.played > tape.made


@pytest.mark.parametrize("all_begin", [False, True])
def test_the_real_pass_is_the_one_foretold(method, pixels, state, logits_KBC, mixed, all_begin):
    mixed = Policy(NEVER, mixed.lead) if all_begin else mixed
    found = answer(method, pixels, state, policy=mixed)
    steps_B = simulate(mixed, logits_KBC)
    assert torch.equal(found.steps_B, steps_B)
    torch.testing.assert_close(found.logits_BC, logits_KBC[steps_B, torch.arange(40)], **CLOSE)


def test_the_rule_by_hand():
    """Two classes: a lead of 3, then 2, falls by 1 a step, so that it will be 0 two steps on; or 3, then 4, is 6."""
    falling, rising = torch.tensor([[3.0, 0.0], [2.0, 0.0]]), torch.tensor([[3.0, 0.0], [4.0, 0.0]])
    logits_KBC = torch.stack([falling, rising, falling], 1)[:, :2]
    logits_KBC = torch.cat([logits_KBC, logits_KBC[-1:]])
    assert settled(logits_KBC[0]).tolist() == [3, 3]
    assert settled(logits_KBC[1], logits_KBC[0]).tolist() == [0, 6]
    assert simulate(Policy(first=3.5, lead=0.5), logits_KBC).tolist() == [2, 1]
    assert simulate(Policy(first=2.5, lead=9.0), logits_KBC).tolist() == [0, 0]
    overtaken = torch.tensor([[1.0, 0.0, -9.0], [0.0, 0.5, -9.0]])
    assert settled(overtaken[1:], overtaken[:1]).item() == pytest.approx(0.5 + 2 * 1.5)


def test_no_thinking_and_all_of_it(method, pixels, state, logits_KBC):
    first, all_of_it = (answer(method, pixels, state, policy=policy) for policy in (AT_ONCE, ALL_STEPS))
    assert not first.steps_B.any() and (all_of_it.steps_B == 4).all()
    torch.testing.assert_close(first.logits_BC, logits_KBC[0], **CLOSE)
    with torch.no_grad():
        torch.testing.assert_close(all_of_it.logits_BC, method.trajectory(pixels, state)[-1], **CLOSE)
    assert not torch.allclose(first.logits_BC, all_of_it.logits_BC, atol=0.1)


@pytest.mark.parametrize("settings", [dict(variant="layerstep", depth=[3, 7], steps=2), dict(modalities="vision")])
def test_variants_stop_as_foretold(backbone, settings):
    method, pixels = loud(perlclip.create_method("perl", backbone, **settings)), random_pixels(backbone, 12)
    state = method.class_state(PROMPTS)
    with torch.no_grad():
        logits_KBC = image_trajectory(method, method.encode_image_steps(pixels), state)
    policy = Policy(settled(logits_KBC[0]).median().item(), settled(logits_KBC[1], logits_KBC[0]).median().item())
    steps_B = simulate(policy, logits_KBC)
    found = answer(method, pixels, state, policy=policy, steps=method.config.steps)
    assert len(set(steps_B.tolist())) > 1 and torch.equal(found.steps_B, steps_B)
    torch.testing.assert_close(found.logits_BC, logits_KBC[steps_B, torch.arange(12)], **CLOSE)


@pytest.mark.parametrize("modalities", ["both", "vision", "text"])
@pytest.mark.parametrize("readout", READOUTS)
def test_every_readout_stops_as_foretold_and_ends_at_the_logits(backbone, readout, modalities):
    method = loud(perlclip.create_method("perl", backbone, readout=readout, modalities=modalities))
    pixels, state, most = random_pixels(backbone, 24), method.class_state(PROMPTS), method.image_steps
    with torch.no_grad():
        logits_KBC, logits_BC = (
            image_trajectory(method, method.encode_image_steps(pixels), state),
            method.logits(pixels, state),
        )
        steps_KBC = method.trajectory(pixels, state)
    torch.testing.assert_close(answer(method, pixels, state, steps=most).logits_BC, logits_BC, **CLOSE)
    if not most:
        return
    if readout != "last":
        torch.testing.assert_close(logits_KBC, steps_KBC, **CLOSE)
        torch.testing.assert_close(answer(method, pixels, state, steps=2).logits_BC, steps_KBC[2], **CLOSE)
    policy = Policy(settled(logits_KBC[0]).median().item(), settled(logits_KBC[1], logits_KBC[0]).median().item())
    steps_B = simulate(policy, logits_KBC)
    found = answer(method, pixels, state, policy=policy)
    assert len(set(steps_B.tolist())) > 1 and torch.equal(found.steps_B, steps_B)
    torch.testing.assert_close(found.logits_BC, logits_KBC[steps_B, torch.arange(24)], **CLOSE)


def test_images_that_are_done_leave_the_batch(method, pixels, state, mixed, logits_KBC, monkeypatch):
    rows, pool = [], perlclip.backbone.Refinement.pool

    def spy(self, front_BkD=None, later=None):
        rows.append(len(self.x_BND))
        return pool(self, front_BkD, later)

    method.class_embeddings(state)
    monkeypatch.setattr(perlclip.backbone.Refinement, "pool", spy)
    steps_B = answer(method, pixels, state, policy=mixed).steps_B
    assert rows[-5:] == [40, *((steps_B >= k).sum().item() for k in (1, 2, 3, 4))]


def test_only_texts_that_think_cost_an_image_nothing(backbone):
    method = loud(perlclip.create_method("perl", backbone, modalities="text"))
    classifier = perlclip.Classifier(method, ["cat", "ox"])
    image = np.zeros((40, 40, 3), dtype=np.uint8)
    usual, adaptive = classifier.predict(image), classifier.predict(image, steps="adaptive", max_mean_steps=2)
    assert (usual.steps, adaptive.steps) == (0, 0) and usual.probability == pytest.approx(adaptive.probability)
    with pytest.raises(PerlclipError, match="no thresholds to set"):
        perlclip.set_thresholds(method, perlclip.ImageSet(images=[image], labels=[0], class_names=("cat",)))


# ---- budget ----


def test_a_budget_is_never_exceeded(method, pixels, state):
    """Varied batches, thresholds that want all steps; what one batch leaves, a later one may spend."""
    rng, budget, passes, images = random.Random(0), Budget(1.3), 0, 0
    for _ in range(25):
        batch = rng.choice([1, 1, 2, 3, 5, 8])
        steps_B = answer(method, pixels[:batch], state, limits=[budget]).steps_B
        passes, images = passes + steps_B.sum().item(), images + batch
        assert passes <= 1.3 * images and (budget.passes, budget.images) == (passes, images)
    assert passes > 1.3 * images - 1, "and all of it is used where it is wanted"


def test_what_is_not_spent_is_carried_on(method, pixels, state):
    budget = Budget(1.0)
    answer(method, pixels[:3], state, policy=AT_ONCE, limits=[budget])
    assert answer(method, pixels[:1], state, limits=[budget]).steps_B.tolist() == [4]
    assert answer(method, pixels[:1], state, limits=[budget]).steps_B.tolist() == [1]


def test_the_least_settled_think_first(method, pixels, state, logits_KBC):
    steps_B = answer(method, pixels, state, limits=[Budget(0.25)]).steps_B
    order = settled(logits_KBC[0]).argsort()
    assert steps_B[order].tolist() == [1] * 10 + [0] * 30


# ---- deadline ----


class Clock:
    """Time that passes only where the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def slow(monkeypatch):
    """A machine that needs 10 ms for each image and step, and 20 ms for each image's base pass."""
    from perlclip.methods.perl import Perl, Thinking

    clock, begin, step = Clock(), Perl.begin, Thinking.step

    def slow_begin(self, pixels):
        clock.now += 0.020 * len(pixels)
        return begin(self, pixels)

    def slow_step(self):
        clock.now += 0.010 * len(self.h_BD)
        return step(self)

    monkeypatch.setattr(limits, "clock", clock)
    monkeypatch.setattr(Perl, "begin", slow_begin)
    monkeypatch.setattr(Thinking, "step", slow_step)
    return clock


@pytest.mark.parametrize(("max_ms", "steps"), [(1000, 4), (59, 3), (41, 2), (35, 1), (21, 0), (1, 0)])
def test_a_step_is_made_only_if_it_fits(method, pixels, state, slow, max_ms, steps):
    pace = Pace()
    pace.note(1, 0.010)
    began = slow.now
    deadline = Deadline(max_ms, pace, share=0.5)
    assert answer(method, pixels[:1], state, limits=[deadline]).steps_B.tolist() == [steps]
    assert slow.now - began == pytest.approx(0.020 + 0.010 * steps)


def test_before_anything_is_measured_the_base_pass_stands_for_a_step(method, pixels, state, slow):
    for max_ms, steps in ((29, 0), (31, 1)):
        assert answer(method, pixels[:1], state, limits=[Deadline(max_ms, Pace(), 0.5)]).steps_B.tolist() == [steps]


def test_part_of_a_batch_may_go_on(method, pixels, state, slow):
    """131 ms: 80 for the base pass, 40 for a step of all four, then there is time for one of them."""
    pace = Pace()
    pace.note(1, 0.010)
    found = answer(method, pixels[:4], state, limits=[Deadline(131, pace, 0.5)])
    assert sorted(found.steps_B.tolist()) == [1, 1, 1, 2]


def test_a_slow_moment_is_forgotten():
    pace = Pace()
    pace.note(1, 5.0)
    assert pace.estimate(1) == 5.0
    for _ in range(limits.KEPT):
        pace.note(1, 0.01)
    assert pace.estimate(1) == 0.01
    pace.batches += limits.FORGOTTEN_AFTER + 1
    assert pace.estimate(1) is None


def test_other_sizes_are_judged_by_the_nearest():
    pace = Pace()
    pace.note(8, 0.08)
    pace.note(2, 0.03)
    assert [pace.estimate(n) for n in (1, 2, 5, 8, 16)] == [0.03, 0.03, 0.08, 0.08, 0.16]


# ---- thresholds ----


@pytest.fixture(scope="module")
def trained(tiny):
    """Drawn images that stop at different steps; that the method is not trained does not matter here."""
    images = load_toybox("tiny_toys").val.base()
    return loud(perlclip.create_method("perl", tiny)), images.select(range(0, len(images), 8))


@pytest.fixture(scope="module")
def thresholds(trained):
    return perlclip.set_thresholds(*trained, agreement=0.98, progress=False)


def test_thresholds_is_the_cheapest_that_agrees(logits_KBC):
    found = choose(logits_KBC, 0.9)
    answers_KB, points = logits_KBC.argmax(-1), [found.chosen, *found.frontier]
    for point in points:
        steps_B = simulate(point.policy, logits_KBC)
        same_B = answers_KB[steps_B, torch.arange(40)] == answers_KB[-1]
        assert point.mean_steps == pytest.approx(steps_B.double().mean().item())
        assert point.agreement == pytest.approx(same_B.double().mean().item())
    assert found.chosen.agreement >= 0.9
    assert all(point.mean_steps >= found.chosen.mean_steps for point in found.frontier if point.agreement >= 0.9)
    assert found.frontier[0].mean_steps == 0 and found.frontier[-1].agreement == 1
    means, agreements = ([getattr(p, name) for p in found.frontier] for name in ("mean_steps", "agreement"))
    assert means == sorted(means) and agreements == sorted(agreements)
    assert choose(logits_KBC, 1.0).chosen.mean_steps > choose(logits_KBC, 0.5).chosen.mean_steps


def test_a_budget_finds_its_policy(logits_KBC):
    found = choose(logits_KBC)
    for budget in (0, 0.3, 1, 2.5, 9):
        assert simulate(found.within(budget), logits_KBC).double().mean() <= budget
    assert found.within(None) == found.policy and found.within(-1) == found.within(0)


def test_thresholds_is_a_function_of_the_training_images(trained, thresholds):
    method, images = trained
    assert perlclip.set_thresholds(method, images, agreement=0.98, progress=False, batch_size=5) == thresholds
    assert perlclip.set_thresholds(method, images, agreement=0.98, progress=False, seed=2) != thresholds
    assert thresholds.views == 2 * len(images)


def test_thresholds_looks_at_views_that_training_has_not_seen(trained, monkeypatch):
    epochs, views = [], choose_thresholds.random_views

    def spy(images, preprocess, scale, order, *more, **options):
        epochs.extend(epoch for epoch, _ in order)
        return views(images, preprocess, scale, order, *more, **options)

    monkeypatch.setattr(choose_thresholds, "random_views", spy)
    method, images = trained
    perlclip.set_thresholds(method, images.select(range(3)), progress=False, views=2)
    assert len(set(epochs)) == len(epochs) == 2 and max(epochs) < 0


def test_thresholds_is_a_few_hundred_bytes_of_json(thresholds):
    text = json.dumps(thresholds.as_json())
    again = Thresholds.from_json(json.loads(text))
    assert len(text) < 1000 and again.policy == thresholds.policy
    assert [p.policy for p in again.frontier] == [p.policy for p in thresholds.frontier]


# ---- adapter, classifier, evaluate ----


@pytest.fixture
def folder(trained, thresholds, tmp_path):
    method, images = trained
    return perlclip.save_adapter(
        method, tmp_path / "adapter", class_names=images.class_names, template=images.template, thresholds=thresholds
    )


def test_an_adapter_carries_its_thresholds(folder, trained, thresholds):
    method, images = trained
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=trained[0].backbone)
    found = classifier.predict(images.images, steps="adaptive", batch_size=5)
    result = perlclip.evaluate(method, images, steps="adaptive", thresholds=thresholds, progress=False)
    assert [one.steps for one in found] == result.steps_B.tolist() and 0 < result.mean_steps < 4
    assert [one.label for one in found] == [images.class_names[c] for c in result.predictions_KB[-1]]
    assert result.metrics()["mean_steps"] == result.mean_steps
    assert {one.steps for one in classifier.predict(images.images)} == {4}
    assert "mean_steps" not in perlclip.evaluate(method, images, progress=False).metrics()


def test_a_fixed_number_of_steps(trained):
    method, images = trained
    classifier = perlclip.Classifier(method, images.class_names)
    two, four, usual = (classifier.predict(images.images[0], steps=steps) for steps in (2, 4, None))
    assert (two.steps, four.steps, usual.steps) == (2, 4, 4)
    assert four.probability == pytest.approx(usual.probability, abs=1e-5) != pytest.approx(two.probability, abs=1e-5)
    mean = [one.steps for one in classifier.predict(images.images, steps=2, max_mean_steps=1.5)]
    assert max(mean) == 2 and sum(mean) == int(1.5 * len(images))


def test_a_classifier_keeps_its_budget_over_calls(folder, trained):
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=trained[0].backbone)
    taken = []
    for image in trained[1].images:
        taken.append(classifier.predict(image, max_mean_steps=0.5).steps)
        assert sum(taken) <= 0.5 * len(taken)
    assert any(taken)


def test_a_deadline_leaves_the_base_pass(folder, trained):
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=trained[0].backbone)
    found = classifier.predict(trained[1].images, max_ms=1e-3)
    assert {one.steps for one in found} == {0} and all(one.label for one in found)


def test_methods_that_do_not_think_have_no_steps(backbone, trained):
    images = trained[1]
    method = perlclip.create_method("zero-shot", backbone)
    classifier = perlclip.Classifier(method, images.class_names)
    assert classifier.predict(images.images[0]).steps is None
    for ask in (dict(steps=2), dict(steps="adaptive"), dict(max_ms=5), dict(max_mean_steps=1)):
        with pytest.raises(PerlclipError, match="'zero-shot', which answers at once"):
            classifier.predict(images.images[0], **ask)
    with pytest.raises(PerlclipError, match="answers at once"):
        perlclip.set_thresholds(method, images)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (dict(steps=5), "a whole number from 0 to 4"),
        (dict(steps=-1), "a whole number from 0 to 4"),
        (dict(steps="adaptiv"), "'adaptive' or a whole number"),
        (dict(steps=True), "'adaptive' or a whole number"),
        (dict(max_mean_steps=-0.5), "max_mean_steps must be a finite number of at least 0, got -0.5"),
        (dict(max_mean_steps=float("nan")), "max_mean_steps must be"),
        (dict(max_ms=0), "max_ms must be a finite number above 0, got 0"),
        (dict(max_ms="soon"), "max_ms must be"),
    ],
)
def test_wrong_values_are_named(folder, trained, ask, words):
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=trained[0].backbone)
    with pytest.raises(PerlclipError, match=words):
        classifier.predict(trained[1].images[0], **ask)


def test_an_older_adapter_says_what_to_do(folder, trained):
    info = json.loads((folder / CONFIG).read_text())
    del info["adaptive"], info[OWN_HASH]
    (folder / CONFIG).write_text(json.dumps(info))
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=trained[0].backbone)
    for ask in (dict(steps="adaptive"), dict(max_ms=50), dict(max_mean_steps=1)):
        with pytest.raises(PerlclipError, match="set them with `perlclip set-thresholds ADAPTER DATA`"):
            classifier.predict(trained[1].images[0], **ask)
    assert classifier.predict(trained[1].images[0], steps=1, max_ms=1e6).steps == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda adaptive: None,
        lambda adaptive: {**adaptive, "chosen": [1, 1, float("nan"), 0]},
        lambda adaptive: {**adaptive, "chosen": [1, 1, 0]},
        lambda adaptive: {**adaptive, "chosen": [1, 1, "0", 0]},
        lambda adaptive: {**adaptive, "chosen": [1, 1.5, 0, 0]},
        lambda adaptive: {**adaptive, "frontier": []},
        lambda adaptive: {**adaptive, "frontier": [[1, 1, 0, float("inf")]]},
        lambda adaptive: {**adaptive, "frontier": 3},
        lambda adaptive: {key: value for key, value in adaptive.items() if key != "views"},
    ],
)
def test_damaged_thresholds_are_refused(folder, tiny, damage):
    info = json.loads((folder / CONFIG).read_text())
    info["adaptive"] = damage(info["adaptive"])
    (folder / CONFIG).write_text(json.dumps(info))
    with pytest.raises(PerlclipError, match=r"is damaged: .*adaptive thinking") as caught:
        perlclip.load_adapter(folder, backbone=tiny)
    assert "\n" not in str(caught.value)


def test_evaluation_takes_the_steps_that_the_thresholds_foretold(trained):
    found = perlclip.set_thresholds(*trained, progress=False, views=0)
    result = perlclip.evaluate(*trained, steps="adaptive", thresholds=found, progress=False, batch_size=9)
    assert result.mean_steps == pytest.approx(found.chosen.mean_steps) and 0 < result.mean_steps < 4


# ---- command line ----


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, tree, clip_folder):
    out = tmp_path_factory.mktemp("fitted") / "adapter"
    command = ["fit", tree, "--out", out, "--backbone", clip_folder, "--shots", 4, *QUICK, "--set", "steps=3"]
    assert run(*command).exit_code == 0
    return out


def test_fit_sets_thresholds_and_the_commands_show_the_steps(fitted, tree):
    assert json.loads(run("inspect", fitted, "--json").stdout)["adaptive"]["views"] == 24
    assert " of 3 on the training images" in (fitted / "README.md").read_text()
    images = tree / "red"
    rows = [
        json.loads(line) for line in run("predict", fitted, images, "--steps", "adaptive", "--json").stdout.splitlines()
    ]
    table = list(csv.DictReader(io.StringIO(run("predict", fitted, images, "--steps", 2, "--csv").stdout)))
    budget = list(csv.DictReader(io.StringIO(run("predict", fitted, images, "--max-mean-steps", 0, "--csv").stdout)))
    assert len(rows) == 8 and all(0 <= row["steps"] <= 3 for row in rows)
    assert {row["steps"] for row in table} == {"2"} and {row["steps"] for row in budget} == {"0"}
    assert "steps=0" in run("predict", fitted, images, "--max-ms", 0.001).stdout
    plain = run("predict", fitted, images, "--csv").stdout.splitlines()
    assert plain[0] == "image,rank,label,probability"
    metrics = json.loads(run("eval", fitted, tree, "--steps", "adaptive", "--json").stdout)
    assert 0 <= metrics["mean_steps"] <= 3 and len(metrics["step_accuracy"]) == 1
    assert "0.50 refinement steps per image" in run("eval", fitted, tree, "--steps", 1, "--max-mean-steps", 0.5).stdout


def test_wrong_usage_of_the_commands(fitted, tree):
    assert "neither a whole number nor 'adaptive'" in run("predict", fitted, tree / "red", "--steps", "some").output
    assert run("predict", fitted, tree / "red", "--steps", "-1").exit_code == 2
    assert "from 0 to 3" in fails("eval", fitted, tree, "--steps", 4)
    assert "max_mean_steps must be" in fails("eval", fitted, tree, "--max-mean-steps", "nan")
    assert "max_ms must be" in fails("predict", fitted, tree / "red", "--max-ms", -1)


def test_an_older_adapter_gets_its_thresholds(fitted, tree, tmp_path):
    info = json.loads((fitted / CONFIG).read_text())
    (fitted / CONFIG).write_text(
        json.dumps({key: value for key, value in info.items() if key not in ("adaptive", OWN_HASH)})
    )
    assert "perlclip set-thresholds" in fails("predict", fitted, tree / "red", "--steps", "adaptive")
    assert "on 24 training views" in run("set-thresholds", fitted, tree).stdout
    again = json.loads((fitted / CONFIG).read_text())
    assert again["adaptive"] == info["adaptive"] and again["training"] == info["training"]


def test_an_adapter_that_does_not_say_what_it_was_trained_on_gets_thresholds_too(backbone, tree, tmp_path):
    """`predict` sent its user to `set-thresholds`, and that one to Python."""
    method = loud(perlclip.create_method("perl", backbone))
    bare = perlclip.save_adapter(
        method, tmp_path / "bare", class_names=["red", "blue", "green grass"], template="a {}."
    )
    assert "perlclip set-thresholds ADAPTER DATA" in fails("predict", bare, tree / "red", "--steps", "adaptive")
    result = run("set-thresholds", bare, tree)
    assert result.exit_code == 0, result.output
    assert "on 48 views" in result.stdout and "is not what" in result.stderr and "24 images" in result.stderr
    assert run("predict", bare, tree / "red", "--steps", "adaptive").exit_code == 0
    draw_tree(tmp_path / "other", {"rad": (1, 2, 3)})
    assert "unknown class 'rad'; did you mean 'red'?" in fails("set-thresholds", bare, tmp_path / "other")
    assert "no such file or folder" in fails("set-thresholds", bare, tmp_path / "gone")
