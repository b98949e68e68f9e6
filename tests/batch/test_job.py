"""Jobs: the answers of `Classifier.predict`, no row lost or doubled after a kill, bad images and dead processes."""

import io
import os
import shutil
import signal
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import perlclip
from perlclip.batch.decoders import decoded
from perlclip.batch.job import predict_all
from perlclip.batch.shards import answers
from perlclip.batch.work import DECODE, Job
from perlclip.data import images as images_module
from perlclip.data.images import Packed, Unreadable, read_image
from perlclip.files import write_files
from tests.cli.test_cli import fails, run
from tests.cli.test_vocabulary import PAIRS
from tests.common import loud, random_pixels

pytest.importorskip("pyarrow")
from pyarrow import parquet

NAMES = ("blue", "green grass", "red")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, backbone) -> Path:
    method = loud(perlclip.create_method("perl", backbone, steps=2, depth=9, readout="rising"))
    folder = tmp_path_factory.mktemp("job") / "adapter"
    return perlclip.save_adapter(method, folder, class_names=NAMES, template="a photo of a {}.")


@pytest.fixture(scope="module")
def images(tree, tmp_path_factory) -> Path:
    """Twelve good images and one that is none."""
    folder = tmp_path_factory.mktemp("images") / "some"
    folder.mkdir()
    for n, path in enumerate(sorted(tree.rglob("*.png"))[::2]):
        shutil.copy(path, folder / f"{n:02}.png")
    (folder / "05b.jpg").write_text("no image")
    return folder


def job(adapter: Path, images: Path, out: Path, **more) -> Job:
    given = dict(sources=[str(images)], device="cpu", top_k=2, shard_size=5, batch_size=4, workers=0, progress=False)
    return Job(adapter=adapter, out=out, **given | more)


@pytest.fixture(scope="module")
def done(adapter, images, tmp_path_factory) -> list[dict]:
    """All rows, made without a stop."""
    out = tmp_path_factory.mktemp("done") / "out"
    found = predict_all(job(adapter, images, out))
    assert (found.images, found.errors, found.added) == (13, 1, 13)
    return list(answers(out))


def test_rows_are_what_the_classifier_says(adapter, images, done):
    paths = sorted(images.iterdir())
    assert [row["key"] for row in done] == [str(path) for path in paths]
    good = [row for row in done if row["error"] is None]
    (bad,) = [row for row in done if row["error"] is not None]
    assert bad["key"].endswith("05b.jpg") and "is not an image" in bad["error"] and bad["label"] is None
    assert len({row["probability"] for row in good}) == 12, "one answer for all would say nothing"
    classifier = perlclip.Classifier.from_pretrained(adapter, device="cpu")
    for row, answer in zip(good, classifier.predict([row["key"] for row in good], top_k=2), strict=True):
        assert (row["label"], row["steps"]) == (answer.label, 2)
        assert row["probability"] == pytest.approx(answer.probability, abs=1e-6)
        assert row["top_labels"] == [label for label, _ in answer.top]
        assert row["top_probabilities"] == pytest.approx([p for _, p in answer.top], abs=1e-6)


def test_a_device_that_is_given_the_next_batch_early_answers_the_same(adapter, backbone):
    classifier = perlclip.Classifier.from_pretrained(adapter, backbone=backbone)
    lost = {0: Unreadable("a", "b")}
    batches = [(random_pixels(backbone, n), lost if n < 3 else {}) for n in (3, 1, 2)] + [(torch.empty(0), lost)]
    found = [[*classifier.predict_batches(batches, embeddings=True, ahead=ahead)] for ahead in (False, True)]
    assert [each for each, _ in found[0]] == [each for each, _ in found[1]]
    assert [len(each) for each, _ in found[0]] == [3, 2, 3, 1] and found[0][1][0][0] is lost[0]
    assert [v is None for _, v in found[1]] == [False, False, False, True]


def test_crops_are_the_pixels_of_the_test_view_to_the_bit(any_backbone, tree):
    image = read_image(next(tree.rglob("*.png")))
    crop = torch.from_numpy(any_backbone.preprocess.crop(image))
    assert crop.dtype == torch.uint8
    torch.testing.assert_close(
        any_backbone.preprocess.pixels(crop[None])[0], any_backbone.preprocess.test_view(image), rtol=0, atol=0
    )


def same(found: list[dict], wanted: list[dict]) -> bool:
    """But for the last bits, which depend on what else is in a batch."""

    def rounded(row: dict) -> dict:
        numbers = {
            name: np.round(row[name], 5).tolist() for name in ("probability", "top_probabilities") if row["label"]
        }
        return row | numbers

    return [*map(rounded, found)] == [*map(rounded, wanted)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child that is killed is forked")
def test_a_job_killed_at_any_rename_goes_on_to_the_same_rows(adapter, images, done, tmp_path):
    """A file is there from its rename on: the first life dies before its first one, the second before its second …"""
    out, lives = tmp_path / "out", 0
    while True:
        lives += 1
        child = os.fork()
        if not child:
            _die_at_rename(lives)
            predict_all(job(adapter, images, out, embeddings=True))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL and lives < 20
    assert os.WEXITSTATUS(status) == 0 and lives >= 6
    assert predict_all(job(adapter, images, out, embeddings=True)).added == 0
    assert same(list(answers(out)), done)
    assert not [path for path in out.rglob(".*") if path.is_file()], "nothing that a killed writer left"
    v = [np.load(path) for path in sorted((out / "img_emb").iterdir())]
    assert [len(each) for each in v] == [5, 4, 3] and v[0].dtype == np.float16
    about = [row for path in sorted((out / "metadata").iterdir()) for row in parquet.read_table(path).to_pylist()]
    assert [row["image_path"] for row in about] == [row["key"] for row in done if row["error"] is None]
    for name in ("img_emb", "metadata"):  # as clip-retrieval has them
        assert [path.stem for path in sorted((out / name).iterdir())] == [f"{name}_{n:05}" for n in range(3)]
    backbone = perlclip.load_adapter(adapter, device="cpu").method.backbone
    with torch.no_grad():
        pixels = backbone.preprocess.test_view(read_image(done[-1]["key"]))[None]
        assert np.abs(v[2][-1] - backbone.encode_image(pixels)[0].numpy()).max() < 1e-3


def test_a_disk_that_fails_behind_the_work_is_said_and_nothing_is_written_after_it(
    adapter, images, done, tmp_path, monkeypatch
):
    """A thread writes: what goes wrong there ends the job, and the same command goes on where it did."""
    out, written = tmp_path / "out", []

    def full(contents):
        written.extend(path.name for path in contents)
        if "predictions_00001.parquet" in written:
            raise perlclip.PerlclipError("cannot write: no space")
        write_files(contents)

    with monkeypatch.context() as patch:
        patch.setattr("perlclip.batch.shards.write_files", full)
        with pytest.raises(perlclip.PerlclipError, match="no space"):
            predict_all(job(adapter, images, out))
    assert written == ["predictions_00000.parquet", "predictions_00001.parquet"]
    assert predict_all(job(adapter, images, out)).added == 8
    assert same(list(answers(out)), done)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child that is killed is forked")
def test_a_job_killed_inside_a_tar_goes_on_at_the_next_shard(adapter, images, done, tmp_path):
    """One piece, more images than a shard, as img2dataset's are: rows are counted by what is written of it."""
    with tarfile.open(tmp_path / "00000.tar", "w") as tar:
        for path in sorted(images.iterdir()):
            tar.add(path, path.name)
    out, ask = tmp_path / "out", dict(sources=[str(tmp_path / "00000.tar")])
    for life in (2, 1, 2):  # behind the plan; at once; behind one more shard
        child = os.fork()
        if not child:
            _die_at_rename(life)
            predict_all(job(adapter, images, out, **ask))
            os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert len(list(answers(out))) == 5
    found = predict_all(job(adapter, images, out, **ask))
    assert (found.images, found.errors, found.added) == (13, 1, 8)
    assert [path.stem for path in sorted((out / "predictions").iterdir())][1:] == [
        "predictions_00000_001", "predictions_00000_002",
    ]  # fmt: skip
    named = [{**row, "key": Path(row["key"]).stem, "error": row["error"] and "?"} for row in done]
    assert same([{**row, "error": row["error"] and "?"} for row in answers(out)], named)


def _die_at_rename(which: int) -> None:
    seen = []

    def watch(event: str, arguments: tuple) -> None:
        if event == "os.rename":
            seen.append(event)
            if len(seen) == which:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


class Killer(Packed):
    """An image whose decoder dies: always, or the first time."""

    def __init__(self, once: Path | None = None) -> None:
        self.once = once

    def __str__(self) -> str:
        return "killer"

    def read(self) -> bytes:
        if self.once is None or not self.once.exists():
            if self.once is not None:
                self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        buffer = io.BytesIO()
        Image.new("RGB", (40, 40), (9, 9, 9)).save(buffer, "png")
        return buffer.getvalue()


def test_processes_decode_in_order_and_outlive_an_image_that_kills_them(backbone, tree, tmp_path):
    paths = sorted(tree.rglob("*.png"))
    sources = [*paths[:9], Killer(), *paths[9:], tmp_path / "gone.png", Killer(tmp_path / "killed")]
    device = torch.device("cpu")
    feeds = [decoded(enumerate(sources), backbone.preprocess, 6, device, workers=workers) for workers in (2,)]
    found = [(batch.tags, batch.pixels.clone(), batch.lost) for feed in feeds for batch in feed]
    assert [tag for tags, _, _ in found for tag in tags] == list(range(27))
    lost = {tags[place]: why.reason for tags, _, some in found for place, why in some.items()}
    assert lost.keys() == {9, 25} and "died, twice" in lost[9] and "gone.png" in lost[25]
    assert (tmp_path / "killed").exists()
    whole = torch.cat([pixels for _, pixels, _ in found])
    want = [backbone.preprocess.test_view(read_image(path)) for path in paths]
    assert torch.equal(whole[:-1], torch.stack(want)) and len(whole) == 25


def test_the_processes_end_when_nobody_wants_more(backbone, tree):
    import multiprocessing

    before = set(multiprocessing.active_children())  # another test's, on its way out
    feed = decoded(enumerate(sorted(tree.rglob("*.png"))), backbone.preprocess, 2, torch.device("cpu"), workers=2)
    next(feed)
    own = set(multiprocessing.active_children()) - before
    assert len(own) >= 2
    feed.close()
    assert not own & set(multiprocessing.active_children())


def test_an_error_while_reading_reaches_who_waits(backbone, tree):
    def reading():
        yield 0, next(tree.rglob("*.png"))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(decoded(reading(), backbone.preprocess, 2, torch.device("cpu"), workers=1))


def test_a_folder_holds_one_job(adapter, images, done, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(perlclip.PerlclipError, match="is not an image"):
        predict_all(job(adapter, images, out, on_error="stop"))
    assert len(list(answers(out))) == 6, "all before it, though the second shard is not full"
    with pytest.raises(perlclip.PerlclipError, match="holds a job with top_k 2, not 3"):
        predict_all(job(adapter, images, out, top_k=3))
    other = tmp_path / "adapter"
    method = loud(perlclip.create_method("zero-shot", perlclip.load_adapter(adapter, device="cpu").method.backbone))
    perlclip.save_adapter(method, other, class_names=NAMES, template="a photo of a {}.")
    with pytest.raises(perlclip.PerlclipError, match="holds a job with another adapter"):
        predict_all(job(other, images, out))
    (images / "late.png").write_bytes((images / "00.png").read_bytes())
    try:
        assert predict_all(job(adapter, images, out, workers=1, batch_size=3)).added == 7, "as it was when it began"
    finally:
        (images / "late.png").unlink()
    assert same(list(answers(out)), done)
    with pytest.raises(perlclip.PerlclipError, match="is not empty and holds no job"):
        predict_all(job(adapter, images, images))


def test_large_jpegs_may_be_decoded_at_the_scale_that_is_needed(backbone, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (8, 10, 3), np.uint8)
    Image.fromarray(noise).resize((500, 400)).save(tmp_path / "large.jpg", quality=95)
    size = backbone.preprocess.size
    sides = {word: min(read_image(tmp_path / "large.jpg", least * size).size) for word, least in DECODE.items()}
    assert sides == {"exact": 400, "half": 100, "fast": 50} and size == 32
    crops = [backbone.preprocess.crop(read_image(tmp_path / "large.jpg", least)).astype(int) for least in (0, 32)]
    assert 0 < np.abs(crops[0] - crops[1]).mean() < 8


def test_the_quicker_decoder_gives_the_same_pixels(tmp_path, monkeypatch):
    """Of every kind of JPEG; what it cannot read is Pillow's to judge."""
    pytest.importorskip("simplejpeg")
    noise = np.random.default_rng(0).integers(0, 255, (9, 11, 3), np.uint8)
    picture = Image.fromarray(noise).resize((111, 87), Image.Resampling.BICUBIC)
    turned = Image.Exif()
    turned[0x112] = 6
    kinds = {name: (picture, {}) for name in ("plain", "fine", "steps", "turned", "grey", "print")}
    kinds["fine"], kinds["steps"] = (picture, dict(subsampling=0, quality=97)), (picture, dict(progressive=True))
    kinds["turned"], kinds["grey"] = (picture, dict(exif=turned)), (picture.convert("L"), {})
    kinds["print"] = (picture.convert("CMYK"), {})
    for name, (image, options) in kinds.items():
        image.save(tmp_path / f"{name}.jpg", **options)
    found = {name: np.asarray(read_image(tmp_path / f"{name}.jpg")) for name in kinds}
    assert images_module._turbo() is not None and found["turned"].shape == (111, 87, 3)
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "plain.jpg").read_bytes()[:-400])
    with pytest.raises(perlclip.PerlclipError, match="damaged"):
        read_image(tmp_path / "cut.jpg")
    monkeypatch.setattr(images_module, "_turbo", lambda: None)
    for name in kinds:
        assert np.array_equal(found[name], np.asarray(read_image(tmp_path / f"{name}.jpg")))


def test_the_command_writes_a_job_to_a_name_without_an_ending(adapter, images, done, tmp_path):
    ask = ("predict", adapter, images, "--device", "cpu", "--top-k", 2, "--workers", 0)
    assert "1 of 13 images cannot be read" in fails(*ask, "--out", tmp_path / "out", "--shard-size", 5)
    assert same(list(answers(tmp_path / "out")), done)
    (images / "05b.jpg").rename(images / ".hidden")
    result = run(*ask, "--out", tmp_path / "good", "--reject-rate", 0.1)
    (images / ".hidden").rename(images / "05b.jpg")
    assert result.exit_code == 0 and "12 images labelled, 12 of them now" in result.stdout
    assert "is for a job" in run(*ask, "--embeddings").output
    assert "must end in" in fails(*ask, "--out", tmp_path / "answers.txt")


def test_a_job_has_the_words_and_defaults_of_predict():
    import inspect

    python = inspect.signature(Job).parameters
    for _, function, names in PAIRS:
        if function.__qualname__ in ("Classifier.from_pretrained", "Classifier.predict"):
            theirs = inspect.signature(function).parameters
            for name in names - {"workers", "batch_size"}:  # which a job chooses by the machine
                assert python[name].default == theirs[name].default
