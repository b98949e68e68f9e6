"""fit and evaluate: determinism, interrupts, resuming, precision, schedules."""

import json
import math
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import perlclip
from perlclip import ImageSet, PerlclipError, Recipe
from perlclip.backbone import base
from perlclip.backbone.accel import cuda_graphs
from perlclip.training import loop
from perlclip.training.gradients import Gradients
from perlclip.training.loop import Interrupted

QUICK = Recipe(lr=1e-3, epochs=2, batch_size=4)


@pytest.fixture(scope="module")
def train_set(tree) -> ImageSet:
    return perlclip.train_val(perlclip.load_images(tree), shots=4, seed=1)[0]


def weights(method) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in method.named_parameters()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def trained(backbone, train_set, seed=1, **options) -> dict[str, torch.Tensor]:
    method = perlclip.create_method("perl", backbone, seed=seed, steps=2)
    perlclip.fit(method, train_set, **{"recipe": QUICK, "seed": seed, "thresholds": False, "head": False} | options)
    return weights(method)


def test_one_seed_one_result(backbone, train_set):
    first = trained(backbone, train_set)
    assert same(first, trained(backbone, train_set))
    assert same(first, trained(backbone, train_set, workers=2)), "worker processes cannot change the result"
    assert not same(first, trained(backbone, train_set, seed=2))


def test_one_seed_one_file(backbone, train_set, tmp_path):
    files = []
    for run in ("a", "b"):
        method = perlclip.create_method("perl", backbone, seed=5)
        perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False, seed=5)
        folder = perlclip.save_adapter(method, tmp_path / run, class_names=train_set.class_names, template="a {}.")
        files.append((folder / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]


def test_initialisation_follows_the_seed_and_leaves_the_global_one_alone(backbone):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    a, b, c = (perlclip.create_method("perl", backbone, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert same(weights(a), weights(b)) and not same(weights(a), weights(c))
    projector = perlclip.create_method("perl", backbone, rank=64).projectors["vision"]
    assert 0.015 < projector.down.weight.std() < 0.025 and projector.up.bias.abs().max() == 0


def test_frozen_weights_are_bit_identical_after_training(clip_folder, train_set):
    fresh = perlclip.load_backbone(str(clip_folder))
    before = {side: {k: v.clone() for k, v in getattr(fresh, side).state_dict().items()} for side in ("vision", "text")}
    trained(fresh, train_set)
    for side, state in before.items():
        assert same(state, dict(getattr(fresh, side).state_dict()))


class StopAfter:
    """Press Ctrl-C while a given training step is being computed."""

    def __init__(self, method, step: int) -> None:
        self.loss, self.left = method.loss, step

    def __call__(self, *inputs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return self.loss(*inputs)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_interrupt_and_resume_reach_the_same_result(backbone, train_set, tmp_path, monkeypatch, optimizer, step):
    chosen = replace(QUICK, optimizer=optimizer)
    whole = trained(backbone, train_set, recipe=chosen)
    path = tmp_path / "checkpoint.safetensors"
    method = perlclip.create_method("perl", backbone, seed=1, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(method, "loss", StopAfter(method, step))
        with pytest.raises(Interrupted, match=f"after step {step}"):
            perlclip.fit(method, train_set, recipe=chosen, checkpoint=path)
    assert path.exists() and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    fresh = perlclip.create_method("perl", backbone, seed=99, steps=2)
    result = perlclip.fit(fresh, train_set, recipe=chosen, checkpoint=path, resume=True)
    assert same(weights(fresh), whole)
    assert result.steps == 6

    again = perlclip.create_method("perl", backbone, seed=98, steps=2)
    assert perlclip.fit(again, train_set, recipe=chosen, checkpoint=path, resume=True).steps == 6
    assert same(weights(again), whole), "resuming a finished training is the finished training"


def test_a_second_interrupt_stops_at_once(backbone, train_set, monkeypatch):
    method = perlclip.create_method("perl", backbone)

    def twice(*_):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(method, "loss", twice)
    with pytest.raises(KeyboardInterrupt) as caught:
        perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False)
    assert not isinstance(caught.value, Interrupted)


def test_checkpoints_are_written_while_training(backbone, train_set, tmp_path, monkeypatch):
    monkeypatch.setattr("perlclip.training.loop.CHECKPOINT_SECONDS", 0.0)
    path, method = tmp_path / "c.safetensors", perlclip.create_method("perl", backbone)
    loss, seen = method.loss, []
    monkeypatch.setattr(method, "loss", lambda *inputs: (seen.append(path.exists()), loss(*inputs))[1])
    perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False, checkpoint=path)
    assert seen == [False] + [True] * 5


def interrupted_run(backbone, train_set, path: Path, monkeypatch) -> None:
    method = perlclip.create_method("perl", backbone, seed=1)
    with monkeypatch.context() as patch:
        patch.setattr(method, "loss", StopAfter(method, 2))
        with pytest.raises(Interrupted):
            perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False, checkpoint=path)


def test_resuming_something_else_is_refused(backbone, train_set, tmp_path, monkeypatch):
    path = tmp_path / "c.safetensors"
    interrupted_run(backbone, train_set, path, monkeypatch)
    method = perlclip.create_method("perl", backbone)
    fewer = train_set.select(range(8))
    for change, words in (
        ({"seed": 2}, r"made with another seed \(1, now 2\)$"),
        ({"recipe": replace(QUICK, lr=5e-4)}, r"made with another recipe lr \(0.001, now 0.0005\)$"),
        ({"train_set": fewer}, "made with other training images, another number of them$"),
    ):
        options = {"train_set": train_set, "recipe": QUICK, "checkpoint": path, "resume": True} | change
        with pytest.raises(PerlclipError, match=words):
            perlclip.fit(method, options.pop("train_set"), **options)
    content = path.read_bytes()
    for size in (0, 5, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(PerlclipError, match="cannot resume from"):
            perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False, checkpoint=path, resume=True)


def test_a_loss_that_is_not_a_number_stops_before_the_step(backbone, train_set, monkeypatch):
    method = perlclip.create_method("perl", backbone)
    before = weights(method)
    monkeypatch.setattr(method, "loss", lambda *_: torch.tensor(math.nan, requires_grad=True))
    with pytest.raises(PerlclipError, match="the loss became nan at step 1; lower the learning rate"):
        perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False)
    assert same(before, weights(method))


@pytest.fixture
def ahead(monkeypatch):
    """Train as on CUDA, where losses are read in bunches and the optimiser is fused; here all of an epoch's at once."""
    monkeypatch.setattr(perlclip.training.gradients, "AHEAD", ("cpu",))
    monkeypatch.setattr(perlclip.training.loop, "LOSS_SECONDS", math.inf)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_reading_losses_later_changes_nothing(backbone, train_set, request, tmp_path, optimizer):
    recipe = replace(QUICK, optimizer=optimizer)
    plain, fused = (perlclip.create_method("perl", backbone) for _ in range(2))
    want = perlclip.fit(plain, train_set, recipe=recipe)
    request.getfixturevalue("ahead")
    got = perlclip.fit(fused, train_set, recipe=recipe, checkpoint=tmp_path / "c")
    torch.testing.assert_close(got.losses, want.losses, atol=1e-4, rtol=1e-4)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        assert b.grad is None, "nothing of the steps is left"


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("at", [1, 4])
def test_a_loss_found_out_later_leaves_the_weights_before_it(
    backbone, train_set, monkeypatch, ahead, tmp_path, optimizer, at
):
    method = perlclip.create_method("perl", backbone)
    loss, before = type(method).loss, []

    def breaks(self, *batch):
        before.append(weights(self))
        return loss(self, *batch) * (math.nan if len(before) == at else 1.0)

    monkeypatch.setattr(type(method), "loss", breaks)
    with pytest.raises(PerlclipError, match=f"the loss became nan at step {at}; lower the learning rate"):
        perlclip.fit(method, train_set, recipe=replace(QUICK, optimizer=optimizer), checkpoint=tmp_path / "c")
    assert len(before) > at, "training went on"
    assert same(before[at - 1], weights(method)) and not (tmp_path / "c").exists()


def test_what_was_recorded_serves_the_next_training(backbone, train_set, monkeypatch, ahead, tape):
    """From other numbers in the same tensors; with other settings it is recorded anew, for other classes refused."""
    monkeypatch.setattr(cuda_graphs, "is_on", lambda mode, device: mode != "off")
    how = {"recipe": replace(QUICK, epochs=4), "thresholds": False, "head": False}  # batches of 4
    method, plain = (perlclip.create_method("perl", backbone, steps=2) for _ in range(2))
    begin, kept = weights(method), Gradients(method, train_set.classes)
    want = perlclip.fit(plain, train_set, compile="off", **how)
    for fits in range(2):
        method.load_state_dict(begin)
        scaler = kept.scaler
        got = perlclip.fit(method, train_set, gradients=kept, **how)
        assert got.losses == want.losses and same(weights(method), weights(plain))
        assert kept.scaler is not scaler, "a loss scale that has grown is not the next training's"
        assert tape.made == 1 and tape.played == 9 + 12 * fits and (got.compile_seconds > 0) == (fits == 0)
    assert all(p.grad is None for p in method.parameters())
    method.config = replace(method.config, loss_scale=0.5)
    method.load_state_dict(begin)
    assert perlclip.fit(method, train_set, gradients=kept, **how).losses != want.losses and tape.made == 2
    perlclip.fit(plain, train_set, **how)
    perlclip.fit(plain, train_set, **how)
    assert tape.made == 4, "unless they are kept, they are gone with their training"
    with pytest.raises(PerlclipError, match="another method or of other classes"):
        perlclip.fit(plain, train_set, gradients=kept, **how)
    with pytest.raises(PerlclipError, match="another method or of other classes"):
        perlclip.fit(method, replace(train_set, template="a {}"), gradients=kept, **how)


def test_a_checkpoint_has_the_losses_not_read_yet(backbone, train_set, monkeypatch, ahead, tmp_path):
    whole, parts = (perlclip.create_method("perl", backbone) for _ in range(2))
    want = perlclip.fit(whole, train_set, recipe=QUICK, thresholds=False, head=False)
    step, steps = perlclip.training.loop._Run.train_step, []

    def stops(run, *batch):
        step(run, *batch)
        steps.append(1)
        if len(steps) == 5:
            assert len(run.unread) > 0
            run.save(tmp_path / "c")
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(perlclip.training.loop._Run, "train_step", stops)
        perlclip.fit(parts, train_set, recipe=QUICK, thresholds=False, head=False, checkpoint=tmp_path / "c")
    got = perlclip.fit(
        parts, train_set, recipe=QUICK, thresholds=False, head=False, checkpoint=tmp_path / "c", resume=True
    )
    assert got.losses == want.losses and same(weights(whole), weights(parts))


def test_weights_that_are_not_numbers_after_the_last_step(backbone, train_set, monkeypatch):
    method = perlclip.create_method("perl", backbone)
    step = torch.optim.AdamW.step

    def burst(self, *args):
        step(self, *args)
        next(method.parameters()).data.fill_(math.inf)

    monkeypatch.setattr(torch.optim.AdamW, "step", burst)
    with pytest.raises(PerlclipError, match="no longer finite"):
        perlclip.fit(method, train_set, recipe=Recipe(batch_size=64))
    with pytest.raises(PerlclipError, match="not finite numbers"):
        perlclip.evaluate(method, train_set)


def test_a_bfloat16_backbone_keeps_the_projector_in_float32(clip_folder, backbone, train_set):
    dtypes, handles = set(), []
    half = perlclip.load_backbone(str(clip_folder), dtype="bfloat16")
    method = perlclip.create_method("perl", half, steps=2)
    for projector in method.projectors.values():
        handles.append(projector.down.register_forward_hook(lambda m, i, o: dtypes.add((i[0].dtype, o.dtype))))
    result = perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False)
    full = perlclip.fit(
        perlclip.create_method("perl", backbone, steps=2), train_set, recipe=QUICK, thresholds=False, head=False
    )
    assert dtypes == {(torch.float32, torch.float32)}
    assert all(p.dtype == torch.float32 for p in method.parameters())
    assert result.losses != full.losses, "half precision did something"
    assert max(abs(a - b) for a, b in zip(result.losses, full.losses, strict=True)) < 0.1


def test_fit_works_outside_the_main_thread(backbone, train_set):
    results = []
    thread = threading.Thread(target=lambda: results.append(trained(backbone, train_set)))
    thread.start()
    thread.join()
    assert same(results[0], trained(backbone, train_set))


def test_settings_are_plain_data(backbone, train_set):
    method = perlclip.create_method("perl", backbone)
    settings = perlclip.fit(method, train_set, recipe=QUICK, thresholds=False, head=False).settings
    assert json.loads(json.dumps(settings))["data"] == train_set.fingerprint()
    assert settings["backbone"] == backbone.fingerprint and settings["recipe"]["lr"] == 1e-3


def test_nothing_to_train_and_unknown_names(backbone, train_set):
    perl, zero = perlclip.create_method("perl", backbone), perlclip.create_method("zero-shot", backbone)
    for work, words in (
        (lambda: perlclip.fit(zero, train_set, head=False), "'zero-shot' has nothing to train"),
        (lambda: perlclip.fit(perl, train_set, recipe="fats"), "did you mean 'fast'"),
        (lambda: perlclip.fit(perl, train_set.select([])), "has no images"),
        (lambda: Recipe(optimizer="adm"), "did you mean 'adam"),
        (lambda: Recipe(epochs=0), "at least 1"),
        (lambda: Recipe(lr=-1.0), "must be positive"),
        (lambda: Recipe(lr=math.nan), "must be positive"),
        (lambda: perlclip.fit(perl, train_set, resume=True), "resume needs the checkpoint"),
        (lambda: perlclip.create_method("perll", backbone), "did you mean 'perl'"),
    ):
        with pytest.raises(PerlclipError, match=words):
            work()


def test_the_papers_recipe():
    fast = perlclip.find_recipe("perl", "fast")[0]
    assert (fast.optimizer, fast.lr, fast.weight_decay, fast.batch_size, fast.epochs) == ("adamw", 1e-4, 0.01, 4, 1)
    assert {fast.rate(epoch) for epoch in range(5)} == {1e-4}


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        (dict(epochs=5, lr=0.0035, warmup_epochs=1), [1e-5, 3.5e-3, 3.166e-3, 2.291e-3, 1.209e-3]),
        (dict(epochs=5, lr=0.0015), [1.5e-3, 1.357e-3, 9.818e-4, 5.182e-4, 1.432e-4]),
    ],
)
def test_the_cosine_restarts_after_warm_up(settings, rates):
    """The published per-epoch rates of MaPLe and MMA."""
    schedule = Recipe(schedule="cosine", **settings)
    assert [schedule.rate(epoch) for epoch in range(5)] == pytest.approx(rates, rel=1e-3)


# ---- evaluate ----


def test_evaluate_counts_what_it_says(backbone, tree):
    data = perlclip.load_images(tree)
    method = perlclip.create_method("perl", backbone)
    result = perlclip.evaluate(method, data)
    state = method.class_state(data.prompts)
    guesses = []
    with torch.no_grad():
        for image in data.images:
            pixels = backbone.preprocess.test_view(perlclip.data.read_image(image))[None]
            guesses.append(method.logits(pixels, state).argmax().item())
    right = [guess == label for guess, label in zip(guesses, data.labels, strict=True)]
    assert result.accuracy == pytest.approx(100 * sum(right) / 24)
    assert result.class_accuracy["green grass"] == pytest.approx(100 * sum(right[8:16]) / 8)
    assert len(result.step_accuracy) == 5 and result.step_accuracy[-1] == result.accuracy
    zero = perlclip.evaluate(perlclip.create_method("zero-shot", backbone), data)
    assert result.step_accuracy[0] == zero.accuracy and zero.step_accuracy == [zero.accuracy]


def test_evaluation_does_not_depend_on_the_batch_size(backbone, tree):
    data, method = perlclip.load_images(tree), perlclip.create_method("perl", backbone)
    one, all_ = (perlclip.evaluate(method, data, batch_size=size) for size in (1, 64))
    torch.testing.assert_close(one.probabilities_BC, all_.probabilities_BC, atol=1e-5, rtol=1e-4)


def test_class_texts_are_encoded_once_and_again_after_a_change(backbone, train_set, monkeypatch):
    method = perlclip.create_method("perl", backbone)
    calls, states = [], method._text_states
    monkeypatch.setattr(method, "_text_states", lambda state: (calls.append(1), states(state))[1])
    state, pixels = method.class_state(train_set.prompts), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = method.logits(pixels, state)
        method.logits(pixels, state)
        assert len(calls) == 1
        next(method.parameters()).add_(0.5)
        assert not torch.equal(method.logits(pixels, state), before)
        assert len(calls) == 2
    method.loss(pixels, torch.tensor([0, 1]), state).backward()
    assert len(calls) == 3, "never kept while gradients are recorded"


@pytest.mark.parametrize(("widest", "threads"), [(base.SMALL, 1), (16, 2)])
def test_small_backbones_train_on_one_thread(widest, threads, backbone, train_set, monkeypatch):
    monkeypatch.setattr(base, "SMALL", widest)
    seen, step = [], loop._Run.train_step
    monkeypatch.setattr(loop._Run, "train_step", lambda *given: (seen.append(torch.get_num_threads()), step(*given)))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained(backbone, train_set)
        assert set(seen) == {threads} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
