"""Own data: trees, manifests, sampling, halves, images."""

import io
import os
import random
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil

import perlclip
from perlclip import ImageSet, PerlclipError
from perlclip.backbone.preprocess import Preprocess, random_box
from perlclip.data import for_classes, load_images, read_class_names, train_val
from perlclip.data.images import read_image
from perlclip.data.loading import epoch_order, random_views
from tests.conftest import COLOURS, draw_tree


def numbered(count_by_class: dict[str, int]) -> ImageSet:
    """A set whose images are named `label/index`, nothing on disk."""
    items = [(f"{label}/{i}", label) for label, (_, n) in enumerate(count_by_class.items()) for i in range(n)]
    return ImageSet(
        images=[i for i, _ in items], labels=[label for _, label in items], class_names=tuple(count_by_class)
    )


def test_a_tree_becomes_names_labels_and_sorted_files(tree):
    data = load_images(tree)
    assert data.class_names == ("blue", "green grass", "red")
    assert [path.name for path in data.images[:3]] == ["0.png", "1.png", "2.png"]
    assert data.labels == [0] * 8 + [1] * 8 + [2] * 8
    assert data.prompts[1] == "a photo of a green grass."


def test_manifest_equals_tree(tree, tmp_path):
    rows = [f"{os.path.relpath(path, tmp_path)},{path.parent.name}" for path in load_images(tree).images]
    (tmp_path / "list.csv").write_text("\n".join(["path,label", *rows]))
    data, want = load_images(tmp_path / "list.csv"), load_images(tree)
    assert (data.labels, data.class_names) == (want.labels, want.class_names)
    assert data.fingerprint() == want.fingerprint(), "the fingerprint is of the data, not of where it lies"


def test_splits_made_beforehand(tree, tmp_path):
    for split, images in (("train", 3), ("test", 2)):
        draw_tree(tmp_path / "split" / split, images=images)
    assert len(load_images(tmp_path / "split")) == 9
    assert len(load_images(tmp_path / "split", split="test")) == 6
    with pytest.raises(PerlclipError, match="has no split 'val'; it has test, train"):
        load_images(tmp_path / "split", split="val")
    with pytest.raises(PerlclipError, match="not split into train, val and test"):
        load_images(tree, split="test")
    rows = [
        f"{path},{path.parent.name},{'test' if i % 4 else 'train'}" for i, path in enumerate(load_images(tree).images)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    assert len(load_images(tmp_path / "list.csv", split="test")) == 18


def test_class_names_rename(tree, tmp_path, write_json):
    names = tmp_path / "names.txt"
    names.write_text("\ufeffnavy blue\n\nlawn\ncrimson\n")  # some editors begin a file with a byte-order mark
    assert load_images(tree, class_names=read_class_names(names)).class_names == ("navy blue", "lawn", "crimson")
    mapping = read_class_names(write_json(tmp_path / "names.json", {"green_grass": "lawn"}))
    assert load_images(tree, class_names=mapping).class_names == ("blue", "lawn", "red")
    for given, words in ((["a"], "1 class names given for 3 classes"), ({"x": "y"}, "'x', which is not among")):
        with pytest.raises(PerlclipError, match=words):
            load_images(tree, class_names=given)


def test_sampling_is_coops_to_the_file():
    """CoOp seeds Python's generator, samples train class by class, then val with min(shots, 4) from the same stream."""
    train, val = numbered({"a": 30, "b": 5, "c": 20}), numbered({"a": 6, "b": 3, "c": 9})
    random.seed(2)
    want_train = [
        f"{c}/{i}" for c, n in enumerate((30, 5, 20)) for i in (random.sample(range(n), 16) if n >= 16 else range(n))
    ]
    want_val = [
        f"{c}/{i}" for c, n in enumerate((6, 3, 9)) for i in (random.sample(range(n), 4) if n >= 4 else range(n))
    ]
    rng = random.Random(2)
    assert train.few_shot(16, rng).images == want_train
    assert val.few_shot(4, rng).images == want_val


def test_train_and_val_never_share_an_image():
    pool = numbered({"a": 20, "b": 10})
    for shots in (None, 4):
        train, val = train_val(pool, shots=shots, seed=3)
        assert not set(train.images) & set(val.images)
        assert {train.labels.count(c) for c in (0, 1)} == ({4} if shots else {16, 8})
        assert [val.labels.count(c) for c in (0, 1)] == ([4, 4] if shots else [4, 2])
    assert train_val(pool, shots=4, seed=3)[0].images == train.images
    assert train_val(pool, shots=4, seed=4)[0].images != train.images


def test_halves_are_the_first_classes_rounded_up():
    pool = numbered({"a": 2, "b": 2, "c": 2, "d": 2, "e": 2})
    base, novel = pool.base(), pool.novel()
    assert (base.class_names, novel.class_names) == (("a", "b", "c"), ("d", "e"))
    assert base.labels == [0, 0, 1, 1, 2, 2] and novel.labels == [0, 0, 1, 1]
    assert novel.images == ["3/0", "3/1", "4/0", "4/1"]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_labels_may_be_numbers_of_any_kind(kind):
    """Classes can be picked, and the images of one counted, on average where nobody says how many were drawn."""
    pool = numbered({"a": 2, "b": 5, "c": 2})
    pool = replace(pool, labels=kind(pool.labels))
    some = pool.of_classes([2, 0])
    assert (some.class_names, some.labels, len(pool.novel())) == (("c", "a"), [1, 1, 0, 0], 2)
    assert (pool.shots_each, some.shots_each, replace(pool, shots=16).shots_each) == (3, 2, 16)


def test_labels_follow_the_adapters_order():
    data = numbered({"red": 1, "green grass": 1})
    assert for_classes(data, ["green_grass", "blue", "red"]).labels == [2, 0]
    with pytest.raises(PerlclipError, match="unknown class 'red'; did you mean 'reed'"):
        for_classes(data, ["reed", "green grass"])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), "no class names"),
        (("red fox", "red_fox"), "duplicate class name 'red fox'"),
        (("a", " "), "is empty"),
        (("caf\udce9",), "is not a printable text"),
    ],
)
def test_bad_class_names(names, words):
    with pytest.raises(PerlclipError, match=words):
        ImageSet(images=[], labels=[], class_names=names)


@pytest.mark.parametrize("template", ["a photo", "{} and {}", "{name}", "{0}", "{!r}", "{"])
def test_bad_templates(template):
    with pytest.raises(PerlclipError, match="must contain one"):
        ImageSet(images=[], labels=[], class_names=("a",), template=template)


# ---- images ----


@pytest.mark.parametrize("size", [(224, 224), (300, 225), (64, 64), (231, 500), (37, 190)])
def test_test_view_equals_transformers(size):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
    want = torch.as_tensor(np.array(processor(image)["pixel_values"][0]))
    assert torch.equal(Preprocess.of(processor, 224).test_view(image), want)


def test_random_boxes_keep_their_promises():
    rng = random.Random(0)
    boxes = [random_box((300, 200), rng, (0.08, 1.0)) for _ in range(2000)]
    areas = [(x1 - x0) * (y1 - y0) / 60000 for x0, y0, x1, y1 in boxes]
    ratios = [(x1 - x0) / (y1 - y0) for x0, y0, x1, y1 in boxes]
    assert all(0 <= x0 < x1 <= 300 and 0 <= y0 < y1 <= 200 for x0, y0, x1, y1 in boxes)
    assert 0.075 < min(areas) < 0.12 and 0.85 < max(areas) <= 1
    assert 0.7 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.4
    assert random_box((1000, 10), rng, (0.9, 1.0)) == (493, 0, 506, 10)


def test_orientation_modes_and_depth(tmp_path):
    wide = Image.fromarray(np.zeros((20, 40, 3), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    wide.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (20, 40)
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "deep.png")
    assert read_image(tmp_path / "deep.png").getpixel((0, 0)) == (155, 155, 155)
    for mode in ("L", "RGBA", "P", "CMYK", "1"):
        Image.new(mode, (8, 8)).save(tmp_path / f"{mode}.tiff")
        assert read_image(tmp_path / f"{mode}.tiff").mode == "RGB"
    assert read_image(np.zeros((4, 6, 3), np.uint8)).size == (6, 4)
    with pytest.raises(PerlclipError, match="must be uint8"):
        read_image(np.zeros((4, 6, 3), np.float32))


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def jpeg(size: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((size, size), 60).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


BAD_IMAGES = {
    "empty.jpg": (b"", "is empty"),
    "bomb.png": (png_header(60000, 60000), "has more than the 150 million pixels"),
    "postscript.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is not an image in one of the formats"),
    "text.png": (b"hello", "is not an image"),
    "cut.jpg": (jpeg()[:900], "is damaged"),
    "thin.png": (png_header(30000, 1), "is 30000x1, longer than 100 times its other side"),
    "header.jpg": (jpeg()[:30], "is not an image|is damaged|cannot read"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images_are_named(tmp_path, name):
    content, words = BAD_IMAGES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PerlclipError, match=words) as caught:
        read_image(tmp_path / name)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_image_is_named(tmp_path):
    with pytest.raises(PerlclipError, match=r"cannot read image .*gone.jpg: No such file"):
        read_image(tmp_path / "gone.jpg")


# ---- batches ----


def test_views_do_not_depend_on_workers(tree, backbone):
    data, order = load_images(tree), [(2, [0, 5, 9]), (2, [20, 1]), (3, [0, 5, 9])]
    views = (data, backbone.preprocess, (0.08, 1.0), order, backbone.device)
    runs = [list(random_views(*views, seed=1, workers=workers)) for workers in (0, 2)]
    for (a, la), (b, lb) in zip(*runs, strict=True):
        assert torch.equal(a, b) and torch.equal(la, lb)
    assert not torch.equal(runs[0][2][0], runs[0][0][0]), "another epoch, another view"


def test_a_workers_error_is_one_sentence(tree, backbone, tmp_path):
    (tmp_path / "cut.jpg").write_bytes(jpeg()[:900])
    data = ImageSet(images=[tmp_path / "cut.jpg"], labels=[0], class_names=("a",))
    with pytest.raises(PerlclipError, match=r"^image .*cut.jpg is damaged") as caught:
        list(random_views(data, backbone.preprocess, (0.08, 1.0), [(0, [0])], backbone.device, seed=1, workers=1))
    assert "\n" not in str(caught.value)


def test_an_epoch_is_a_permutation():
    batches = epoch_order(10, 4, False, seed=1, epoch=0)
    assert sorted(i for batch in batches for i in batch) == list(range(10)) and [len(b) for b in batches] == [4, 4, 2]
    assert [len(b) for b in epoch_order(10, 4, True, seed=1, epoch=0)] == [4, 4]
    assert [len(b) for b in epoch_order(3, 4, True, seed=1, epoch=0)] == [3]
    assert epoch_order(10, 4, False, seed=1, epoch=1) != batches != epoch_order(10, 4, False, seed=2, epoch=0)


def test_colours_are_the_classes(tree):
    """The tree that other tests train on is what it says."""
    means = {path.parent.name: np.asarray(read_image(path)).mean((0, 1)) for path in load_images(tree).images}
    assert all(np.abs(means[name] - colour).max() < 12 for name, colour in COLOURS.items())
    assert perlclip.load_images is load_images
