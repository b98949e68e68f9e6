"""What only a GPU can show: recorded steps and answers against plain ones. Skipped where there is none."""

import math
import warnings
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip.backbone.accel.cuda_graphs import Recorded
from perlclip.data.toybox import load_toybox
from perlclip.methods.perl import READOUTS
from perlclip.methods.registry import find_recipe
from perlclip.training.gradients import Gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
TRAINED = [name for name in perlclip.list_methods() if name not in ("zero-shot", "ridge", "gaussian")]


@pytest.fixture(scope="module")
def tiny():
    return perlclip.load_backbone("tiny", device="cuda")


@pytest.fixture(scope="module")
def shots():
    train = load_toybox("tiny_toys").train
    return train.select(range(0, len(train), 32))


@pytest.fixture
def strict():
    """A warning, such as that recording failed, is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def trains_alike(name, backbone, images, close: float, **settings) -> None:
    """A method trained by recorded steps loses and moves as one trained by plain ones."""
    runs = {}
    for mode in ("off", "on"):
        method = perlclip.create_method(name, backbone, **settings)
        before = torch.cat([p.detach().flatten() for p in method.parameters()])
        result = perlclip.fit(method, images, recipe="fast", head=False, compile=mode, progress=False)
        runs[mode] = result.losses, torch.cat([p.detach().flatten() for p in method.parameters()]) - before
        assert (result.compile_seconds > 0) == (mode == "on")
    torch.testing.assert_close(runs["on"][0], runs["off"][0], atol=close, rtol=close)
    assert F.cosine_similarity(runs["on"][1], runs["off"][1], dim=0) > 0.9, "they have moved the same way"


@pytest.mark.parametrize("name", TRAINED)
def test_recorded_steps_train_as_plain_ones_do(tiny, shots, strict, name):
    trains_alike(name, tiny, shots, 2e-2)


def test_recorded_steps_train_through_a_center_as_plain_ones_do(tiny, shots, strict):
    trains_alike("perl", tiny, shots, 2e-2, center=0.75, loss_center=0.5, loss_scale=0.25)


def test_what_was_recorded_serves_the_next_training(tiny, shots, strict):
    """From the same numbers in the same tensors: recorded once, replayed from the first step on, the same losses."""
    method = perlclip.create_method("perl", tiny)
    begin = {name: p.detach().clone() for name, p in method.named_parameters()}
    kept, runs = Gradients(method, shots.classes), []
    for _ in range(2):
        method.load_state_dict(begin)
        runs.append(perlclip.fit(method, shots, gradients=kept, head=False, thresholds=False, progress=False))
    first, again = runs
    assert first.compile_seconds > 0 == again.compile_seconds
    torch.testing.assert_close(again.losses, first.losses, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_loss_that_is_no_number_leaves_the_parameters_before_it(tiny, shots, monkeypatch, optimizer):
    from dataclasses import replace

    method = perlclip.create_method("coop", tiny)
    loss, seen = type(method).loss, []

    def breaks(self, pixels, labels, state):
        seen.append(self.context.detach().clone())
        return loss(self, pixels, labels, state) * (math.nan if len(seen) == 3 else 1.0)

    monkeypatch.setattr(type(method), "loss", breaks)
    with pytest.raises(perlclip.PerlclipError, match="the loss became nan at step 3"):
        perlclip.fit(
            method,
            shots,
            recipe=replace(find_recipe("coop", "fast")[0], optimizer=optimizer),
            compile="off",
            progress=False,
        )
    torch.testing.assert_close(method.context.detach(), seen[2], rtol=0, atol=0)


def test_what_cannot_be_recorded_runs_as_it_is(tiny, shots, monkeypatch):
    method = perlclip.create_method("coop", tiny)
    loss = type(method).loss

    def waits(self, pixels, labels, state):
        value = loss(self, pixels, labels, state)
        return value + 0 * float(value.detach())  # asks the card, which a recording cannot

    plain = perlclip.fit(perlclip.create_method("coop", tiny), shots, recipe="fast", compile="off", progress=False)
    monkeypatch.setattr(type(method), "loss", waits)
    with pytest.warns(RuntimeWarning, match="not compiled, going on without"):
        result = perlclip.fit(method, shots, recipe="fast", progress=False)
    torch.testing.assert_close(result.losses, plain.losses, atol=1e-2, rtol=1e-2)


def test_training_is_taken_up_again(tiny, shots, tmp_path, strict):
    from dataclasses import replace

    whole, halves = (perlclip.create_method("perl", tiny) for _ in range(2))
    long = replace(find_recipe("perl", "fast", "tiny")[0], epochs=2)
    perlclip.fit(whole, shots, recipe=long, progress=False)
    file = tmp_path / "checkpoint.safetensors"

    class StopError(Exception):
        pass

    calls, step = [], perlclip.training.loop._Run.train_step

    def stops(run, *batch):
        step(run, *batch)
        calls.append(1)
        if len(calls) == 15:
            run.save(file)
            raise StopError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StopError):
        patch.setattr(perlclip.training.loop._Run, "train_step", stops)
        perlclip.fit(halves, shots, recipe=long, checkpoint=file, progress=False)
    perlclip.fit(halves, shots, recipe=long, checkpoint=file, resume=True, progress=False)
    for a, b in zip(whole.parameters(), halves.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("zero-shot", {}), ("mmrl", {}), *(("perl", {"readout": name}) for name in READOUTS)],
)
def test_recorded_answers_equal_plain_ones(shots, name, settings, dtype):
    backbone = perlclip.load_backbone("tiny", device="cuda", dtype=dtype)
    method, size = perlclip.create_method(name, backbone, **settings), backbone.preprocess.size
    state, pixels = method.class_state(shots.classes), torch.randn(4, 3, size, size, device="cuda")
    with torch.no_grad():
        want = method.trajectory(pixels, state)
        recorded = Recorded(lambda given: [method.trajectory(given, state)], [torch.zeros_like(pixels)])
        (got,) = recorded(pixels)
    close = dict(atol=1e-3, rtol=1e-3) if dtype == "float32" else dict(atol=0.6, rtol=0.05)
    torch.testing.assert_close(got, want, **close)


def test_classifier_and_evaluation_answer_alike_compiled_or_not(tiny, strict):
    method = perlclip.create_method("perl", tiny)
    test = load_toybox("tiny_toys").test
    test = test.select(range(0, len(test), 5))
    on, off = (perlclip.evaluate(method, test, batch_size=16, compile=mode, progress=False) for mode in ("on", "off"))
    torch.testing.assert_close(on.probabilities_BC, off.probabilities_BC, atol=1e-3, rtol=1e-2)
    classifiers = [perlclip.Classifier(method, test.class_names, compile=mode) for mode in ("on", "off")]
    images = list(test.images[:40])
    for size in (1, 1, 1, 3, 3, 4, 40):
        answers = [c.predict(images[:size], batch_size=size) for c in classifiers]
        assert [a.label for a in answers[0]] == [a.label for a in answers[1]]
    assert classifiers[0].compile_seconds > 0 == classifiers[1].compile_seconds
    with torch.no_grad():
        for p in method.parameters():
            p.add_(torch.randn_like(p))
    answers = [c.predict(images[:1])[0].probability for c in classifiers]
    assert abs(answers[0] - answers[1]) < 1e-3, "a graph of the old weights is not used"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_class_lists_of_several_perls_are_encoded_by_one_graph(strict, dtype):
    backbone = perlclip.load_backbone("tiny", device="cuda", dtype=dtype)
    methods = [perlclip.create_method("perl", backbone) for _ in range(3)]
    for i, method in enumerate(methods):
        torch.nn.init.constant_(method.projectors["text"].up.bias, 0.1 * i)
    lists = [[f"a photo of the {word} {i}." for i in range(9)] for word in ("cat", "dog", "ox")]
    for prompts in lists:
        for method in methods:
            state = method.class_state(prompts)
            with torch.no_grad():
                want, got = (method.encode_text_steps(replace(state, replay=replay)) for replay in (False, True))
            torch.testing.assert_close(got, want, atol=1e-4 if dtype == "float32" else 0.03, rtol=0)
    (graphs,) = backbone.recorded.values()
    assert graphs.compiled.seconds > 0 and len(graphs.compiled._recorded) == 1


def test_stages_of_adaptive_thinking_answer_alike_compiled_or_not(tiny, shots, strict):
    fitted = perlclip.fit(perlclip.create_method("perl", tiny), shots, recipe="fast", progress=False)
    on, off = (perlclip.Classifier(fitted, compile=mode) for mode in ("on", "off"))
    images = list(load_toybox("tiny_toys").test.images[:70])
    for size in (70, 70, 70, 3, 3, 1, 1, 1):
        answers = [c.predict(images[:size], batch_size=size, steps="adaptive") for c in (on, off)]
        assert [a.label for a in answers[0]] == [a.label for a in answers[1]]
        assert sum(a.steps != b.steps for a, b in zip(*answers, strict=True)) <= 1, "the last bits may differ"
    assert on.compile_seconds > 0 == off.compile_seconds


def test_float8_answers_nearly_as_bfloat16_does(shots, strict):
    """In a graph, where its kernels are used whatever the size."""
    backbones = [perlclip.load_backbone("tiny", device="cuda", dtype=dtype) for dtype in ("bfloat16", "float8")]
    assert [each.dtype_name for each in backbones] == ["bfloat16", "float8"]
    embeddings = []
    for backbone in backbones:
        torch.manual_seed(0)
        method = perlclip.create_method("perl", backbone)
        pixels = torch.stack(
            [backbone.preprocess.test_view(perlclip.data.read_image(image)) for image in shots.images[:16]]
        ).cuda()
        with torch.no_grad():
            (found,) = Recorded(lambda given, method=method: [method.encode_image(given)], [pixels])(pixels)
        embeddings.append(found.clone())
    cosines = (embeddings[0] * embeddings[1]).sum(-1)
    assert cosines.min() > 0.99 and cosines.max() < 0.99999, "it is near, and another number format"
    perlclip.fit(perlclip.create_method("perl", backbones[1]), shots, recipe="fast", head=False, progress=False)


# ---- other families: towers with a pooling head, texts without a mask ----

FAMILIES = ("siglip", "siglip2", "metaclip_2")
CARRIED = [name for name in TRAINED if not name.startswith("mmrl")]


@pytest.fixture(scope="module")
def family(family_folder):
    return cache(lambda name, dtype="float32": perlclip.load_backbone(str(family_folder(name)), "cuda", dtype))


@pytest.fixture(scope="module")
def drawn():
    """Pictures of any size: random backbones know nothing of them."""
    pictures = [np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8) for i in range(32)]
    return perlclip.ImageSet(
        images=pictures, labels=[i % 4 for i in range(32)], class_names=("cat", "ox", "eel", "bee")
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("method", ["zero-shot", "perl"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_recorded_as_it_answers(family, strict, name, method, dtype):
    """And in float32 as on the CPU; `add_norm` serves all families, the fused product only CLIP's quick GELU."""
    backbone = family(name, dtype)
    made, size = perlclip.create_method(method, backbone), backbone.preprocess.size
    state = made.class_state(["cat", "a very long named animal", "ox"])
    pixels = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        want = made.trajectory(pixels, state)
        recorded = Recorded(lambda given: [made.trajectory(given, state)], [torch.zeros_like(pixels)])
        close = dict(atol=2e-3, rtol=1e-3) if dtype == "float32" else dict(atol=1.5, rtol=0.05)
        torch.testing.assert_close(recorded(pixels)[0], want, **close)
        if dtype == "float32":
            slow = perlclip.create_method(method, backbone.to("cpu"))
            found = slow.trajectory(pixels.cpu(), slow.class_state(["cat", "a very long named animal", "ox"]))
            torch.testing.assert_close(want.cpu(), found, atol=2e-2, rtol=1e-3)


@pytest.mark.parametrize("name", CARRIED)
def test_recorded_steps_train_a_siglip_as_plain_ones_do(family, drawn, strict, name):
    trains_alike(name, family("siglip"), drawn, 5e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_siglip_classifies_alike_compiled_or_not(family, drawn, strict, dtype):
    method = perlclip.create_method("perl", family("siglip", dtype))
    classifiers = [perlclip.Classifier(method, drawn.class_names, compile=mode) for mode in ("on", "off")]
    for size in (1, 1, 1, 3, 4, 32):
        answers = [c.predict(drawn.images[:size], batch_size=size) for c in classifiers]
        for one, other in zip(*answers, strict=True):
            assert abs(one.probability - other.probability) < (1e-3 if dtype == "float32" else 0.1)
    several = classifiers[0].predict(drawn.images[:3], multi_label=True, top_k=4)
    assert all(0 <= p <= 1 for one in several for _, p in one.top)
