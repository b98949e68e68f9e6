"""ONNX: one file for a backbone and all of its adapters, the answers of torch, an example that needs no torch."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import perlclip
from perlclip.adapters.folder import Adapter
from perlclip.backbone import LENSES
from perlclip.export.adapter_arrays import adapter_arrays, export_adapter
from perlclip.export.onnx_graph import export_backbone
from perlclip.heads.head import make_head
from perlclip.text.classes import Classes
from perlclip.trust.record import Trust
from tests import families
from tests.cli.test_cli import fails, run
from tests.common import gaussian_head, loud, random_middle, random_pixels

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "onnx_predict.py"
NAMES = ("cat", "dog", "striped horse", "bird", "old boat")


def adapter_of(backbone, classes: int = 5, name: str = "perl", **settings) -> Adapter:
    method = loud(perlclip.create_method(name, backbone, **settings)).eval()
    if method.center:
        method.take_center(torch.randn(backbone.embed_dim) * backbone.embed_dim**-0.5)
    return Adapter(method=method, class_names=NAMES[:classes], template="a photo of a {}.")


@pytest.fixture(scope="module")
def three(tiny) -> list[Adapter]:
    """Of different ranks, numbers of steps, readouts and classes."""
    settings = (
        dict(rank=1, readout="rising"),
        dict(rank=3, steps=2, readout="mean"),
        dict(rank=2, modalities="vision"),
    )
    return [adapter_of(tiny, classes, **each) for classes, each in zip((5, 2, 3), settings, strict=True)]


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory) -> Path:
    return export_backbone(tiny, tmp_path_factory.mktemp("onnx") / "tiny.onnx")


def stacked(arrays: list[dict]) -> dict[str, np.ndarray]:
    return runpy.run_path(str(EXAMPLE))["stacked"](arrays)


def run_file(
    path: Path, adapters: list[Adapter], pixels: torch.Tensor, which: list[int], output: str = "logits"
) -> np.ndarray:
    session = onnxruntime.InferenceSession(path)
    arrays = [adapter_arrays(adapter) for adapter in adapters]
    feed = {i.name: stacked([each[i.name] for each in arrays]) for i in session.get_inputs()[2:]}
    return session.run([output], {**feed, "pixels": pixels.numpy(), "which": np.array(which)})[0]


@torch.no_grad()
def wanted(adapter: Adapter, pixels: torch.Tensor) -> np.ndarray:
    state = adapter.method.class_state(Classes(adapter.class_names, adapter.template))
    return adapter.method.step_logits(pixels, state).transpose(0, 1).numpy()


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_three_adapters_in_one_batch_have_the_logits_of_torch(file, three, tiny, batch):
    """A batch that is not the one of a trace, and images of different adapters side by side."""
    pixels, which = (
        torch.randn(batch, 3, tiny.preprocess.size, tiny.preprocess.size),
        [(i + 1) % 3 for i in range(batch)],
    )
    logits = run_file(file, three, pixels, which)
    for i, one in enumerate(which):
        want = wanted(three[one], pixels[i : i + 1])[0]
        assert np.abs(logits[i, : want.shape[0], : want.shape[1]] - want).max() < 1e-3
        assert np.abs(want[0] - want[-1]).max() > 0.01, "thinking changes something"


def test_the_file_is_valid_and_holds_the_weights_once(file, tiny):
    onnx.checker.check_model(file, full_check=True)
    numbers = sum(p.numel() for p in tiny.vision.parameters())
    assert file.stat().st_size < 4 * numbers + 400_000


@pytest.mark.parametrize("depth", [0, 7, -1])
def test_other_sizes_and_depths(any_backbone, tmp_path, depth):
    depth %= any_backbone.vision.depth
    adapter = adapter_of(any_backbone, vision_depth=depth, steps=2)
    path = export_backbone(any_backbone, tmp_path / "a.onnx", steps=2, depth=depth)
    pixels = random_pixels(any_backbone, 3)
    assert np.abs(run_file(path, [adapter], pixels, [0, 0, 0]) - wanted(adapter, pixels)).max() < 1e-3
    with torch.no_grad():
        middle_BF = any_backbone.frozen(pixels).middle(any_backbone.vision.middle).numpy()
    assert np.abs(run_file(path, [adapter], pixels, [0, 0, 0], "middle") - middle_BF).max() < 1e-4


@pytest.mark.parametrize("family", ["siglip", "siglip2-odd", "metaclip_2-odd"])
def test_other_families(family, tmp_path):
    backbone = perlclip.load_backbone(str(families.build(tmp_path / "model", family)), device="cpu")
    adapters = [adapter_of(backbone, classes, depth=3, steps=2) for classes in (5, 2)]
    path = export_backbone(backbone, tmp_path / "a.onnx", steps=2, depth=3)
    pixels = random_pixels(backbone, 3)
    logits = run_file(path, adapters, pixels, [0, 1, 0])
    for i, adapter in enumerate((adapters[0], adapters[1], adapters[0])):
        want = wanted(adapter, pixels[i : i + 1])[0]
        assert np.abs(logits[i, :, : want.shape[1]] - want).max() < 1e-3 and np.abs(want[0] - want[-1]).max() > 0.01


@pytest.mark.parametrize(("int8", "most"), [("weights", 0.3), ("products", 1.0)])
def test_int8_is_a_quarter_of_the_size_and_nearly_the_same(file, three, tiny, tmp_path, int8, most):
    path = export_backbone(tiny, tmp_path / "int8.onnx", int8=int8)
    pixels = random_pixels(tiny, 4)
    exact, small = (run_file(each, three[:1], pixels, [0] * 4) for each in (file, path))
    assert path.stat().st_size < 0.35 * file.stat().st_size and 0 < np.abs(exact - small).max() < most
    alone = run_file(path, three[:1], pixels[1:2], [0])
    assert np.abs(alone - small[1:2]).max() < 1e-3, "an answer does not depend on what else is in the batch"
    read = [node.input[0] for node in onnx.load(path).graph.node if node.op_type == "DequantizeLinear"]
    blocks = {int(name.partition(".")[0]) for name in read if name.endswith(".weight")}
    assert blocks == (set(range(7, tiny.vision.depth - 1)) if int8 == "products" else set()), "what steps take again"


HEADS = {
    "none": None, "first": dict(features="first", text=0.5, scale=3.0), "mixed": dict(features="last", share=0.4),
    "mean": dict(features="mean", share=0.7, scale=2.0), "all": dict(features="all", scale=4.0),
    "zero-shot's share": dict(scale=0.0, share=0.3),
}  # fmt: skip


def with_head(adapter: Adapter, seed: int = 0, **numbers) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    backbone, classes = adapter.method.backbone, len(adapter.class_names)
    width = (5 if numbers["features"] == "all" else 1) if "features" in numbers else 1
    weight = torch.randn(classes, width * backbone.embed_dim, generator=generator).double()
    head = make_head(adapter.class_names, (weight, torch.randn(classes, generator=generator).double()), **numbers)
    logits, labels = torch.randn(40, classes, generator=generator) * 9, torch.arange(40) % classes
    v = torch.nn.functional.normalize(torch.randn(40, backbone.embed_dim, generator=generator), dim=-1)
    trust = Trust.of("own images", logits, logits, labels, v, None, v[:classes], v[:, 0])
    assert abs(trust.calibration.temperature - 1) > 0.1
    return replace(adapter, head=head, trust=trust)


def test_the_example_needs_no_torch_and_says_what_the_classifier_says(file, three, tiny, tree, tmp_path):
    """Heads of all kinds, zero-shot's share, a temperature; lenses, centers; images left alone; new classes."""
    perl = adapter_of(tiny, readout="rising")
    adapters = [with_head(perl, **numbers) if numbers else perl for numbers in HEADS.values()]
    adapters += [three[1], adapter_of(tiny, 4, "zero-shot")]
    middle = random_middle(tiny, perl.class_names)
    ruled = replace(adapters[1], head=gaussian_head(tiny, perl.class_names, text=0.5, share=0.8, middle=middle))
    adapters += [ruled, *(adapter_of(tiny, lens=lens) for lens in LENSES)]
    adapters += [adapter_of(tiny, center=0.75, steps=2), adapter_of(tiny, name="gaussian", center=0.5)]
    centered = adapter_of(tiny, center=0.75, readout="mean")
    adapters += [with_head(centered, **HEADS[kind], centered=True) for kind in ("mean", "zero-shot's share")]
    asked: list[dict] = [{} for _ in adapters] + [dict(class_names=["lynx", "fox"])] * 2
    adapters += [adapters[3], ruled]
    for i, (adapter, more) in enumerate(zip(adapters, asked, strict=True)):
        export_adapter(adapter, tmp_path / f"{i}.npz", **more)
    images = (2 * sorted(tree.rglob("*.png")))[: len(adapters)]
    names = ",".join(str(tmp_path / f"{i}.npz") for i in range(len(adapters)))
    pairs = [word for i, image in enumerate(images) for word in (str(image), str(i))]
    without = f"import sys, runpy; sys.modules['torch'] = None; sys.argv = {[str(EXAMPLE), str(file), names, *pairs]}; "
    result = subprocess.run(
        [sys.executable, "-c", f"{without}runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    for line, image, adapter, more in zip(result.stdout.splitlines(), images, adapters, asked, strict=True):
        path, label, p = line.split("\t")
        want = perlclip.Classifier(adapter, **more).predict(image)
        assert (path, label) == (str(image), want.label) and abs(float(p) - want.probability) < 2e-3


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("mma", {}, "changes the image tower"),
        ("cocoop", {}, "changes the image tower"),
        ("perl", dict(variant="step"), "variant 'step'"),
        ("perl", dict(depth=(7, 9)), "depth \\[7, 9\\]"),
        ("perl", dict(modalities="text"), "modalities 'text'"),
    ],
)
def test_what_the_file_has_no_input_for_is_refused(backbone, name, settings, sentence):
    with pytest.raises(perlclip.PerlclipError, match=sentence):
        adapter_arrays(adapter_of(backbone, name=name, **settings))


def test_a_list_of_old_and_new_classes_needs_no_head(tiny):
    adapter = with_head(adapter_of(tiny), scale=2.0)
    with pytest.raises(perlclip.PerlclipError, match="--no-head"):
        adapter_arrays(adapter, ["cat", "lynx"])
    assert len(adapter_arrays(adapter, ["cat", "lynx"], head=False)["class_names"]) == 2


def test_the_command_exports_backbones_and_adapters(tiny, clip_folder, tmp_path, monkeypatch):
    perlclip.save_adapter(adapter_of(tiny), tmp_path / "adapter")
    assert "MB" in run("export", "tiny", "--steps", 1, "--out", tmp_path / "a.onnx").stdout
    assert run("export", tmp_path / "adapter", "--out", tmp_path / "a.npz").exit_code == 0
    assert list(np.load(tmp_path / "a.npz", allow_pickle=False)["class_names"]) == list(NAMES)
    assert "must end in .npz" in fails("export", tmp_path / "adapter", "--out", tmp_path / "a.onnx")
    assert "are an adapter's" in fails("export", "tiny", "--no-head", "--out", tmp_path / "b.onnx")
    assert "depth must be in 0..11" in fails("export", "tiny", "--depth", 12, "--out", tmp_path / "b.onnx")
    half = perlclip.load_backbone("tiny", device="cpu", dtype="bfloat16")
    with pytest.raises(perlclip.PerlclipError, match="in float32"):
        export_backbone(half, tmp_path / "b.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "pip install 'perlclip[onnx]'" in fails("export", "tiny", "--out", tmp_path / "b.onnx")
