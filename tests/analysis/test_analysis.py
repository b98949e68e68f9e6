"""What an analysis says is what the definitions in docs/analysis.md say, and what it writes can be trusted."""

import csv
import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from torch.nn import functional as F

import perlclip
from perlclip.analysis import chunks
from perlclip.analysis.cases import instructive, overlay
from perlclip.analysis.drift import TRANSITIONS, drift, transitions
from perlclip.analysis.evidence import contributions, evidence_maps
from perlclip.analysis.explain import explain
from perlclip.analysis.single import analyze
from perlclip.analysis.stores import analyze_store
from perlclip.analysis.trajectories import (
    Curve,
    Trajectories,
    curves,
    expected_calibration_error,
    log_norms,
    logit_steps,
    measure,
    t95,
    text_steps,
)
from perlclip.backbone import PLAIN
from perlclip.backbone.tower import Rows
from perlclip.bench.store import Run, Store, complete_record
from perlclip.data.toybox import render, sample_scenes
from perlclip.data.toybox.render import paint
from perlclip.data.toybox.world import SHAPES
from perlclip.heads.answering import Answering
from perlclip.methods.perl import READOUTS
from perlclip.text.classes import Classes
from scripts.evidence_on_object import share_inside
from tests.cli.test_cli import run
from tests.conftest import draw_tree

PROMPTS = ["a red thing", "a green thing", "something blue", "x"]


def loud_perl(backbone, **config) -> perlclip.Backbone:
    """PERL with projectors large enough that steps differ."""
    method = perlclip.create_method("perl", backbone, seed=3, **{"steps": 3, **config})
    with torch.no_grad():
        for p in method.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return method.eval()


@pytest.fixture(scope="module")
def measured(backbone):
    torch.manual_seed(0)
    method, size = loud_perl(backbone), backbone.preprocess.size
    pixels, labels = torch.randn(6, 3, size, size), torch.tensor([0, 1, 2, 3, 0, 1])
    state = method.class_state(PROMPTS)
    return method, pixels, labels, state, measure(method, pixels, labels, state)


# ---- per-step metrics ----


def test_quantities_are_their_definitions(measured):
    method, pixels, labels, state, found = measured
    with torch.no_grad():
        logits = method.trajectory(pixels, state).double()
    p = logits.softmax(-1)
    assert torch.equal(found.answers_KB, logits.argmax(-1)) and found.steps == 3
    for k in range(4):
        for b, label in enumerate(labels.tolist()):
            truth = F.one_hot(torch.tensor(label), 4)
            assert found.target_KB[k, b] == pytest.approx(p[k, b, label].item(), rel=1e-4)
            assert found.brier_KB[k, b] == pytest.approx(((p[k, b] - truth) ** 2).sum().item(), rel=1e-4, abs=1e-7)
            kl = F.kl_div(p[k, b].log(), p[0, b], reduction="sum").item()
            assert found.drift_KB[k, b] == pytest.approx(kl, rel=1e-3, abs=1e-7)
            assert found.first_KB[k, b] == pytest.approx(p[k, b, logits[0, b].argmax()].item(), rel=1e-4)
            assert found.final_KB[k, b] == pytest.approx(p[k, b, logits[-1, b].argmax()].item(), rel=1e-4)
    assert not found.drift_KB[0].any() and (found.drift_KB[1:] > 0).all()


def test_jacobian_norm_is_that_of_each_image_alone(measured):
    method, pixels, labels, state, found = measured
    for b in (0, 4):
        for k in range(4):
            one = pixels[b : b + 1].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(method.trajectory(one, state)[k, 0, labels[b]], one)
            assert found.jacobian_KB[k, b] == pytest.approx(gradient.norm().item(), rel=1e-3)
    assert found.jacobian_KB.std(0).min() > 0  # steps differ


def test_measuring_leaves_no_gradient_behind(measured):
    method, pixels, *_ = measured
    measure(method, pixels, *measured[2:4])
    assert all(p.grad is None for p in method.parameters()) and not pixels.requires_grad


def test_curves_agree_with_evaluate(backbone, tree):
    data = perlclip.load_images(tree)
    method = loud_perl(backbone)
    batch = torch.stack([backbone.preprocess.test_view(Image.open(path)) for path in data.images])
    found = measure(method, batch, torch.tensor(data.labels), method.class_state(data.classes))
    assert curves(found)["accuracy"].mean == pytest.approx(
        perlclip.evaluate(method, data, progress=False).step_accuracy
    )


def test_a_tower_that_does_not_think(backbone):
    method = loud_perl(backbone, modalities="text")
    size = backbone.preprocess.size
    found = measure(method, torch.randn(2, 3, size, size), torch.tensor([0, 1]), method.class_state(PROMPTS))
    assert found.answers_KB.shape == (4, 2) and (found.drift_KB[1:] > 0).all()


def test_calibration_error_by_hand():
    top = np.array([[0.9, 0.9, 0.9, 0.5]])
    correct = np.array([[1.0, 1.0, 0.0, 1.0]])
    # Three images at 0.9, two of them right: |0.9 - 2/3| of 3/4; one at 0.5 that is right: |0.5 - 1| of 1/4.
    curve = expected_calibration_error(top, correct)
    assert curve.mean[0] == pytest.approx(0.75 * (0.9 - 2 / 3) + 0.25 * 0.5)
    assert expected_calibration_error(top, correct) == curve  # the bootstrap is seeded
    assert expected_calibration_error(np.ones((1, 5)), np.ones((1, 5))).mean == [0.0]


def test_bands_hold_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        curve = Curve.of_means(rng.exponential(size=(1, 200)))
        held += curve.low[0] <= 1 <= curve.high[0]
    assert 0.90 <= held / 300 <= 0.98
    accuracy, confident = 0.7, rng.uniform(0.5, 1, (1, 400))
    right = (rng.uniform(size=(1, 400)) < accuracy).astype(float)
    found = expected_calibration_error(confident, right)
    assert 0 <= found.low[0] <= found.mean[0] <= found.high[0]


# ---- drift and cases ----


def made_up(labels, answers, target) -> Trajectories:
    labels, answers, target = torch.tensor(labels), torch.tensor(answers), torch.tensor(target, dtype=torch.float64)
    return Trajectories(
        labels_B=labels, answers_KB=answers, target_KB=target, top_KB=target, first_KB=target, final_KB=target,
        brier_KB=target, drift_KB=target - target[0], jacobian_KB=target,
    )  # fmt: skip


def test_transitions_are_by_first_and_last_answer():
    found = made_up([0, 0, 0, 0, 1], [[0, 1, 0, 1, 1], [1, 1, 1, 2, 1], [0, 0, 1, 2, 1]], np.full((3, 5), 0.5))
    groups = {name: images.tolist() for name, images in transitions(found).items()}
    assert groups == {
        "correct→correct": [0, 4], "wrong→correct": [1], "correct→wrong": [2], "wrong→wrong": [3],
    }  # fmt: skip
    assert [row.count for row in drift(found)] == [2, 1, 1, 1]


def test_drift_groups_hold_every_image_once(measured):
    found = measured[-1]
    rows = drift(found)
    assert sum(row.count for row in rows) == len(found) and [row.transition for row in rows] == [
        t[0] for t in TRANSITIONS
    ]
    for row in rows:
        if row.count:
            images = transitions(found)[row.transition]
            assert row.mean == pytest.approx(found.drift_KB[:, images].mean(1).tolist())
            assert [q[2] for q in row.quantiles] == pytest.approx(
                [np.median(values) for values in found.drift_KB[:, images].numpy()]
            )
        else:
            assert row.mean == []


def test_instructive_cases_change_most_and_vary_in_class():
    labels = [0, 0, 0, 1, 1]
    found = made_up(labels, [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]], [[0.1] * 5, [0.9, 0.8, 0.7, 0.6, 0.5]])
    assert instructive(found, 3) == [("wrong→correct", 0), ("wrong→correct", 3), ("wrong→correct", 1)]
    assert instructive(found, 0) == []


# ---- evidence ----


def test_contributions_of_a_linear_read_out_are_what_it_would_lose():
    x, w = torch.randn(2, 5, 7).requires_grad_(), torch.randn(5, 7)
    value = torch.einsum("bnd,nd->b", x, w)
    rows = contributions(value, x)
    assert torch.allclose(rows.sum(1), value, atol=1e-5)
    for n in range(5):
        without = x.detach().clone()
        without[:, n] = 0
        assert torch.allclose(value - torch.einsum("bnd,nd->b", without, w), rows[:, n], atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {}, {"depth": 0}, {"depth": (3, 7)}, {"depth": 11}, {"modalities": "text"},
        *({"readout": name} for name in READOUTS if name != "last"),
    ],
)  # fmt: skip
def test_maps_say_what_scaling_a_patch_changes(backbone, config):
    """d logit = epsilon x contribution, for S_n (1 + epsilon): thoughts and all."""
    method, size = loud_perl(backbone, **config), backbone.preprocess.size
    torch.manual_seed(1)
    pixels, classes = torch.randn(2, 3, size, size), torch.tensor([[0, 2], [3, 1]])
    state = method.class_state(PROMPTS)
    found = evidence_maps(method, pixels, classes, state)
    t_KCE = text_steps(method, state)
    with torch.no_grad():
        norms = log_norms(method, method.encode_image_steps(pixels), t_KCE)
    side = size // backbone.vision.embed.patch.shape[-1]
    assert found.maps_KBMGG.shape == (4, 2, 2, side, side)
    rows = torch.cat([found.cls_KBM[..., None], found.maps_KBMGG.flatten(3)], -1)
    depth, vision = method.config.depths("vision")[0], backbone.vision
    module = vision.blocks[depth - 1] if depth else vision.embed
    for n in (0, 1, 6):
        ends = []
        for epsilon in (-0.01, 0.01):

            def scaled(_module, _inputs, out, n=n, epsilon=epsilon):
                x = out.x_BND if depth else out
                x = torch.cat([x[:, :n], x[:, n : n + 1] * (1 + epsilon), x[:, n + 1 :]], 1)
                return Rows(x) if depth else x

            hook = module.register_forward_hook(scaled)
            with torch.no_grad():
                logits = logit_steps(Answering(method, state), pixels, norms)
            hook.remove()
            ends.append(logits.gather(-1, classes.expand(4, -1, -1)))
        slope = (ends[1] - ends[0]) / 0.02
        assert torch.allclose(slope, rows[..., n], rtol=0.05, atol=0.02)
    assert (rows != 0).any(dim=-1).all()


@pytest.mark.parametrize("how", ["gradient", "occlusion"])
def test_the_map_of_a_mean_is_that_of_its_steps_by_their_say(backbone, how):
    """A step counts by its share of the class's probability; a map does not fade where the method is sure."""
    mean, last = (loud_perl(backbone, readout=readout) for readout in ("mean", "last"))
    pixels, state = torch.randn(2, 3, *[backbone.preprocess.size] * 2), mean.class_state(PROMPTS)
    with torch.no_grad():
        p_KBC = mean.step_logits(pixels, state).softmax(-1)
        answers_BM = mean.logits(pixels, state).topk(2).indices
    ours, steps = (
        evidence_maps(method, pixels, answers_BM, method.class_state(PROMPTS), how) for method in (mean, last)
    )
    p_KBM = p_KBC.gather(-1, answers_BM.expand(4, -1, -1))
    for k in range(4):
        say_KBM = (p_KBM[: k + 1] / p_KBM[: k + 1].sum(0))[..., None, None]
        plain_KBMGG = steps.maps_KBMGG[: k + 1]
        if how == "gradient":
            want = (say_KBM * plain_KBMGG).sum(0)
        else:
            want = -(say_KBM * (-plain_KBMGG).exp()).sum(0).log()
        torch.testing.assert_close(ours.maps_KBMGG[k], want, atol=1e-4, rtol=1e-3)
    logp_KBM = (p_KBM.cumsum(0) / torch.arange(1, 5)[:, None, None]).log()
    torch.testing.assert_close(ours.logits_KBM, logp_KBM, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("readout", [name for name in READOUTS if name != "last"])
def test_what_is_measured_is_what_is_answered(backbone, tree, tmp_path, readout):
    """Curves, cases and single images under a readout: the answers of `evaluate` and `predict`."""
    data, method = perlclip.load_images(tree), loud_perl(backbone, readout=readout)
    folder = perlclip.save_adapter(method, tmp_path / "a", class_names=data.class_names, template=data.template)
    adapter = perlclip.load_adapter(folder, backbone=backbone)
    study = analyze(adapter, data, tmp_path / "analysis", cases=1)
    result = perlclip.evaluate(adapter, data, progress=False)
    assert torch.equal(study.found.answers_KB, result.predictions_KB)
    torch.testing.assert_close(study.found.top_KB[-1], result.probabilities_BC.amax(-1).double(), atol=1e-4, rtol=1e-4)
    assert study.found.jacobian_KB.min() > 0.01 and f"readout {readout}" in study.sentence
    (case,) = explain(adapter, data.images[:1], tmp_path / "explained")
    one = perlclip.Classifier(adapter).predict(data.images[0], top_k=3)
    assert case.answers[-1] == one.label and dict(one.top)[case.classes[1]] == pytest.approx(
        case.confidence_KM[-1, 1].item(), abs=1e-4
    )


@pytest.mark.parametrize("lens", [PLAIN, "near"])
def test_occlusion_is_the_drop_without_a_patch(backbone, lens):
    """Of what is seen: through a lens that enlarges, the patches are those of the larger picture."""
    method, looking, size = loud_perl(backbone), loud_perl(backbone, lens=lens), backbone.preprocess.size
    torch.manual_seed(2)
    pixels, state = torch.randn(2, 3, size, size), method.class_state(PROMPTS)
    found = evidence_maps(looking, pixels, torch.tensor([[0], [1]]), state, "occlusion")
    pixels = looking.frozen(pixels).shown
    patch = size // found.maps_KBMGG.shape[-1]
    hidden = pixels.clone()
    hidden[:, :, patch : 2 * patch, 2 * patch : 3 * patch] = 0
    with torch.no_grad():
        drop = method.trajectory(pixels, state) - method.trajectory(hidden, state)
    expected = torch.stack([drop[:, 0, 0], drop[:, 1, 1]], 1)
    assert torch.allclose(found.maps_KBMGG[:, :, 0, 1, 2], expected, atol=1e-4) and found.cls_KBM is None
    with pytest.raises(perlclip.PerlclipError, match="unknown way to map evidence 'guess'; known: gradient, occlusion"):
        evidence_maps(method, pixels, torch.tensor([[0], [1]]), state, "guess")


@pytest.mark.parametrize(("how", "images"), [("gradient", 60), ("occlusion", 16)])
def test_maps_fall_on_the_drawn_object(tiny, how, images):
    """Un-shifted scenes, of which the renderer knows the object's place; by chance the ratio would be 1."""
    scenes = sample_scenes(images, seed=11)
    white = replace(scenes, paint_BC=torch.ones(images, 3), texture_B=torch.zeros_like(scenes.texture_B))
    inside = paint(torch.zeros(images, 3, 64, 64), white)[:, 0]
    views = [tiny.preprocess.test_view(Image.fromarray(x)) for x in render(scenes).permute(0, 2, 3, 1).numpy()]
    method = perlclip.create_method("perl", tiny, steps=1)
    state = method.class_state(Classes.spoken(SHAPES))
    found = evidence_maps(method, torch.stack(views), scenes.shape_B[:, None], state, how)
    for maps in found.maps_KBMGG[:, :, 0]:
        shares = np.array([share_inside(one, mask) for one, mask in zip(maps, inside, strict=True)])
        on_object, by_chance = shares.mean(0)
        assert on_object > 2 * by_chance, (how, on_object, by_chance)
        assert (shares[:, 0] > shares[:, 1]).mean() > 0.85


def test_overlay_is_signed_and_clear_where_there_is_nothing():
    rgba = np.asarray(overlay(torch.tensor([[2.0, -2.0], [0.0, 1.0]]), 2.0))
    assert rgba[0, 0, 0] > rgba[0, 0, 2] and rgba[0, 1, 2] > rgba[0, 1, 0]  # orange for, blue against
    assert rgba[1, 0, 3] == 0 < rgba[1, 1, 3] < rgba[0, 0, 3] == rgba[0, 1, 3]


# ---- the commands ----


@pytest.fixture(scope="module")
def adapter_folder(backbone, tree, tmp_path_factory):
    data = perlclip.load_images(tree)
    folder = tmp_path_factory.mktemp("adapter") / "colours"
    return perlclip.save_adapter(loud_perl(backbone), folder, class_names=data.class_names, template=data.template)


FILES = [
    "analysis.json",
    "cases.json",
    "curves.csv",
    "curves.png",
    "curves.svg",
    "drift.csv",
    "drift.png",
    "images.csv",
]


def test_analyze_writes_numbers_figures_and_a_page(adapter_folder, tree, tmp_path):
    result = run("analyze", str(adapter_folder), str(tree), "--out", str(tmp_path), "--cases", "2", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "Accuracy goes from" in result.output and "Jacobian norm" in result.output
    assert set(FILES) <= {path.name for path in tmp_path.iterdir()}
    numbers = json.loads((tmp_path / "analysis.json").read_bytes())
    assert numbers["about"]["images"] == 24 and len(numbers["curves"]) == 5
    with (tmp_path / "curves.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "accuracy"]
    assert [float(row["mean"]) for row in rows] == pytest.approx(numbers["curves"]["accuracy"]["mean"], rel=1e-4)
    evaluated = json.loads(run("eval", str(adapter_folder), str(tree), "--json", "--device", "cpu").output)
    assert numbers["curves"]["accuracy"]["mean"] == pytest.approx(evaluated["step_accuracy"])
    cases = json.loads((tmp_path / "cases.json").read_bytes())
    assert cases and all(len(case["classes"]) == 2 and len(case["answers"]) == 4 for case in cases)
    page = (tmp_path / "index.html").read_text()
    assert "http://" not in re.sub(r'xmlns(:\w+)?="[^"]+"', "", page) and "https://" not in page  # nothing to fetch


def test_analyze_goes_on_where_it_was_stopped(adapter_folder, tree, tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", 10)
    words = ["analyze", str(adapter_folder), str(tree), "--cases", "0", "--device", "cpu", "--out"]
    assert run(*words, str(tmp_path / "whole")).exit_code == 0
    calls, real = [], chunks.measure

    def stopped(*args):
        calls.append(len(args[1]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(chunks, "measure", stopped)
    result = run(*words, str(tmp_path / "parts"))
    assert result.exit_code == 130 and "1 of 3 chunks are kept" in result.output and "goes on" in result.output
    (tmp_path / "parts" / "chunks" / "00020.safetensors").write_bytes(b"half a file")
    assert run(*words, str(tmp_path / "parts")).exit_code == 0
    assert calls == [10, 10, 10, 4]
    for name in ("analysis.json", "curves.csv", "drift.csv", "images.csv", "curves.png", "index.html"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_chunks_of_other_data_are_not_taken(adapter_folder, tree, tmp_path):
    adapter, data = perlclip.load_adapter(adapter_folder), perlclip.load_images(tree)
    analyze(adapter, data.select(range(4)), tmp_path, cases=0)
    found = analyze(adapter, data.select(range(20, 24)), tmp_path, cases=0).found
    assert found.labels_B.tolist() == list(data.labels[20:24])
    with safe_open(tmp_path / "chunks" / "00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("labels_B"), found.labels_B)


def test_the_number_of_images_can_be_limited(adapter_folder, tree, tmp_path):
    adapter, data = perlclip.load_adapter(adapter_folder), perlclip.load_images(tree)
    study = analyze(adapter, data, tmp_path, max_images=9, cases=1)
    assert len(study.found) == 9 and study.about["images_in_all"] == 24
    assert "9 of 24 images" in (tmp_path / "index.html").read_text()


def test_explain_takes_a_set_of_a_suite(tiny, tmp_path):
    method = perlclip.create_method("perl", tiny, steps=1)
    perlclip.save_adapter(method, tmp_path / "adapter", class_names=["circle"], template="a photo of a {}.")
    words = ["explain", str(tmp_path / "adapter"), "toybox:tiny_toys/novel", "--max-images", "2", "--device", "cpu"]
    result = run(*words, "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    told = re.findall(r"^tiny_toys \d+ \((.+), (\w+)→(\w+)\)\t(.+) → (.+)$", result.output, re.M)
    assert len(told) == 2 == len(list((tmp_path / "out").glob("*.png")))
    for label, first, last, *answers in told:
        assert [first, last] == ["correct" if answer == label else "wrong" for answer in answers]
    assert "name it with --data ROOT" in run(*words[:2], "coop:dtd", *words[3:], "--out", str(tmp_path / "x")).output


def test_explain_draws_every_image(adapter_folder, tree, tmp_path):
    image = str(tree / "red" / "0.png")
    words = ["explain", str(adapter_folder), image, str(tree / "blue" / "0.png"), "--device", "cpu"]
    result = run(*words, "--out", str(tmp_path), "--how", "occlusion", "--class", "green grass")
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{stem}.{kind}" for stem in ("0", "0-2") for kind in ("png", "svg", "json")
    }
    numbers = json.loads((tmp_path / "0.json").read_bytes())
    assert numbers["classes"][0]["class"] == "green grass" and numbers["how"] == "occlusion"
    assert np.array(numbers["classes"][0]["patches"]).shape == (4, 4, 4) and len(numbers["answers"]) == 4
    assert Image.open(tmp_path / "0.png").width > 600


def test_explain_writes_a_file_for_each_image_whatever_they_are_called(adapter_folder, tree, tmp_path):
    """`a`, `a` and `a-2`: a number made a name that was there already."""
    names = ["x/a.png", "y/a.png", "z/a-2.png", "z/A.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(tree / "red" / "0.png", tmp_path / name)
    explain(perlclip.load_adapter(adapter_folder), [tmp_path / name for name in names], tmp_path / "out")
    written = [json.loads(path.read_bytes())["image"] for path in (tmp_path / "out").glob("*.json")]
    assert sorted(written) == sorted(str(tmp_path / name) for name in names)
    assert len({path.stem.casefold() for path in (tmp_path / "out").glob("*.json")}) == 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["explain", "{coop}", "{image}"], "only PERL adapters have steps to look at; this one is 'coop'"),
        (["analyze", "{coop}", "{tree}"], "only PERL adapters have steps to look at; this one is 'coop'"),
        (["explain", "{perl}", "{image}", "--class", "rad"], "unknown class 'rad'; did you mean 'red'?"),
        (["analyze", "{perl}"], "is no folder of runs; to analyze an adapter, name DATA as well"),
        (["analyze", "{perl}", "toybox:tiny_toy"], "did you mean 'tiny_toys'?"),
        (["analyze", "{perl}", "toybox:tiny_toys/old"], "unknown part of a data set 'old'"),
        (["analyze", "{perl}", "{tree}/nowhere"], "no such file or folder"),
    ],
)
def test_errors_are_sentences(words, sentence, adapter_folder, backbone, tree, tmp_path):
    coop = perlclip.create_method("coop", backbone)
    perlclip.save_adapter(coop, tmp_path / "coop", class_names=["red", "blue"], template="a {}.")
    places = dict(coop=tmp_path / "coop", perl=adapter_folder, tree=tree, image=tree / "red" / "0.png")
    result = run(*(word.format(**places) for word in words), "--out", str(tmp_path / "out"), "--device", "cpu")
    assert result.exit_code == 1 and sentence in result.output, result.output


# ---- runs of a benchmark ----


def stored(store, tiny, dataset, seed, protocol="base-to-novel", tests=("base", "novel"), adapter_of=None, **more):
    """A run as `perlclip bench` leaves it, without the training."""
    which = dict(protocol=protocol, suite="toybox", dataset=dataset, method="perl", recipe="fast", shots=16, seed=seed)
    one = Run(**which, **more)
    method = perlclip.create_method("perl", tiny, seed=seed, steps=1)
    metrics = {t: {"step_accuracy": [50.0, 60.0 + seed], "images": 400, "accuracy": 60.0} for t in tests}
    config = {"steps": 1}
    record = complete_record(
        one, backbone=tiny.fingerprint, recipe={}, config=config, parameters=1, metrics=metrics, predictions={},
        seconds={}, adapter_of=adapter_of,
    )  # fmt: skip
    if not adapter_of:
        perlclip.save_adapter(method, store.home(one), class_names=["circle"], template="a photo of a {}.")
    store.write(one, record)
    return one


def test_a_store_gives_curves_per_set_and_averaged(tiny, tmp_path):
    store = Store(tmp_path / "bench" / "runs")
    for dataset in ("noisy_shapes", "tiny_toys"):
        for seed in (1, 2):
            stored(store, tiny, dataset, seed)
    words = ["analyze", str(tmp_path / "bench"), "--out", str(tmp_path / "out"), "--max-images", "6", "--device", "cpu"]
    refused = run(*words, "--how", "occlusion")
    assert refused.exit_code == 2 and "--how is for an ADAPTER and DATA" in refused.output
    result = run(*words)
    assert result.exit_code == 0, result.output
    assert "base-to-novel: base: accuracy 50.0 → 61.5" in result.output
    with (tmp_path / "out" / "settings.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["dataset"] for row in rows} == {"mean", "noisy_shapes", "tiny_toys"}
    assert len(rows) == 3 * 3 * 5 * 2  # settings x (mean + sets) x metrics x steps
    numbers = {(r["setting"], r["dataset"], r["metric"], r["step"]): float(r["mean"]) for r in rows}
    halves = [numbers[f"base-to-novel: {half}", "tiny_toys", "jacobian", "1"] for half in ("base", "novel")]
    assert numbers["base-to-novel", "tiny_toys", "jacobian", "1"] == pytest.approx(sum(halves) / 2, rel=1e-4)
    jacobian = {r["dataset"]: float(r["mean"]) for r in rows if (r["metric"], r["step"]) == ("jacobian", "1")}
    assert jacobian["mean"] == pytest.approx((jacobian["noisy_shapes"] + jacobian["tiny_toys"]) / 2, rel=1e-4)
    report = ["report", str(tmp_path / "bench"), "--analysis", str(tmp_path / "out"), "--out", str(tmp_path / "report")]
    assert run(*report).exit_code == 0
    section = (tmp_path / "out" / "section.md").read_text()
    taken = section.replace("](", "](figures/dynamics-")
    assert section.startswith("## Dynamics of iterative reasoning\n") and section.count("![") == 4
    with (tmp_path / "report" / "tables" / "dynamics-drift.csv").open() as file:
        drifts = list(csv.DictReader(file))
    assert {row["setting"] for row in drifts} == {"base-to-novel", "base-to-novel: base", "base-to-novel: novel"}
    counts = {(row["setting"], row["transition"]): int(row["images"]) for row in drifts}
    assert sum(n for (setting, _), n in counts.items() if setting == "base-to-novel") == 2 * 2 * 2 * 6
    assert "| median KL, k = 1 |" in section and "drift.png" in section
    assert (tmp_path / "report" / "report.md").read_text().endswith(taken)
    for name in re.findall(r"\]\((.*)\)", section):
        kept = tmp_path / "report" / "figures" / f"dynamics-{name}"
        assert kept.read_bytes() == (tmp_path / "out" / name).read_bytes()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "chunks").rglob("*.safetensors")}
    assert run(*words).exit_code == 0 and len(before) == 8
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_transfer_leaves_the_source_out_and_takes_the_adapter_of_another_run(tiny, tmp_path, monkeypatch):
    from perlclip.data import suites

    suite = replace(suites.SUITES["toybox"], targets=("tiny_toys",), variants=("toybox_a",))
    monkeypatch.setitem(suites.SUITES, "toybox", suite)
    store = Store(tmp_path / "runs")
    trained = stored(store, tiny, "toybox", 1, "cross-dataset", ("toybox", "tiny_toys"))
    stored(store, tiny, "toybox", 1, "domain-shift", ("toybox", "toybox_a"), adapter_of=trained.name)
    averages = analyze_store(store.folder, tmp_path / "out", images=4)
    assert list(averages) == ["cross-dataset", "domain shift"]
    assert averages["domain shift"]["accuracy"].mean == [50.0, 61.0]


def test_only_one_recipe_of_a_store(tiny, tmp_path):
    store = Store(tmp_path / "runs")
    stored(store, tiny, "tiny_toys", 1)
    with pytest.raises(perlclip.PerlclipError, match=r"no complete run of perl .* by recipe 'strong' alone"):
        analyze_store(store.folder, tmp_path / "out", recipe="strong")
    assert "base-to-novel" in analyze_store(store.folder, tmp_path / "out", images=2, recipe="fast")


def test_runs_with_and_without_lens_and_head_are_curves_of_their_own(tiny, tmp_path):
    store, plain = Store(tmp_path / "runs"), "base-to-novel (fast, 16 shots, tiny)"
    stored(store, tiny, "tiny_toys", 1)
    stored(store, tiny, "tiny_toys", 2, lens=True)
    stored(store, tiny, "tiny_toys", 3, lens=True, head=True)
    averages = analyze_store(store.folder, tmp_path / "out", images=2)
    both = plain.removesuffix(")") + ", with lens, with head)"
    assert {plain, both, both.replace(", with head", "")} <= averages.keys()
    assert [averages[name]["accuracy"].mean[-1] for name in (plain, both)] == [61.0, 63.0]
    alone = analyze_store(store.folder, tmp_path / "out", images=2, recipe="fast")
    assert alone["base-to-novel"]["accuracy"].mean[-1] == 61.0, "a recipe is asked for as the paper has it"


def test_bands_of_few_values_are_students():
    """Of four values t is 3.182, where a normal variable's is 1.96."""
    curve = Curve.of_means(np.array([[1.0, 2.0, 3.0, 4.0]]))
    assert curve.high[0] - curve.mean[0] == pytest.approx(3.182 * np.std([1, 2, 3, 4], ddof=1) / 2, rel=1e-4)
    assert [t95(n) for n in (30, 31, 100, 10**6)] == pytest.approx([2.042, 2.0395, 1.984, 1.96], abs=4e-3)


def test_a_store_without_perl_is_refused(tmp_path, tiny):
    draw_tree(tmp_path / "runs")
    with pytest.raises(perlclip.PerlclipError, match="holds no complete run of perl"):
        analyze_store(tmp_path / "runs", tmp_path / "out")
