"""The command line as a user meets it: results, exit codes, one-sentence errors, nothing half-written."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

import perlclip
from perlclip.cli import main
from tests.conftest import SIZES, build_clip, draw_tree
from tests.data.test_data import BAD_IMAGES

QUICK = ["--device", "cpu", "--epochs", "1", "--set", "steps=1", "--set", "depth=9"]


def run(*args) -> "object":
    return CliRunner().invoke(main, [str(arg) for arg in args])


def fails(*args, code: int = 1) -> str:
    """The one sentence that a failing command prints."""
    result = run(*args)
    assert result.exit_code == code, result.output
    lines = result.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in result.output
    return errors[0]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, tree, clip_folder) -> Path:
    out = tmp_path_factory.mktemp("out") / "adapter"
    result = run("fit", tree, "--out", out, "--backbone", clip_folder, "--shots", 4, *QUICK)
    assert result.exit_code == 0, result.output
    assert "validation accuracy on 12 images: zero-shot" in result.stdout and f"adapter in {out}" in result.stdout
    return out


def test_help_is_quick_because_nothing_heavy_is_imported():
    code = "import sys; from perlclip.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "transformers", "numpy", "PIL", "rich", "matplotlib"} & set(modules)


def test_fit_records_everything(adapter, tree):
    info = json.loads(run("inspect", adapter, "--json").stdout)
    training = info["training"]
    assert info["class_names"] == ["blue", "green grass", "red"] and info["config"]["depth"] == 9
    assert (training["shots"], training["seed"], training["images"]) == (4, 1, 12)
    assert training["recipe"]["epochs"] == 1 and training["environment"]["perlclip"] == perlclip.__version__
    assert info["metrics"]["validation"]["images"] == 12
    assert str(tree.parent) not in json.dumps(info["training"]), "no machine paths in the record"
    assert "green grass" in run("inspect", adapter).stdout


def test_predict_text_json_and_csv_agree(adapter, tree):
    images = [tree / "red" / "0.png", tree / "blue"]
    text = run("predict", adapter, *images, "--device", "cpu").stdout.splitlines()
    assert len(text) == 9
    rows = [json.loads(line) for line in run("predict", adapter, *images, "--json", "--top-k", 2).stdout.splitlines()]
    table = list(csv.DictReader(io.StringIO(run("predict", adapter, *images, "--csv").stdout)))
    for line, row, record in zip(text, rows, table, strict=True):
        path, label, probability = line.split("\t")
        assert path == row["image"] == record["image"] and label == row["label"] == record["label"]
        assert float(probability) == pytest.approx(row["probability"], abs=1e-4)
        assert len(row["top"]) == 2 and row["top"][0]["probability"] >= row["top"][1]["probability"]


def test_predict_takes_globs_and_other_classes(adapter, tree, tmp_path):
    (tmp_path / "names.txt").write_text("sky\nlawn\n")
    result = run("predict", adapter, f"{tree}/*/[01].png", "--class-names", tmp_path / "names.txt")
    lines = result.stdout.splitlines()
    assert len(lines) == 6 and {line.split("\t")[1] for line in lines} <= {"sky", "lawn"}


def test_eval_matches_classes_by_name(adapter, tree, tmp_path):
    whole = json.loads(run("eval", adapter, tree, "--json").stdout)
    assert whole["images"] == 24 and len(whole["step_accuracy"]) == 2
    shutil.copytree(tree / "red", tmp_path / "red")
    part = json.loads(run("eval", adapter, tmp_path, "--json").stdout)
    assert part["accuracy"] == pytest.approx(whole["class_accuracy"]["red"]), "labels are matched by name, not order"
    table = run("eval", adapter, tree).stdout
    assert f"accuracy {whole['accuracy']:.2f} % on 24 images" in table and "green grass" in table
    (tmp_path / "red").rename(tmp_path / "redd")
    assert "unknown class 'redd'; did you mean 'red'?" in fails("eval", adapter, tmp_path)


def test_methods_lists_parameters_without_a_download(clip_folder):
    assert "6,402" in run("methods").stdout
    listing = run("methods", "--backbone", clip_folder).stdout
    assert "402" in listing and "6,402" not in listing and "zero-shot" in listing


def test_a_split_tree_validates_on_its_own_val(tmp_path, clip_folder):
    for split, images in (("train", 3), ("val", 2)):
        draw_tree(tmp_path / "data" / split, images=images)
    assert run("fit", tmp_path / "data", "--out", tmp_path / "a", "--backbone", clip_folder, *QUICK).exit_code == 0
    info = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert info["training"]["images"] == 9 and info["metrics"]["validation"]["images"] == 6
    shutil.rmtree(tmp_path / "data" / "val" / "blue")  # val may lack a class, and a list of names counts train's
    (tmp_path / "names.txt").write_text("navy\nlawn\ncrimson\n")
    command = ("fit", tmp_path / "data", "--out", tmp_path / "b", "--backbone", clip_folder, *QUICK)
    assert run(*command, "--class-names", tmp_path / "names.txt").exit_code == 0
    info = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert set(info["metrics"]["validation"]["class_accuracy"]) == {"lawn", "crimson"}


def test_a_dry_run_says_what_there_is_and_nothing_else(tree, tmp_path):
    result = run("fit", tree, "--shots", 2, "--dry-run", "--out", tmp_path / "a")
    assert (
        result.exit_code == 0 and "3 classes\n  train 6 (2 per class), val 12 (held out, 4 per class)" in result.stdout
    )
    assert not (tmp_path / "a").exists()
    assert "Missing option '--out'" in (result := run("fit", tree)).stderr and result.exit_code == 2


def test_paths_from_stdin(adapter, tree):
    paths = sorted(tree.rglob("*.png"))[:3]
    want = run("predict", adapter, *paths, "--device", "cpu").stdout
    for mark in ("\n", "\0"):
        lines = mark.join([*map(str, paths), ""])
        assert CliRunner().invoke(main, ["predict", str(adapter), "-", "--device", "cpu"], input=lines).stdout == want
    assert "no paths on stdin" in fails("predict", adapter, "-")


def test_a_damaged_image_is_found_before_the_training(tmp_path, clip_folder):
    for split in ("train", "val"):
        draw_tree(tmp_path / "data" / split, images=2)
    broken = tmp_path / "data" / "val" / "red" / "0.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    out = tmp_path / "a"
    command = ("fit", tmp_path / "data", "--out", out, "--backbone", clip_folder, *QUICK)
    assert "val/red/0.png is damaged" in fails(*command) and not out.exists()
    result = run(*command, "--on-error", "skip", "--no-head")
    assert result.exit_code == 1 and "skipped 1 of the images:\n  image " in result.stderr
    assert "val 5 (split beforehand" in result.stderr and "validation accuracy on 5 images" in result.stdout
    assert perlclip.load_adapter(out).class_names == ("blue", "green grass", "red")
    broken.rename(broken.with_name("1.png"))
    assert "no image of class" not in run(*command, "--dry-run", "--on-error", "skip").stderr


def test_the_same_command_gives_the_same_bytes(adapter, tree, clip_folder, tmp_path):
    assert run("fit", tree, "--out", tmp_path, "--backbone", clip_folder, "--shots", 4, *QUICK).exit_code == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / name).read_bytes() == (adapter / name).read_bytes()


# ---- bad input: one clear sentence, non-zero exit, nothing half-written ----


def fit_fails(data, out, clip_folder, *more) -> str:
    sentence = fails("fit", data, "--out", out, "--backbone", clip_folder, *QUICK, *more)
    assert not out.exists() or not any(out.iterdir())
    return sentence


@pytest.fixture
def data(tree, tmp_path) -> Path:
    return Path(shutil.copytree(tree, tmp_path / "data"))


def test_missing_and_empty_folders(tmp_path, clip_folder, data):
    (tmp_path / "empty").mkdir()
    (data / "void").mkdir()
    out = tmp_path / "out"
    assert "no such file or folder" in fit_fails(tmp_path / "gone", out, clip_folder)
    assert "no class folders in" in fit_fails(tmp_path / "empty", out, clip_folder)
    assert "void holds no images" in fit_fails(data, out, clip_folder)


def test_too_few_images_for_the_shots(data, tmp_path, clip_folder):
    (data / "red" / "0.png").unlink()
    sentence = fit_fails(data, tmp_path / "out", clip_folder, "--shots", 8)
    assert "class 'red' has 7 images, fewer than the 8 shots asked for" in sentence


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_among_good_ones(data, tmp_path, clip_folder, name):
    content, words = BAD_IMAGES[name]
    (data / "red" / name).write_bytes(content)
    sentence = fit_fails(data, tmp_path / "out", clip_folder)
    assert name in sentence and any(part in sentence for part in words.split("|"))
    (data / "red" / name).unlink()


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_at_prediction(adapter, tmp_path, name):
    (tmp_path / name).write_bytes(BAD_IMAGES[name][0])
    assert name in fails("predict", adapter, tmp_path / name)


def test_duplicate_class_names(data, tmp_path, clip_folder):
    shutil.copytree(data / "green_grass", data / "green grass")
    assert "'green grass' and 'green_grass' are one class name" in fit_fails(data, tmp_path / "out", clip_folder)


def test_a_prompt_longer_than_the_context(data, tmp_path, clip_folder):
    (data / "red").rename(data / ("very " * 20))
    assert "longer than the context of 77" in fit_fails(data, tmp_path / "out", clip_folder)


def test_bad_options(data, tmp_path, clip_folder):
    out = tmp_path / "out"
    for more, words in (
        (["--template", "a photo"], "must contain one {}"),
        (["--method", "perll"], "did you mean 'perl'"),
        (["--recipe", "fats"], "did you mean 'fast'"),
        (["--set", "stps=2"], "did you mean 'steps'"),
        (["--set", "readout=men"], "unknown value of readout 'men'; did you mean 'mean'"),
        (["--set", "steps=two"], "--set steps takes a value of type int"),
        (["--class-names", tmp_path / "gone.txt"], "cannot read class names"),
    ):
        assert words in fit_fails(data, out, clip_folder, *more)
    no_steps = ("--set", "steps=0")
    assert "nothing that perl trains reaches the loss" in fit_fails(data, out, clip_folder, *no_steps)
    assert run("fit", data).exit_code == 2, "wrong usage"


def test_adapters_that_cannot_be_used(adapter, tree, tmp_path):
    image = tree / "red" / "0.png"
    assert "no adapter folder" in fails("predict", tmp_path / "gone", image)
    assert "is not an adapter" in fails("predict", tmp_path, image)
    cut = Path(shutil.copytree(adapter, tmp_path / "cut"))
    weights = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(weights[:-5])
    assert "is damaged" in fails("predict", cut, image)
    other = build_clip(tmp_path / "other", **SIZES["small"], seed=9)
    assert "it does not fit" in fails("predict", adapter, image, "--backbone", other)
    assert "no file matches" in fails("predict", adapter, f"{tmp_path}/*.png")
    assert "no such image" in fails("predict", adapter, tmp_path / "x.png")


def test_output_that_cannot_be_written(data, tmp_path, clip_folder):
    (tmp_path / "file").write_text("")
    assert "cannot write to" in fails("fit", data, "--out", tmp_path / "file" / "a", "--backbone", clip_folder, *QUICK)


def test_files_of_the_users_are_not_replaced_unasked(data, tmp_path, clip_folder):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("precious")
    assert "already holds a file README.md" in fails("fit", data, "--out", tmp_path / "mine", *QUICK)
    assert (tmp_path / "mine" / "README.md").read_text() == "precious"


def test_numbers_out_of_range_are_wrong_usage(adapter, tree):
    for more in (["--val", "-1"], ["--workers", "-1"], ["--shots", "0"], ["--seed", "-3"], ["--batch-size", "0"]):
        assert run("fit", tree, "--out", "x", *more).exit_code == 2
    for more in (["--top-k", "0"], ["--batch-size", "0"]):
        assert run("predict", adapter, tree, *more).exit_code == 2
    assert "out of memory" in fails("fit", tree, "--out", adapter, "--overwrite", "--set", "rank=100000000000",
                                    "--backbone", "tiny", "--device", "cpu")  # fmt: skip


def test_manifests_with_odd_rows(tree, tmp_path, clip_folder):
    image = tree / "red" / "0.png"
    for rows, words in (
        ("path,label,split\n%s,red\n", "line 2: split '' is not train, val or test"),
        ("path,label\n\n\n%s,\n", "line 4: path and label must both be given"),
        ("path,label,split\n%s,red,vali\n", "split 'vali' is not train"),
        ("file,label\n%s,red\n", "needs a header 'path,label'"),
        ("path,label\ngone-%s,red\n", "cannot read image"),
    ):
        (tmp_path / "list.csv").write_text(rows.replace("%s", str(image).lstrip("/") if "gone" in rows else str(image)))
        assert words in fit_fails(tmp_path / "list.csv", tmp_path / "out", clip_folder)


def test_a_disk_that_fills_up_while_saving(data, tmp_path, clip_folder, monkeypatch):
    import errno

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    assert "No space left on device" in fit_fails(data, tmp_path / "out", clip_folder)


def test_an_adapter_is_not_overwritten_by_accident(adapter, data, clip_folder, tmp_path):
    mine = Path(shutil.copytree(adapter, tmp_path / "mine"))
    before = (mine / "adapter_model.safetensors").read_bytes()
    command = ("fit", data, "--out", mine, "--backbone", clip_folder, *QUICK, "--seed", 5)
    assert "already holds an adapter" in fails(*command)
    assert (mine / "adapter_model.safetensors").read_bytes() == before
    assert run(*command, "--overwrite").exit_code == 0
    assert (mine / "adapter_model.safetensors").read_bytes() != before


def test_debug_shows_the_traceback(tmp_path):
    result = run("--debug", "inspect", tmp_path)
    assert isinstance(result.exception, perlclip.PerlclipError)


def started(*command: str) -> subprocess.Popen:
    """`perlclip` in a process of its own that writes a checkpoint after every step."""
    code = "from perlclip.training import loop; loop.CHECKPOINT_SECONDS = 0; from perlclip.cli import main; main()"
    words = [sys.executable, "-c", code, *map(str, command)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_one_command_line_serves_a_job_that_is_ended_and_started_again(tree, clip_folder, tmp_path):
    """SIGTERM as from a scheduler; the same command begins, goes on, and finds itself done."""
    out = tmp_path / "out"
    command = ("fit", tree, "--out", out, "--backbone", clip_folder, "--device", "cpu", "--shots", 2, "--no-head",
               "--epochs", 8, "--resume")  # fmt: skip
    process = started(*command)
    while not (out / "checkpoint.safetensors").exists() and process.poll() is None:
        time.sleep(0.02)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in errors, errors
    assert "no checkpoint in" in errors and "starting from the beginning" in errors and "go on with --resume" in errors
    assert [path.name for path in out.iterdir()] == ["checkpoint.safetensors"]
    result = run(*command)
    assert result.exit_code == 0 and re.search(r"going on after step \d+ of the training in", result.stderr)
    before = {path: path.read_bytes() for path in out.iterdir()}
    result = run(*command)
    assert result.exit_code == 0 and "holds a complete adapter: nothing to resume" in result.stdout
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_a_checkpoint_that_is_damaged_is_not_gone_on_from(tree, clip_folder, tmp_path, backbone):
    data = perlclip.load_images(tree).select([0, 9, 17])
    path, quick = tmp_path / "checkpoint", perlclip.Recipe(epochs=1)

    def resume():
        method = perlclip.create_method("perl", backbone)
        return perlclip.fit(method, data, recipe=quick, head=False, checkpoint=path, resume=True, progress=False)

    resume()  # from nothing
    content = path.read_bytes()
    for place in range(9, len(content), 997):
        damaged = bytearray(content)
        damaged[place] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(perlclip.PerlclipError, match=r"^cannot resume from [^\n]*$"):
            resume()
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(perlclip.PerlclipError, match="not a plain file"):
        resume()


def test_ctrl_c_keeps_a_checkpoint_and_resume_finishes(tree, clip_folder, tmp_path):
    """A real process, a real signal; the resumed adapter has the bytes of an undisturbed one."""
    out = tmp_path / "out"
    options = ["--backbone", str(clip_folder), "--device", "cpu", "--epochs", "15", "--seed", "2", "--no-head"]
    process = started("fit", str(tree), "--out", str(out), *options)
    while not (out / "checkpoint.safetensors").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "go on with --resume" in errors and "Traceback" not in errors
    assert [path.name for path in out.iterdir()] == ["checkpoint.safetensors"]
    assert "holds an interrupted training" in fails("fit", tree, "--out", out, *options)
    shutil.copytree(out, tmp_path / "stale")
    again = ["--seed", 3, "--epochs", 1, "--overwrite"]
    assert run("fit", tree, "--out", tmp_path / "stale", *options, *again).exit_code == 0
    assert not (tmp_path / "stale" / "checkpoint.safetensors").exists()
    assert run("fit", tree, "--out", out, *options, "--resume").exit_code == 0
    assert run("fit", tree, "--out", tmp_path / "whole", *options).exit_code == 0
    name = "adapter_model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (out / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("method", perlclip.list_methods())
def test_every_method_from_fit_to_predict(tree, clip_folder, tmp_path, method):
    out = tmp_path / "adapter"
    settings = ["--set", "templates=a {}.;the {}."] if method == "promptsrc" else []
    fitted = run(
        "fit", tree, "--out", out, "--backbone", clip_folder, "--method", method, "--shots", 2, "--epochs", 1, *settings
    )
    assert fitted.exit_code == 0, fitted.output
    result = run("predict", out, tree / "red" / "0.png", "--json")
    assert result.exit_code == 0 and json.loads(result.output)["label"] in ("red", "green grass", "blue")
    evaluated = run("eval", out, tree, "--json")
    assert evaluated.exit_code == 0 and json.loads(evaluated.output)["images"] == 24
    assert method in run("inspect", out).output


def test_methods_on_a_shallow_tower(tmp_path):
    """Defaults made for twelve blocks do not fit; the table says so in the row, and shows the others."""
    size = dict(vision=(32, 2, 6), text=(32, 2, 6), patch=8, image=32, context=77, act="quick_gelu", embed=16)
    folder = build_clip(tmp_path / "shallow", **size)
    result = run("methods", "--backbone", folder)
    rows = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert result.exit_code == 0 and "too few blocks" in rows["perl"] and " 128 " in rows["coop"]
