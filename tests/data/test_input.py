"""What users have on disk and in memory: folders of every spelling, archives, lists, tables, odd images."""

import bz2
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import perlclip
from perlclip import ImageSet, PerlclipError
from perlclip.data import archives, load_images, read_image, readable, survey, try_image
from perlclip.data.images import MAX_ASPECT, images_under, is_image_name
from tests.conftest import COLOURS, draw_tree

NAMES = ("blue", "green grass", "red")


def png(colour=(9, 9, 9), size=(8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def write(root: Path, *names: str, content: bytes | None = None) -> Path:
    """Files with different contents, folders as needed."""
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png((i % 256, len(name), 7)) if content is None else content)
    return root


# ---- splits ----


@pytest.mark.parametrize(
    "folders",
    [("train", "validation"), ("train", "valid", "test"), ("Train", "Test"), ("TRAINING", "dev", "Testing")],
)
def test_splits_in_the_usual_spellings(tmp_path, folders):
    """They were classes, and the test images were trained on."""
    write(tmp_path, *(f"{folder}/{name}/{i}.png" for folder in folders for name in ("cat", "dog") for i in range(2)))
    data = load_images(tmp_path)
    assert data.class_names == ("cat", "dog")
    assert {path.relative_to(tmp_path).parts[0] for path in data.images} == {folders[0]}
    assert perlclip.data.has_split(tmp_path, "val") == (len(folders) > 2 or folders[1] == "validation")
    assert len(load_images(tmp_path, split="validation" if "Test" not in folders else "TEST")) == 4


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (("train/a/0.png", "val/a/0.png", "validation/a/0.png"), "two folders for the split 'val', 'val' and 'validat"),
        (("train/a/0.png", "extra/a/0.png"), "'train', a split with folders in it, beside 'extra'"),
        (("train_images/a/0.png", "test2017/a/0.png"), "look like splits"),
        (("cat/train/0.png", "cat/test/1.png", "dog/train/0.png"), r"hold the splits \(cat/t"),
        (("red_fox/0.png", "Red fox/0.png"), "'Red fox' and 'red_fox' are one class name, 'red fox'"),
    ],
)
def test_what_could_be_either_is_refused(tmp_path, files, words):
    with pytest.raises(PerlclipError, match=words) as caught:
        load_images(write(tmp_path, *files))
    assert str(tmp_path) in str(caught.value)


def test_a_class_may_be_called_train(tmp_path):
    write(tmp_path, "bus/0.png", "car/0.png", "train/0.png", "train/old/1.png")
    assert load_images(tmp_path).class_names == ("bus", "car", "train")
    write(tmp_path / "more", "express train/0.png", "freight train/0.png")
    assert load_images(tmp_path / "more").class_names == ("express train", "freight train")


def test_hidden_files_and_those_of_systems_are_left_out(tmp_path):
    """Checkpoints of notebooks in a class were a leak between train and val; __MACOSX stopped `fit`."""
    write(tmp_path, "cat/0.png", "dog/0.png", "cat/.ipynb_checkpoints/0.png", "cat/._0.png", "dog/@eaDir/0.png")
    write(tmp_path, "__MACOSX/cat/._0.png", ".git/x/0.png", "cat/Thumbs.db", ".DS_Store", content=b"x")
    assert [str(p.relative_to(tmp_path)) for p in load_images(tmp_path).images] == ["cat/0.png", "dog/0.png"]
    assert len(images_under(tmp_path)) == 2
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    (tmp_path / "dog" / "zero.png").symlink_to("/dev/zero")
    assert len(load_images(tmp_path)) == 2


# ---- archives ----


def packed(tree: Path, kind: str, inside: str = "") -> Path:
    file = tree.parent / f"packed-{kind}{inside.strip('/')}"
    names = [path for path in sorted(tree.rglob("*")) if path.is_file()]
    if kind.startswith("zip"):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if kind == "zip" else zipfile.ZIP_STORED) as archive:
            for path in names:
                archive.write(path, inside + str(path.relative_to(tree)))
    else:
        with tarfile.open(file, f"w:{kind}") as archive:
            archive.add(tree, inside.rstrip("/") or ".")
    return file


@pytest.mark.parametrize("kind", ["zip", "zip-stored", "", "gz", "bz2", "xz"])
@pytest.mark.parametrize("inside", ["", "pets/"])
def test_an_archive_is_what_is_in_it(tree, tmp_path, kind, inside):
    """By its contents, whatever it is called; nothing is unpacked."""
    shutil.copytree(tree, tmp_path / "tree")
    write(tmp_path / "tree", "__MACOSX/red/._0.png", content=b"x")
    file = packed(tmp_path / "tree", kind, inside)
    before = sorted(tmp_path.rglob("*"))
    data, want = load_images(file), load_images(tree)
    assert (data.class_names, data.labels, data.fingerprint()) == (want.class_names, want.labels, want.fingerprint())
    assert np.array_equal(read_image(data.images[3]), read_image(want.images[3]))
    assert str(data.images[0]).endswith("blue/0.png") and str(data.images[0]).startswith(str(file))
    assert pickle.loads(pickle.dumps(data)).fingerprint() == data.fingerprint(), "as workers get it"
    assert load_images(f"{file}/novel").class_names == ("red",) and sorted(tmp_path.rglob("*")) == before


def test_archives_are_bounded_and_lead_nowhere(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "out.zip", "w") as archive:
        for name in ("../evil/0.png", "/cat/0.png", "dog\\1.png", "dog/..\\../2.png"):
            archive.writestr(name, png())
    assert load_images(tmp_path / "out.zip").class_names == ("cat", "dog") and not (tmp_path.parent / "evil").exists()
    with tarfile.open(tmp_path / "links.tar", "w") as archive:
        for i, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)):
            info = tarfile.TarInfo(f"cat/{i}.png")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("dog/0.png")
        info.size = len(png())
        archive.addfile(info, io.BytesIO(png()))
    assert load_images(tmp_path / "links.tar").class_names == ("dog",)
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w") as archive:
        info = tarfile.TarInfo("cat/0.png")
        info.size = 2**22
        archive.addfile(info, io.BytesIO(bytes(2**22)))
    (tmp_path / "bomb.tar.bz2").write_bytes(bz2.compress(bomb.getvalue()))
    assert (tmp_path / "bomb.tar.bz2").stat().st_size < 1000
    monkeypatch.setattr(archives, "MAX_UNPACKED", 2**20)
    with pytest.raises(PerlclipError, match="MiB in it; unpack it"):
        load_images(tmp_path / "bomb.tar.bz2")


def test_a_damaged_archive_is_one_sentence(tree, tmp_path):
    file = packed(shutil.copytree(tree, tmp_path / "tree"), "zip")
    content = bytearray(file.read_bytes())
    (tmp_path / "cut.zip").write_bytes(content[:-30])
    with pytest.raises(PerlclipError, match="cannot read archive"):
        load_images(tmp_path / "cut.zip")
    Image.new("RGB", (8, 8)).save(tmp_path / "0.bmp")  # a format that would not notice
    with zipfile.ZipFile(tmp_path / "flipped.zip", "w") as archive:
        archive.write(tmp_path / "0.bmp", "cat/0.bmp")
    content = bytearray((tmp_path / "flipped.zip").read_bytes())
    content[150] ^= 255
    (tmp_path / "flipped.zip").write_bytes(content)
    assert "cat/0.bmp is damaged in its archive" in try_image(load_images(tmp_path / "flipped.zip").images[0]).reason
    with zipfile.ZipFile(tmp_path / "big.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/0.png", png())
    content = bytearray((tmp_path / "big.zip").read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 24 : at + 28] = struct.pack("<I", 2**31)  # what the directory says of its size
    (tmp_path / "big.zip").write_bytes(content)
    assert "MiB that are read" in try_image(load_images(tmp_path / "big.zip").images[0]).reason


# ---- lists ----


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("Path, Label\n{0},{1}\n", "utf-8"),
        ("path,label\n{0},{1}\n", "utf-16"),
        ("path\tlabel\tsplit\n{0}\t{1}\tTraining\n", "utf-16"),
        ("FILE_NAME;Class\n{0};{1}\n", "utf-8-sig"),
        ('{{"file_name": "{0}", "label": "{1}"}}\n', "utf-8"),
    ],
)
def test_lists_as_spreadsheets_write_them(tree, tmp_path, text, encoding):
    header, _, line = text.partition("\n") if text.startswith(("p", "P", "F")) else ("", "", text)
    rows = [(line or text).format(path, path.parent.name).strip() for path in load_images(tree).images]
    (tmp_path / "list.txt").write_bytes("\n".join(filter(None, [header, *rows])).encode(encoding))
    assert load_images(tmp_path / "list.txt").fingerprint() == load_images(tree).fingerprint()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\n1,2\n", "needs a header 'path,label' .* its header is 'a,b'"),
        (b"\xff\x00\xfe\x80", "neither a list in UTF-8"),
        ("path,label\n".encode("utf-16-le"), "zero bytes in it"),
        (b"", "needs a header"),
        (b'{"path": 1}\n', "line 1 needs the keys"),
        (b"{oops\n", "line 1 is not JSON"),
        (b"path,label,split\na.png,b,holdout\n", "line 2: split 'holdout' is not train, val or test"),
        (b"PK\3\4 no zip", "cannot read archive"),
        (b"PAR1 no table", "pip install 'perlclip.parquet.'|as parquet"),
    ],
)
def test_what_is_no_list_is_said_so(tmp_path, content, words):
    (tmp_path / "data.csv").write_bytes(content)
    with pytest.raises(PerlclipError, match=words) as caught:
        load_images(tmp_path / "data.csv")
    assert "\n" not in str(caught.value)


# ---- Hugging Face ----


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("split", [False, True])
def test_imagefolder_with_metadata(tmp_path, kind, split):
    for folder in ("train", "test") if split else ("",):
        rows = [(f"{i}.png", "cat" if i % 2 else "dog") for i in range(4)]
        write(tmp_path / folder, *(name for name, _ in rows), "other.png")
        lines = [json.dumps({"file_name": name, "label": label, "more": 1}) for name, label in rows]
        if kind == "csv":
            lines = ["file_name,more,label", *(f"{name},1,{label}" for name, label in rows)]
        (tmp_path / folder / f"metadata.{kind}").write_text("\n".join(lines))
    data = load_images(tmp_path)
    assert data.class_names == ("cat", "dog") and data.labels == [1, 0, 1, 0]
    assert perlclip.data.has_split(tmp_path, "test") == split
    assert "that metadata does not list" in str(survey(tmp_path, progress=False))
    (tmp_path / "train" / "1.png" if split else tmp_path / "1.png").unlink()
    with pytest.raises(PerlclipError, match=f"metadata.{kind} lists '1.png', which is not there"):
        load_images(tmp_path)


def test_metadata_without_labels_leaves_the_classes_to_the_folders(tmp_path):
    write(tmp_path, "cat/0.png", "dog/0.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\ncat/0.png,a caption\n")
    assert load_images(tmp_path).class_names == ("cat", "dog")


def test_parquet_with_images(tree, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    data = load_images(tree)
    cells = [{"bytes": path.read_bytes(), "path": path.name} for path in data.images]
    about = json.dumps({"info": {"features": {"label": {"_type": "ClassLabel", "names": list(NAMES)}}}})
    table = arrow.table({"image": cells, "label": list(data.labels)})
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train-00000-of-00001.parquet"
    parquet.write_table(table.replace_schema_metadata({"huggingface": about}), file)
    plain = arrow.table({"img": [cell["bytes"] for cell in cells[:9]], "Class": ["cat", "dog", "cat"] * 3})
    parquet.write_table(plain, tmp_path / "plain.parquet")
    assert load_images(file).fingerprint() == data.fingerprint()
    assert load_images(tmp_path / "plain.parquet").class_names == ("cat", "dog")
    (tmp_path / "plain.parquet").rename(tmp_path / "data" / "test.parquet")
    assert load_images(tmp_path).fingerprint() == data.fingerprint()
    assert len(load_images(tmp_path / "data", split="test")) == 9
    parquet.write_table(arrow.table({"label": ["a"]}), tmp_path / "none.parquet")
    with pytest.raises(PerlclipError, match="no column with image files"):
        load_images(tmp_path / "none.parquet")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(PerlclipError, match="as parquet"):
        load_images(file)


def test_a_data_set_of_hugging_face(tree, tmp_path):
    datasets = pytest.importorskip("datasets")
    data = load_images(tree)
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=list(NAMES))})
    whole = datasets.Dataset.from_dict(
        {"picture": list(map(str, data.images)), "kind": list(data.labels)}, features=features
    )
    assert load_images(whole).fingerprint() == data.fingerprint()
    both = datasets.DatasetDict({"train": whole.select(range(4, 24)), "validation": whole.select(range(4))})
    assert len(load_images(both)) == 20 and len(load_images(both, split="val")) == 4
    both.save_to_disk(str(tmp_path / "saved"))
    assert len(load_images(tmp_path / "saved", split="val")) == 4
    found = survey(both, progress=False)
    assert len(found.train) == 20 and found.own_val
    with pytest.raises(PerlclipError, match="no column 'label'"):
        load_images(whole.remove_columns("kind"))


# ---- images ----


def test_deep_greys_are_scaled_or_refused(tmp_path):
    """Float TIFFs became black, 32-bit integers white."""
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    grey = (ramp * 65535).astype(np.uint16)
    for name, values in {"float": ramp, "int": grey.astype(np.int32), "deep": grey}.items():
        Image.fromarray(values).save(tmp_path / f"{name}.tiff")
        got = np.asarray(read_image(tmp_path / f"{name}.tiff"), dtype=int)[..., 0]
        assert np.abs(got - ramp * 255).max() <= 1, name
    nan = ramp.copy()
    nan[0, 0] = np.nan
    for values in (ramp * 300, ramp - 0.5, nan, grey.astype(np.int32) * 9, np.full((8, 8), 200, np.int32)):
        Image.fromarray(values).save(tmp_path / "bad.tiff")
        with pytest.raises(PerlclipError, match=r"bad.tiff has .* which of them is white; save it with 8"):
            read_image(tmp_path / "bad.tiff")
        with pytest.raises(PerlclipError, match="which of them is white"):
            read_image(Image.fromarray(values))
    assert read_image(Image.fromarray(np.zeros((8, 8), np.int32))).getpixel((0, 0)) == (0, 0, 0)


def test_modes_frames_and_palettes(tmp_path):
    red = Image.new("RGB", (8, 8), (250, 0, 0))
    frames = [red, Image.new("RGB", (8, 8), (0, 0, 250))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "b.tiff", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "c.webp", save_all=True, append_images=frames[1:], lossless=True)
    red.convert("CMYK").save(tmp_path / "d.jpg", quality=95)
    red.convert("P").save(tmp_path / "e.png", transparency=bytes([0] * 255))
    if is_image_name("f.avif"):
        red.save(tmp_path / "f.avif", quality=95)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow's were on stderr
        for path in images_under(tmp_path):
            r, g, b = read_image(path).getpixel((4, 4))
            assert r > 230 and g < 25 and b < 25, path.name


def test_heic_is_read_where_its_extra_is_there_and_named_where_not(tmp_path):
    file = tmp_path / "cat" / "0.heic"
    write(tmp_path, "cat/0.heic", "dog/0.png", "dog/1.svg", "2.png", content=None)
    if is_image_name("0.heic"):
        Image.new("RGB", (64, 64), (250, 0, 0)).save(file, "HEIF")
        assert read_image(file).getpixel((9, 9))[0] > 230 and len(load_images(tmp_path)) == 2
    else:
        file.write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
        with pytest.raises(PerlclipError, match=r"cat holds no images that .* but 1 .heic; .*perlclip\[heic\]"):
            load_images(tmp_path)
        with pytest.raises(PerlclipError, match=r"not an image .* pip install 'perlclip\[heic\]'"):
            read_image(file)


def test_images_in_memory_have_the_same_limits():
    thin = (1, MAX_ASPECT + 1)
    closed = Image.new("RGB", (8, 8))
    closed.close()
    huge = np.broadcast_to(np.zeros(3, np.uint8), (20000, 8000, 3))
    text = io.StringIO("text")
    gone = io.BytesIO(png())
    gone.close()
    bad = {
        "longer than 100 times": (Image.new("RGB", thin), np.zeros((*thin, 3), np.uint8)),
        "more than the 150 million pixels": (huge,),
        "0x0 pixels": (Image.new("RGB", (0, 0)), np.zeros((0, 0, 3), np.uint8)),
        "closed": (closed, gone),
        "mode 'rb'": (text,),
        "of a tensor give its": (torch.zeros(3, 8, 8), torch.zeros(())),
        "not NoneType": (None,),
        "not int": (3,),
        "is empty": (b"", io.BytesIO()),
        "must be uint8": (np.zeros(4, np.uint8), np.zeros((4, 4), bool), np.zeros((1, 4, 4, 3), np.uint8)),
    }
    for words, images in bad.items():
        for image in images:
            with pytest.raises(PerlclipError, match=words):
                read_image(image)


def test_a_classifier_takes_what_can_be_read(backbone, tree, tmp_path):
    method = perlclip.create_method("zero-shot", backbone)
    classifier = perlclip.Classifier(method, (name for name in NAMES))
    assert classifier.class_names == NAMES
    path = load_images(tree).images[0]
    want = classifier.predict(path)
    for given in (path.read_bytes(), bytearray(path.read_bytes()), io.BytesIO(path.read_bytes()), path.open("rb")):
        assert classifier.predict(given) == want
    two = classifier.predict([io.BytesIO(path.read_bytes()), path], workers=1)
    assert two[0] == two[1] and two[0].label == want.label
    for bad in (None, 3, torch.zeros(3, 8, 8), [None], [torch.zeros(3, 8, 8)]):
        with pytest.raises(PerlclipError, match="an image is a path"):
            classifier.predict(bad)
    for names in ({"a", "b"}, 3, iter(())):
        with pytest.raises(PerlclipError, match="class names"):
            perlclip.Classifier(method, names)
    held = ImageSet(images=[path.open("rb"), png()], labels=[0, 1], class_names=iter(("a", "b")))
    assert held.class_names == ("a", "b") and held.fingerprint() == held.fingerprint()
    with pytest.raises(PerlclipError, match="1 images but 2 labels"):
        ImageSet(images=[path], labels=[0, 1], class_names=("a", "b"))


def test_random_bytes_are_images_or_one_sentence(tree):
    """Whatever a decoder raises: 300 mutated files of six formats."""
    rng = np.random.default_rng(0)
    picture = Image.open(load_images(tree).images[0])
    files = []
    for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF"):
        buffer = io.BytesIO()
        picture.save(buffer, kind)
        files.append(buffer.getvalue())
    for i in range(300):
        content = bytearray(files[i % len(files)])
        for at in rng.integers(0, min(len(content), 400), 6):
            content[at] = rng.integers(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = try_image(bytes(content[: rng.integers(1, len(content) + 1)] if i % 3 == 0 else content))
        assert isinstance(found, Image.Image) or "\n" not in found.reason


# ---- before training ----


def test_images_are_decoded_before_training(tree, tmp_path, backbone):
    """Only headers were looked at, and a truncated file ended the training in its middle."""
    shutil.copytree(tree, tmp_path / "tree")
    cut = tmp_path / "tree" / "red" / "3.png"
    cut.write_bytes(cut.read_bytes()[:2000])
    data = load_images(tmp_path / "tree")
    whole, skipped = readable(data, on_error="skip", progress=False)
    assert len(whole) == 23 and [each.image for each in skipped] == [str(cut)] and whole.readable
    assert cut not in {Path(str(image)) for image in whole.images}
    method = perlclip.create_method("coop", backbone)
    before = method.parameters().__next__().clone()
    with pytest.raises(PerlclipError, match=r"red/3.png is damaged"):
        perlclip.fit(method, data, recipe=perlclip.Recipe(batch_size=1), head=False, progress=False)
    assert torch.equal(before, next(method.parameters())), "nothing was trained"
    with pytest.raises(PerlclipError, match="unknown on_error 'skp'; did you mean 'skip'"):
        readable(data, on_error="skp")


def test_a_survey_says_what_was_found(tmp_path):
    draw_tree(tmp_path / "Train", images=4)
    draw_tree(tmp_path / "valid", {"red": COLOURS["red"]}, images=2)
    draw_tree(tmp_path / "test", {"blue": COLOURS["blue"]}, images=1)
    shutil.copy(tmp_path / "Train" / "blue" / "0.png", tmp_path / "test" / "blue" / "again.png")
    shutil.copy(tmp_path / "Train" / "blue" / "1.png", tmp_path / "Train" / "red" / "blue.png")
    write(tmp_path, "Train/green_grass/text.png", content=b"hello")
    write(tmp_path, "Train/stray.png", "Train/red/drawing.svg")
    with pytest.raises(PerlclipError, match=r"text.png is not an image"):
        survey(tmp_path, progress=False)
    found = survey(tmp_path, on_error="skip", progress=False)
    assert found.counts == {"blue": (4, 0), "green grass": (4, 0), "red": (5, 2)} and found.test == 2
    assert [Path(each.image).name for each in found.skipped] == ["text.png"]
    assert [Path(a).name + Path(b).name for a, b in found.contradictions] == ["1.pngblue.png"]
    assert found.duplicates["train and test"][0][1].endswith("again.png")
    said = str(found)
    assert said == repr(found) and "3 classes\n  train 13 (4 to 5 per class), val 2 (split beforehand" in said
    assert "left out: 1 image beside the class folders: Train/stray.png" in said and "1 .svg file" in said
    assert "warning: 1 image has two labels in train" in said and "in both train and test, so accuracy is over" in said


def test_a_survey_warns_of_what_cannot_work(tmp_path):
    write(tmp_path, "cat/0.png", "cat/1.png")
    said = str(survey(tmp_path, shots=2, progress=False))
    assert "one class only, 'cat'" in said and "no image is left to validate on" in said
    write(tmp_path, "dog/0.png", content=png()[:45])
    with pytest.raises(PerlclipError, match="no image of class 'dog' can be read"):
        survey(tmp_path, on_error="skip", progress=False)
    write(tmp_path, *(f"dog/{i}.png" for i in range(20)))
    assert "very different sizes, from 2 to" in str(survey(tmp_path, val=0, progress=False))
