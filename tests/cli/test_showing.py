"""What the commands show: tables, files, pages, lists of what was skipped, sentences after training."""

import csv
import io
import json
import logging.handlers
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image

import perlclip
from perlclip.cli.training import _Clock, _report_fit
from perlclip.data.surveys import survey
from tests.cli.test_cli import QUICK, fails, run
from tests.common import loud

ODD = r"$\input{x}$ <i>|`*"  # a class name that Markdown, LaTeX, HTML and matplotlib would each read as something


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, backbone) -> Path:
    """PERL with random parameters: nothing here depends on a training."""
    method = loud(perlclip.create_method("perl", backbone, steps=1, depth=9))
    names = ("blue", "green grass", "red")
    return perlclip.save_adapter(method, tmp_path_factory.mktemp("a") / "it's", class_names=names, template="a {}.")


@pytest.fixture
def data(tree, tmp_path) -> Path:
    """A set with an image cut in half, and a text that is called one."""
    copied = Path(shutil.copytree(tree, tmp_path / "data"))
    half = copied / "red" / "1.png"
    half.write_bytes(half.read_bytes()[:-1000])
    (copied / "blue" / "text.png").write_text("not an image")
    return copied


# ---- predict ----


def test_one_damaged_image_does_not_end_the_rest(adapter, data):
    result = run("predict", adapter, data, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert result.exit_code == 1 and len(rows) == 23
    *listed, last = result.stderr.strip().splitlines()
    assert len(listed) == 2 and all(line.startswith("skipped: ") for line in listed)
    assert {"1.png", "text.png"} == {name for line in listed for name in re.findall(r"\w+\.png", line)}
    assert last == "error: skipped 2 of 25 images, which cannot be read"
    stopped = run("predict", adapter, data, "--csv", "--on-error", "stop")
    assert stopped.exit_code == 1 and "text.png" in stopped.stderr and len(stopped.stdout.splitlines()) < 24


def test_a_file_whose_name_is_no_text(adapter, tree, tmp_path):
    odd = os.fsencode(tmp_path) + b"/\xff \xe2\x82\xac.png"
    os.link(tree / "red" / "0.png", odd)
    for form in ([], ["--json"], ["--csv"]):
        result = run("predict", adapter, tmp_path, *form)
        assert result.exit_code == 0 and odd in result.stdout_bytes, result.exception
    Path(os.fsdecode(odd)).unlink()
    Path(os.fsdecode(odd)).write_text("no image")
    result = run("predict", adapter, tmp_path)
    assert result.exit_code == 1 and odd in result.stderr_bytes, result.exception


def test_a_long_list_of_damaged_images_is_cut(adapter, tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.png").write_text("no image")
    lines = run("predict", adapter, tmp_path).stderr.strip().splitlines()
    assert len(lines) == 22 and lines[20] == "… and 10 more"


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_predictions_to_a_file_are_those_on_the_screen(adapter, tree, tmp_path, ending):
    option = {"csv": "--csv", "jsonl": "--json"}[ending]
    more = ("--top-k", 2, "--steps", 1)
    screen = run("predict", adapter, tree, option, *more)
    file = tmp_path / "new" / f"found.{ending}"
    result = run("predict", adapter, tree, "--out", file, *more)
    assert result.exit_code == 0 and result.stdout == f"24 images labelled: {file}\n"
    assert file.read_text() == screen.stdout and len(list(file.parent.iterdir())) == 1


def test_a_file_of_predictions_is_whole_whatever_happens_meanwhile(adapter, data, tmp_path):
    file = tmp_path / "found.csv"
    assert "rows so far are in" in fails("predict", adapter, data / "red", "--out", file, "--on-error", "stop",
                                        "--batch-size", 1)  # fmt: skip
    assert not file.exists() and len((tmp_path / "found.csv.part").read_text().splitlines()) == 2
    assert run("predict", adapter, data / "red", "--out", file).exit_code == 1, "as one was skipped"
    assert len(file.read_text().splitlines()) == 8 and not (tmp_path / "found.csv.part").exists()


def test_wrong_names_of_files_are_found_out_before_a_backbone_is_loaded(adapter, tree, tmp_path):
    lost = ("--backbone", tmp_path / "nowhere")
    assert "must end in" in fails("predict", adapter, tree, "--out", tmp_path / "a.txt", *lost)
    assert "must end in" in fails("eval", adapter, tree, "--predictions", tmp_path / "a.json", *lost)
    assert "must end in .html" in fails("eval", adapter, tree, "--page", tmp_path / "a.pdf", *lost)
    assert "must end in .png or .svg" in fails("eval", adapter, tree, "--confusion", tmp_path / "a.gif", *lost)
    assert run("predict", adapter, tree, "--csv", "--out", tmp_path / "a.csv").exit_code == 2


# ---- eval ----


def test_eval_shows_classes_and_confusions(adapter, tree):
    found = perlclip.evaluate(perlclip.load_adapter(adapter), perlclip.load_images(tree, template="a {}."))
    words = run("eval", adapter, tree).stdout
    for score in found.per_class():
        recall = f"{score.recall:.1f}"
        assert re.search(rf"{score.name} +8 .* {re.escape(recall)} ", words), words
    pair = found.most_confused()[0]
    assert re.search(rf"{pair.label} +{pair.answer} +{pair.images} ", words), words
    numbers = json.loads(run("eval", adapter, tree, "--json").stdout)
    assert numbers["most_confused"][0]["images"] == pair.images and numbers["skipped"] == []
    assert [one["f1"] for one in numbers["per_class"]] == [score.f1 for score in found.per_class()]


def test_eval_skips_what_cannot_be_read_and_says_so(adapter, data, tmp_path):
    out = ["--predictions", tmp_path / "a.jsonl", "--page", tmp_path / "p.html", "--confusion", tmp_path / "c.svg"]
    result = run("eval", adapter, data, *out)
    assert result.exit_code == 1 and "on 23 images" in result.stdout
    assert "skipped 2 of 25 images" in result.stderr and "text.png" in result.stderr and "1.png" in result.stderr
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == 23 and {Path(row["image"]).parent.name for row in rows} == {"red", "green_grass", "blue"}
    assert "2 could not be read" in (tmp_path / "p.html").read_text()
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    assert "text.png" in fails("eval", adapter, data, "--on-error", "stop")
    (data / "blue" / "text.png").unlink()
    assert "1.png is damaged" in fails("eval", adapter, data, "--on-error", "stop")


# ---- names that mean something elsewhere ----


def test_dollars_in_class_names_do_not_end_analyze_explain_or_eval(backbone, tree, tmp_path):
    names = (ODD, "$1 or $2 bill", "red")
    method = loud(perlclip.create_method("perl", backbone, steps=1, depth=9))
    folder = perlclip.save_adapter(method, tmp_path / "a", class_names=names, template="a {}.")
    (tmp_path / "names.json").write_text(json.dumps(dict(zip(("blue", "green_grass", "red"), names, strict=True))))
    renamed = ("--class-names", tmp_path / "names.json")
    for words in (
        ("analyze", folder, tree, "--out", tmp_path / "analysis", "--cases", 1, *renamed),
        ("explain", folder, tree / "red" / "0.png", "--out", tmp_path / "explained"),
        ("eval", folder, tree, "--confusion", tmp_path / "c.svg", "--page", tmp_path / "p.html", *renamed),
    ):
        result = run(*words)
        assert result.exit_code == 0, (result.output, result.exception)
    assert "$1 or $2 bill" in (tmp_path / "c.svg").read_text()
    assert r"$\input{x}$ &lt;i&gt;" in (tmp_path / "c.svg").read_text()
    page = (tmp_path / "p.html").read_text()
    assert "<i>" not in page and r"$\input{x}$ &lt;i&gt;|`*" in page


def test_a_printed_command_can_be_pasted(tree, clip_folder, tmp_path):
    out = tmp_path / "it's $HOME & more"
    result = run("fit", tree, "--out", out, "--backbone", clip_folder, "--shots", 1, "--no-head", *QUICK)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("next: ")]
    assert shlex.split(line.removeprefix("next: "))[:3] == ["perlclip", "predict", str(out)]


# ---- after training ----


def test_fit_says_what_zero_shot_clip_would_have_answered(tree, clip_folder, tmp_path):
    command = ("fit", tree, "--backbone", clip_folder, "--shots", 2, "--device", "cpu", "--no-head", "--epochs", 1)
    words = run(*command, "--method", "coop", "--out", tmp_path / "a").stdout
    _, val = perlclip.train_val(perlclip.load_images(tree), shots=2, seed=1)
    untrained = perlclip.create_method("zero-shot", perlclip.load_backbone(str(clip_folder), device="cpu"))
    assert f"zero-shot {perlclip.evaluate(untrained, val).accuracy:.1f} % → adapted" in words


@pytest.mark.parametrize("method", ["perl", "gaussian"])
def test_zero_shot_is_not_what_a_centered_method_says_first(tmp_path, method):
    command = (
        "fit",
        "toybox:tiny_toys/base",
        "--backbone",
        "tiny",
        "--shots",
        2,
        "--val",
        2,
        "--device",
        "cpu",
        "--lens",
        "plain",
    )
    words = run(*command, "--method", method, "--epochs", 1, "--no-rehearse", "--out", tmp_path / "a").stdout
    (line,) = [line for line in words.splitlines() if line.startswith("validation accuracy")]
    backbone = perlclip.load_backbone("tiny", device="cpu")
    val = survey("toybox:tiny_toys/base", shots=2, val=2, seed=1).val
    zero_shot = perlclip.evaluate(perlclip.create_method("zero-shot", backbone), val, progress=False).accuracy
    assert f"images: zero-shot {zero_shot:.1f} % → centered " in line


@pytest.mark.parametrize(
    ("steps", "zero"), [([80.0, 70.0], None), ([70.0], 80.0), ([60.0, 70.0], None), ([70.0], 70.0)]
)
def test_fit_says_plainly_when_it_is_worse_than_not_adapting(adapter, tmp_path, capsys, steps, zero):
    metrics = {"validation": {"accuracy": steps[-1], "step_accuracy": steps, "images": 12}}
    _report_fit(perlclip.load_adapter(adapter), metrics, tmp_path, _Clock(), zero)
    worse = (
        "this is worse than not adapting: zero-shot CLIP answers 80.0 % of these 12 images right, the adapter 70.0 %"
    )
    assert (worse in capsys.readouterr().out) == (80 in (*steps, zero))


# ---- methods ----


def test_methods_as_json_and_none_that_match():
    rows = [json.loads(line) for line in run("methods", "mm*", "--json").stdout.splitlines()]
    assert [row["method"] for row in rows] == ["mma", "mmrl", "mmrl++"]
    assert rows[1]["parameters"] == 4_992_256 and rows[1]["backbone"] == "ViT-B/16" and "original" in rows[1]["recipes"]
    assert "unknown method 'xyz*'; known: cocoop" in fails("methods", "xyz*")


# ---- what other libraries say ----


@pytest.mark.parametrize("workers", [0, 1])
def test_pillows_warnings_stay_away(adapter, tmp_path, capfd, workers):
    """It warns of a broken EXIF block."""
    image = tmp_path / "exif.jpg"
    Image.new("RGB", (40, 40)).save(image, exif=b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff\x12\x01")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        perlclip.data.read_image(image)
        assert len(seen) >= 1, "there is something to say about it"
        seen.clear()
        assert run("predict", adapter, image, "--workers", workers).exit_code == 0
    assert not seen and capfd.readouterr().err == ""


def test_a_prompt_that_is_too_long_is_said_once(monkeypatch):
    """`transformers` would say it first, in its own way."""
    said = logging.handlers.BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [said])
    with pytest.raises(perlclip.PerlclipError, match="longer than the context of 32"):
        perlclip.load_backbone("tiny", device="cpu").encode_text(["word " * 40])
    assert not said.buffer


def test_shell_completion_as_the_documents_have_it():
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    (line,) = re.findall(r'eval "\$\((\w+)=bash_source perlclip\)"', page)
    code = "from perlclip.cli import main; main(prog_name='perlclip')"
    environment = os.environ | {line: "bash_complete", "COMP_WORDS": "perlclip pre", "COMP_CWORD": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["plain,predict"]
