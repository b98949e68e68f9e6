"""Adapters that were killed, cut, flipped, edited or made by somebody else: the old or the new one, or a sentence."""

import json
import logging
import os
import pickle
import random
import shutil
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers.utils import logging as hf_logging

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.card import as_code, as_markdown, model_card
from perlclip.adapters.folder import CARD, CONFIG, OWN_HASH, WEIGHTS, read_info
from perlclip.backbone import load
from perlclip.backbone.clip import vit_b16_shape
from perlclip.errors import shell_word
from perlclip.files import held_folder, read_file
from perlclip.thinking.policy import Policy
from perlclip.thinking.thresholds import Point, Thresholds
from tests.adapters.test_adapter import NAMES, TEMPLATE, change, folder, rewrite
from tests.cli.test_cli import fails, run

__all__ = ["folder"]  # a fixture
FILES = sorted([CARD, CONFIG, WEIGHTS])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def put(folder: Path, contents: dict[str, bytes]) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def fingerprint(folder: Path, backbone) -> str:
    return perlclip.load_adapter(folder, backbone=backbone).fingerprint


def save(backbone, folder: Path, seed: int, **more) -> Path:
    method = perlclip.create_method("perl", backbone, seed=seed, steps=2)
    return perlclip.save_adapter(method, folder, class_names=NAMES, template=TEMPLATE, **more)


# ---- saving over an adapter ----


def dies_at(moment: int, work) -> bool:
    """Do it in a forked process that dies before its so-manieth touch of the disk; whether it came to its end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    touches = iter(range(1000))
    for name in ("fsync", "replace", "unlink", "open"):
        real = getattr(os, name)
        setattr(os, name, lambda *a, real=real, **k: os._exit(9) if next(touches) == moment else real(*a, **k))
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:  # never on into the tests of its parent
        os._exit(3)


def test_killed_at_any_moment_the_old_or_the_new_adapter_loads(folder, backbone):
    """Whole, as the load that comes next finishes or removes what the kill has left."""
    old, seen = files(folder), []
    first = fingerprint(folder, backbone)
    second, new = fingerprint(save(backbone, folder, 4), backbone), files(folder)
    for moment in range(1000):
        put(folder, old)
        if dies_at(moment, lambda: save(backbone, folder, 4)):
            break
        seen.append(fingerprint(folder, backbone))
        assert files(folder) == (old if seen[-1] == first else new), "loading has put it in order"
    assert moment > 10 and seen == sorted(seen, key=[first, second].index) and set(seen) == {first, second}


def test_an_interrupt_between_the_renames_is_no_loss(folder, backbone, monkeypatch):
    second = fingerprint(save(backbone, folder.parent / "other", 4), backbone)
    replace, calls = os.replace, []

    def interrupted(*paths):
        calls.append(paths)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(*paths)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", interrupted)
        save(backbone, folder, 4)
    assert fingerprint(folder, backbone) == second and sorted(files(folder)) == FILES


def test_savers_and_readers_of_one_folder_never_meet_halfway(folder, backbone):
    wanted = {fingerprint(save(backbone, folder, seed), backbone) for seed in range(4)}
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save, backbone, folder, seed % 4) for seed in range(24)]
        found = {fingerprint(folder, backbone) for _ in range(20)}
        assert all(one.result() == folder for one in saves)
    assert found <= wanted and fingerprint(folder, backbone) in wanted and sorted(files(folder)) == FILES


def test_weights_that_take_their_name_between_two_looks_are_found(folder, backbone, monkeypatch):
    wanted, path = fingerprint(folder, backbone), folder / WEIGHTS
    waiting = path.with_name(f".{WEIGHTS}.{'0' * 16}")
    path.rename(waiting)

    def named_meanwhile(place, *limits):
        if place == waiting and waiting.exists():
            waiting.rename(path)
        return read_file(place, *limits)

    monkeypatch.setattr("perlclip.adapters.folder.read_file", named_meanwhile)
    assert fingerprint(folder, backbone) == wanted


def test_an_adapter_in_a_folder_that_another_process_holds(folder, backbone, monkeypatch):
    monkeypatch.setattr("perlclip.adapters.folder.LOCK_SECONDS", 0.0)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with held_folder(folder):
            os.write(ready[1], b"1")
            os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    try:
        with pytest.raises(PerlclipError, match="another process is writing to"):
            save(backbone, folder, 4)
        assert "another process is training into" in fails("fit", "toybox:noisy_shapes", "--out", folder, "--overwrite")
    finally:
        os.write(done[1], b"1")
        os.waitpid(child, 0)
    save(backbone, folder, 4)


# ---- damage ----


def test_a_flipped_bit_in_the_config_changes_no_answer(folder, backbone):
    """Of 0.1.0's adapters one in four loaded, some with another class name or threshold."""
    save(backbone, folder, 3, thresholds=Thresholds(chosen=POINT, frontier=(POINT,), views=8), metrics={"a": 81.25})
    whole, content, rng = read_info(folder), bytearray((folder / CONFIG).read_bytes()), random.Random(0)
    same = 0
    for place in rng.sample(range(8 * len(content)), 1200):
        content[place // 8] ^= 1 << place % 8
        (folder / CONFIG).write_bytes(content)
        content[place // 8] ^= 1 << place % 8
        try:
            found = read_info(folder)
        except PerlclipError as error:
            assert "\n" not in str(error)
        else:
            same += 1
            assert {k: v for k, v in found.items() if k in whole} == {k: v for k, v in whole.items() if k in found}
            assert set(whole) - set(found) <= {OWN_HASH}
    assert same < 60, "the name of the hash itself, and white space"


POINT = Point(0.0, 1.0, Policy(2.0, 3.0))


def test_an_edit_by_hand_gets_a_sentence_and_a_way_out(folder, backbone):
    info = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(info))
    perlclip.load_adapter(folder, backbone=backbone)  # another layout is no edit
    (folder / CONFIG).write_text(json.dumps(info | {"class_names": ["red", "lawn", "blue"]}))
    with pytest.raises(PerlclipError, match=rf"damaged or edited since it was saved.*remove the field '{OWN_HASH}'"):
        perlclip.load_adapter(folder, backbone=backbone)
    change(folder, class_names=["red", "lawn", "blue"])
    assert perlclip.load_adapter(folder, backbone=backbone).class_names[1] == "lawn"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.update({"projectors.text.up.bias": torch.ones(32).to(torch.float8_e4m3fn)}), "float8_e4m3fn"),
        (lambda t: t.update({"projectors.text.up.bias": torch.ones(32, dtype=torch.int32)}), "of type torch.int32"),
    ],
)
def test_tensors_of_odd_types_are_refused(folder, backbone, edit, words):
    rewrite(folder, edit)
    with pytest.raises(PerlclipError, match=words):
        perlclip.load_adapter(folder, backbone=backbone)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"rank": 10**30}}, "is damaged: a number in it is too large"),
        ({"config": {"rank": 10**18}}, "'rank' is out of all range"),
        ({"config": {"rank": 10**11, "steps": 2}}, "has settings that cannot be"),
        ({"config": {"steps": 10**9}}, "steps must be in 0..1000"),
        ({"config": {"anchor": 1e400}}, "must be of type float, got 'Infinity'"),
        ({"training": json.loads("[" * 99 + "]" * 99)}, "nested too deeply"),
        ({"adaptive": {"views": 1, "chosen": [0, 1, float("nan"), 1], "frontier": []}}, "is damaged"),
    ],
)
def test_absurd_settings_are_refused(folder, backbone, changes, words):
    change(folder, **changes)
    with pytest.raises(PerlclipError, match=words):
        perlclip.load_adapter(folder, backbone=backbone)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_has_no_end_is_not_read(folder, backbone, name):
    def refused(words):
        with pytest.raises(PerlclipError, match=words):
            perlclip.load_adapter(folder, backbone=backbone)
        (folder / name).unlink()

    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refused("it is not a plain file")
    os.mkfifo(folder / name)
    refused("it is not a plain file")
    with (folder / name).open("wb") as file:
        file.truncate(2**40)
    refused("it is larger than")


def test_a_record_that_is_no_number_is_a_sentence(folder, tree):
    change(folder, training={"data": "x", "shots": "abc", "seconds": "abc"})
    assert "training record that is damaged: shots 'abc'" in fails("set-thresholds", folder, tree)
    assert run("inspect", folder).exit_code == 0


# ---- numbers that are none ----


def test_what_load_would_refuse_is_not_saved(folder, backbone):
    before = files(folder)
    infinite, large = (perlclip.create_method("perl", backbone) for _ in range(2))
    with torch.no_grad():
        next(infinite.parameters()).fill_(torch.inf)
    wrong = {"thresholds": Thresholds(chosen=Point(0.0, 1.0, Policy(float("nan"), 1.0)), frontier=(), views=1)}
    for method, more, words in (
        (infinite, {}, "not finite"),
        (large, {"metrics": {"loss": float("nan")}}, "not plain, finite data"),
        (large, {"training": {"where": Path("x")}}, "not plain, finite data"),
        (large, wrong, "not plain, finite data"),
    ):
        with pytest.raises(PerlclipError, match=words):
            perlclip.save_adapter(method, folder, class_names=NAMES, template=TEMPLATE, **more)
    assert files(folder) == before


def test_an_answer_that_is_no_number_is_an_error(folder, backbone, tree):
    """Finite weights, so large that the towers overflow: predict printed nan, and --json bare NaN, with exit code 0."""
    rewrite(folder, lambda t: [tensor.mul_(1e30) for tensor in t.values()])
    classifier = perlclip.Classifier.from_pretrained(folder, backbone=backbone)
    image = tree / "red" / "0.png"
    for steps in (None, 1, 2):
        with pytest.raises(PerlclipError, match="an answer is not a number"):
            classifier.predict(image, steps=steps)
    assert "an answer is not a number" in fails("predict", folder, image, "--json")
    assert not run("predict", folder, image, "--json").stdout


# ---- the card and printed commands ----


HOSTILE = ["$1 or $2 bill", "<script>alert(1)</script>", "a|b", "[x](http://e)", "`rm -rf`", "*b* _c_", "1. one", "- d"]


def test_class_names_are_only_words_in_the_card(backbone, tmp_path):
    folder = tmp_path / "-it's $(rm) `x` | #1"
    method = perlclip.create_method("perl", backbone)
    metrics = {"class_accuracy": dict.fromkeys(HOSTILE, 50.0)}
    perlclip.save_adapter(method, folder, class_names=HOSTILE, template="`{}`", metrics=metrics)
    card = (folder / CARD).read_text()
    for plain in ("<script>", "[x](", "\n- 1. ", "\n- - ", " $1", "| a|b"):
        assert plain not in card
    for words in (
        r"- \$1 or \$2 bill",
        r"- 1\. one",
        r"- \- d",
        r"| class_accuracy: a\|b | 50 |",
        "Prompt: `` `{}` ``",
    ):
        assert words in card
    assert f"perlclip predict {shell_word(folder.name)} image.jpg" in card and "'./-it'" in card
    assert ModelCard.load(folder / CARD).data.library_name == "perlclip"
    assert perlclip.load_adapter(folder, backbone=backbone).class_names == tuple(HOSTILE)


def test_markdown_leaves_plain_words_alone():
    for plain in ("green grass", "weight_decay", "0.001", "-0.5", "été", "a (b)", "1.5 m"):
        assert as_markdown(plain) == plain and as_code(plain) == f"`{plain}`"


def test_names_that_no_file_can_hold_survive_saving(folder, backbone):
    odd = os.fsdecode(b"caf\xe9")
    save(backbone, folder, 3, training={"source": odd})
    assert perlclip.load_adapter(folder, backbone=backbone).training["source"] == odd
    assert "caf" in model_card(read_info(folder), odd)


# ---- the backbone ----


def test_a_backbone_in_a_folder_is_found_from_elsewhere(clip_folder, tmp_path, monkeypatch):
    shutil.copytree(clip_folder, tmp_path / "here" / "myclip")
    monkeypatch.chdir(tmp_path / "here")
    backbone = perlclip.load_backbone("./myclip", device="cpu")
    save(backbone, Path("adapter"), 3)
    monkeypatch.chdir("/")
    at = tmp_path / "here"
    assert perlclip.load_adapter(at / "adapter", device="cpu").method.backbone.name == str(at / "myclip")
    moved = at.rename(tmp_path / "there")
    assert perlclip.load_adapter(moved / "adapter", device="cpu").method.backbone.name == str(moved / "myclip")
    change(moved / "adapter", base_model_name_or_path="./myclip")  # as 0.1.0 has stored it
    perlclip.load_adapter(moved / "adapter", device="cpu")
    (moved / "myclip").rename(moved / "other")
    with pytest.raises(PerlclipError, match=rf"fingerprint {backbone.fingerprint[:12]}: say where it is with --backb"):
        perlclip.load_adapter(moved / "adapter", device="cpu")
    perlclip.load_adapter(moved / "adapter", backbone=str(moved / "other"), device="cpu")


def test_loading_in_threads_leaves_the_log_level_of_transformers():
    """Two that overlap: the second one found the first one's silence, and put that back."""
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.WARNING)
    try:
        first, second = (load._quiet_transformers() for _ in range(2))
        first.__enter__()
        second.__enter__()
        assert hf_logging.get_verbosity() == logging.CRITICAL
        first.__exit__(None, None, None)
        assert hf_logging.get_verbosity() == logging.CRITICAL
        second.__exit__(None, None, None)
        assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == (logging.WARNING, before[1])
    finally:
        hf_logging.set_verbosity(before[0])


# ---- pickles ----


def test_a_classifier_goes_through_a_pickle(folder, backbone, tree):
    classifier = perlclip.Classifier.from_pretrained(folder, class_names=["sky", "blue"], backbone=backbone)
    images = sorted(tree.rglob("*.png"))[:3]
    wanted = classifier.predict(images, top_k=2)
    content = pickle.dumps(classifier)
    assert len(content) < 20_000, "without the backbone's weights"
    assert pickle.loads(content).predict(images, top_k=2) == wanted
    again = pickle.loads(pickle.dumps([classifier, perlclip.load_adapter(folder, backbone=backbone)]))
    assert again[0].method.backbone is again[1].method.backbone
    with pytest.raises(PerlclipError, match="was not loaded by its name, and cannot be pickled"):
        pickle.dumps(vit_b16_shape())


@pytest.mark.parametrize("name", ["perl", "kgcoop", "mmrl"])
def test_what_fit_gave_goes_through_a_pickle(name, backbone, tree):
    data = perlclip.load_images(tree)
    method = perlclip.create_method(name, backbone)
    fitted = perlclip.fit(method, data.select([0, 9, 17]), recipe=perlclip.Recipe(), head=False, progress=False)
    again = pickle.loads(pickle.dumps(fitted))
    assert again.losses == fitted.losses and again.state.classes == fitted.state.classes
    wanted, got = (perlclip.Classifier(one).predict(data.images[:3]) for one in (fitted, again))
    assert got == wanted
