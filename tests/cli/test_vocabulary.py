"""One word for one thing: the command line and Python have the same names and the same defaults."""

import inspect

import click
import pytest

import perlclip
from perlclip.batch.work import Job
from perlclip.cli import main
from perlclip.data import ON_ERROR, survey, train_and_val
from perlclip.export.adapter_arrays import export_adapter
from perlclip.export.onnx_graph import export_backbone
from perlclip.export.web_page import export_page
from perlclip.inference.classifier import Classifier
from perlclip.methods.registry import default_recipe
from perlclip.serve.guard import Limits
from perlclip.serve.service import ServiceConfig
from perlclip.studio.worker import Worker
from tests.cli.test_cli import run

PAIRS = [
    ("fit", perlclip.load_backbone, {"device", "dtype", "image_size"}),
    ("fit", train_and_val, {"shots", "val", "seed", "template", "class_names"}),
    ("fit", survey, {"shots", "val", "seed", "template", "class_names", "on_error"}),
    ("fit", perlclip.fit, {"seed", "compile", "workers", "recipe", "resume", "head"}),
    (
        "predict",
        Classifier.from_pretrained,
        {"device", "dtype", "compile", "template", "backbone", "class_names", "head"},
    ),
    ("predict", Classifier.predict, {"top_k", "batch_size", "workers", "steps", "max_mean_steps", "max_ms"}),
    ("predict", Job, {"embeddings", "decode", "shard_size", "executor", "address"}),
    ("predict", Classifier.predict, {"reject", "reject_rate", "coverage", "sets", "multi_label"}),
    ("export", export_backbone, {"steps", "depth", "int8"}),
    ("export", export_adapter, {"class_names", "template", "head"}),
    ("export", export_page, {"class_names", "template", "head", "int8"}),
    ("push", perlclip.push_adapter, {"private", "message", "dataset"}),
    ("eval", perlclip.load_adapter, {"device", "dtype", "backbone"}),
    ("eval", perlclip.evaluate, {"steps", "max_mean_steps", "batch_size", "workers", "compile", "head"}),
    ("check", perlclip.check, {"batch_size", "workers"}),
    ("suggest", perlclip.suggest, {"count", "template", "labelled", "batch_size", "workers"}),
    ("set-thresholds", perlclip.set_thresholds, {"workers"}),
    ("studio", Worker, {"every", "out", "recipe"}),
    ("studio", Limits, {"host", "token"}),
    ("calibrate", Classifier.calibrate, {"batch_size", "workers"}),
    ("analyze", perlclip.analysis.analyze, {"cases", "how", "workers"}),
    ("serve", ServiceConfig, {"batch_size", "max_wait_ms", "max_rows", "workers", "max_pixels"}),
    ("serve", Limits, {"host", "port", "seconds"}),
    ("serve", perlclip.load_backbone, {"device", "dtype"}),
]


@pytest.mark.parametrize(("command", "function", "names"), PAIRS, ids=lambda value: getattr(value, "__name__", ""))
def test_options_are_called_as_in_python_and_default_to_the_same(command, function, names):
    options = {p.name: p for p in main.commands[command].params if isinstance(p, click.Option)}
    python = inspect.signature(function).parameters
    assert names <= options.keys() and names <= python.keys()
    for name in names:
        option, default = options[name], python[name].default
        said = option.default
        if said is None or repr(said) == "Sentinel.UNSET":
            said = False if option.is_flag else None
        assert said == default, (name, said, default)


def test_errors_of_images_have_the_same_words():
    """But not the same default: what is skipped is listed by a command and fails it; a program would not notice."""
    skipping = (("predict", Classifier.predict), ("eval", perlclip.evaluate), ("check", perlclip.check))
    for command, function in (*skipping, ("suggest", perlclip.suggest), ("fit", survey)):
        (option,) = [p for p in main.commands[command].params if p.name == "on_error"]
        assert tuple(option.type.choices) == ON_ERROR
        assert option.default == ("stop" if command == "fit" else "skip")
        assert inspect.signature(function).parameters["on_error"].default == "stop"


def test_the_five_lines_make_what_the_command_makes(tree, clip_folder, tmp_path):
    """The same weights, thresholds and training record; `steps="adaptive"` failed on the first of them."""
    backbone = perlclip.load_backbone(str(clip_folder), device="cpu")
    data, _ = perlclip.train_val(perlclip.load_images(tree), shots=2, seed=1)
    fitted = perlclip.fit(perlclip.create_method("perl", backbone), data)
    perlclip.save_adapter(fitted, tmp_path / "python")
    command = ("fit", tree, "--shots", 2, "--backbone", clip_folder, "--device", "cpu", "--out", tmp_path / "command")
    assert run(*command).exit_code == 0
    ours, theirs = (perlclip.load_adapter(tmp_path / name, backbone=backbone) for name in ("python", "command"))
    assert ours.fingerprint == theirs.fingerprint and ours.thresholds == theirs.thresholds is not None
    assert default_recipe("perl") == ours.training["recipe_name"] == theirs.training["recipe_name"]
    times = ("seconds", "environment")
    assert {k: v for k, v in ours.training.items() if k not in times} == {
        k: v for k, v in theirs.training.items() if k not in times
    }
    found = perlclip.Classifier.from_pretrained(tmp_path / "python", device="cpu").predict(
        data.images, steps="adaptive"
    )
    assert all(0 <= prediction.steps <= 4 for prediction in found)
    assert "training views" in run("set-thresholds", tmp_path / "python", tree, "--device", "cpu").output
