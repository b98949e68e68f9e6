"""One grammar of data sources: what a text stands for, by kind, part and split; and what an adapter is tested on."""

import os

import pytest

import perlclip
from perlclip import PerlclipError
from perlclip.data import (
    PARTS,
    few_shot_split,
    has_split,
    images_to_test,
    load_dataset,
    load_images,
    load_toybox,
    train_and_val,
)
from perlclip.text.classes import Classes
from tests.conftest import COLOURS, draw_tree
from tests.data.test_catalog import minis  # noqa: F401 (a fixture)

TOYS = "toybox:blurred_shapes"


@pytest.fixture(scope="session")
def toys():
    return load_toybox("blurred_shapes")


@pytest.fixture(scope="session")
def split_tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources") / "split"
    draw_tree(root / "train", images=6)
    draw_tree(root / "val", images=2)
    draw_tree(root / "test", {name: COLOURS[name] for name in ("red", "blue")}, images=3)
    return root


@pytest.fixture(scope="session")
def manifest(split_tree):
    """The same images, by a list."""
    rows = [
        f"{os.path.relpath(path, split_tree.parent)},{path.parent.name},{path.parent.parent.name}"
        for path in sorted(split_tree.rglob("*.png"))
    ]
    file = split_tree.parent / "list.csv"
    file.write_text("\n".join(["path,label,split", *rows]))
    return file


def same(a, b):
    return a.fingerprint() == b.fingerprint()


@pytest.mark.parametrize("part", ["", *PARTS])
@pytest.mark.parametrize("split", [None, "train", "val", "test"])
def test_every_kind_by_part_and_split(part, split, toys, split_tree, manifest, minis):  # noqa: F811
    behind = f"/{part}" if part else ""
    of = PARTS[part or "all"]
    if split != "val":  # to draw them takes its time
        assert same(load_images(TOYS + behind, split=split), of(getattr(toys, split or "train")))
    eurosat = load_dataset("eurosat", minis)
    assert same(load_images(f"coop:eurosat{behind}", split=split, data=minis), of(getattr(eurosat, split or "train")))
    folder = load_images(f"{split_tree}{behind}", split=split)
    # The classes are train's, also where a split has no image of some of them.
    names = {"base": ("blue", "green grass"), "novel": ("red",)}.get(part, ("blue", "green grass", "red"))
    assert folder.class_names == names and folder.template == "a photo of a {}."
    assert {path.parent.parent.name for path in folder.images} == {split or "train"}
    assert {path.parent.name.replace("_", " ") for path in folder.images} <= set(names)
    assert same(load_images(f"{manifest}{behind}", split=split), folder)


def test_a_path_that_exists_is_a_path(tmp_path, tree):
    draw_tree(tmp_path / "pets" / "novel", {"young": (9, 9, 9), "old": (200, 9, 9)}, images=1)
    assert load_images(tmp_path / "pets" / "novel").class_names == ("old", "young")
    assert load_images(tmp_path / "pets" / "novel" / "novel").class_names == ("young",)
    assert load_images(f"{tree}/").class_names == ("blue", "green grass", "red")
    assert perlclip.load_images is perlclip.data.load_images is load_images


def test_templates_are_the_sets_unless_one_is_given(tree, minis):  # noqa: F811
    assert load_images("coop:eurosat", data=minis).template == "a centered satellite photo of {}."
    assert load_images("coop:eurosat", data=minis, template="{} from above.").template == "{} from above."
    assert load_images("toybox:closeup_textures").template == "a photo of a {} pattern."
    assert load_images(tree, template="{}!").prompts[0] == "blue!"


def test_given_class_names_come_before_the_part(split_tree):
    renamed = load_images(f"{split_tree}/novel", split="test", class_names=["sea", "lawn", "fire"])
    assert renamed.class_names == ("fire",) and len(renamed) == 3
    assert load_images(f"{split_tree}/base", class_names={"Blue": "sea"}).class_names == ("sea", "green grass")


@pytest.mark.parametrize(
    ("source", "more", "words"),
    [
        ("toybox:tiny_toy", {}, "unknown data set of suite 'toybox': 'tiny_toy'; did you mean 'tiny_toys'?"),
        ("toybox:tiny_toys/nvel", {}, "unknown part of a data set 'nvel'; did you mean 'novel'?"),
        ("toybx:tiny_toys", {}, "unknown suite 'toybx'; did you mean 'toybox'?"),
        ("coop:eurosat", {}, "name it with --data ROOT"),
        ("coop:eurosta", {}, "did you mean 'eurosat'?"),
        ("coop:eurosat", {"data": "/nowhere"}, "no data folder /nowhere"),
        ("eurosat/base", {}, "no such file or folder: eurosat/base; did you mean 'coop:eurosat/base'?"),
        ("/nowhere/pets/base", {}, "no such file or folder: /nowhere/pets/base"),
        (TOYS, {"split": "tests"}, "unknown split 'tests'; did you mean 'test'?"),
        (TOYS, {"class_names": ["a"]}, "blurred_shapes has class names of its own; others are for a folder"),
        ("/nowhere/garden.toml:plants", {}, "cannot read suite /nowhere/garden.toml: No such file"),
    ],
)
def test_errors_are_sentences(source, more, words):
    with pytest.raises(PerlclipError) as caught:
        load_images(source, **more)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_split_that_is_not_there(minis, tree):  # noqa: F811
    with pytest.raises(PerlclipError, match="coop:imagenet_v2 has no split 'train'; it has test"):
        load_images("coop:imagenet_v2", data=minis)
    with pytest.raises(PerlclipError, match="is not split into train, val and test, so it has no split"):
        load_images(tree, split="val")


def test_which_splits_there_are(tree, split_tree, manifest, minis):  # noqa: F811
    assert [has_split(source, "val") for source in (tree, split_tree, manifest, f"{manifest}/base", TOYS)] == [
        False, True, True, True, True,
    ]  # fmt: skip
    assert has_split("coop:imagenet_a", "test", data=minis) and not has_split("coop:imagenet_a", "train", data=minis)


# ---- what is trained on, what is held out ----


def test_a_sets_shots_are_coops_and_a_part_is_taken_of_them(minis, toys):  # noqa: F811
    data = load_dataset("dtd", minis)
    for got, want in zip(
        train_and_val("coop:dtd", shots=2, seed=3, data=minis), few_shot_split(data, 2, 3), strict=True
    ):
        assert same(got, want)
    drawn = few_shot_split(toys, 2, 1)
    for got, want in zip(train_and_val(f"{TOYS}/novel", shots=2), drawn, strict=True):
        assert same(got, want.novel())
    train, val = train_and_val(f"{TOYS}/base")
    assert same(train, toys.train.base()) and same(val, toys.val.base())


def test_imagenets_test_images_are_never_held_out(minis):  # noqa: F811
    test = {str(path) for path in load_dataset("imagenet", minis).test.images}
    for shots in (None, 2):
        train, val = train_and_val("coop:imagenet", shots=shots, data=minis)
        assert len(train) and not test & {str(path) for path in (*train.images, *val.images)}
    with pytest.raises(PerlclipError, match="has no split 'train'"):
        train_and_val("coop:imagenet_r", shots=1, data=minis)


def test_own_data_holds_out_its_val_split_or_some_of_its_images(tree, split_tree):
    train, val = train_and_val(split_tree, shots=2, class_names={"green_grass": "lawn"}, template="{}.")
    assert (len(train), len(val)) == (6, 6) and train.class_names == val.class_names == ("blue", "lawn", "red")
    assert {path.parent.parent.name for path in val.images} == {"val"} and train.template == val.template == "{}."
    train, val = train_and_val(f"{tree}/base", shots=4, val=2)
    assert (len(train), len(val)) == (8, 4) and not set(train.images) & set(val.images)
    whole = train_and_val(tree, shots=4, val=2)
    assert same(train, whole[0].base()) and same(val, whole[1].base())


# ---- what an adapter is tested on ----


def test_the_test_split_else_val_else_everything(tree, split_tree, toys, tmp_path):
    colours = Classes(("red", "green_grass", "blue"), "a {}.")
    images = images_to_test(split_tree, colours)
    assert {path.parent.parent.name for path in images.images} == {"test"}
    assert images.class_names == colours.names and images.template == "a {}."
    assert [images.class_names[label] for label in images.labels] == [path.parent.name for path in images.images]
    draw_tree(tmp_path / "two" / "train", images=2)
    draw_tree(tmp_path / "two" / "val", images=1)
    assert len(images_to_test(tmp_path / "two", colours)) == 3
    assert len(images_to_test(tmp_path / "two", colours, split="train")) == 6
    assert len(images_to_test(tree, colours)) == 24
    assert len(images_to_test(TOYS, Classes(toys.class_names))) == len(toys.test)


def test_sets_of_a_suite_are_cut_to_the_adapters_classes(toys):
    base = toys.test.base()
    trained = Classes(tuple(name.upper().replace(" ", "_") for name in base.class_names[::-1]))
    images = images_to_test(TOYS, trained)
    assert images.class_names == trained.names and len(images) == len(base) and images.template == toys.template
    assert [images.class_names[i].casefold() for i in images.labels] == [base.class_names[i] for i in base.labels]
    assert same(images_to_test(f"{TOYS}/novel", trained), toys.test.novel())
    assert same(images_to_test(f"{TOYS}/all", trained), toys.test)
    assert same(images_to_test(TOYS, Classes(("cat",))), toys.test)
    assert len(images_to_test(TOYS, trained, split="val")) == len(toys.val.base())


def test_two_classes_of_one_name_keep_their_labels(minis):  # noqa: F811
    data = load_dataset("imagenet", minis)
    assert data.class_names.count("missile") == 2
    images = images_to_test("coop:imagenet", Classes(data.class_names), data=minis)
    assert images.labels == data.test.labels and images.class_names == data.class_names
    own = images_to_test("coop:imagenet_a", Classes(data.class_names), data=minis)
    assert same(own, load_dataset("imagenet_a", minis).test), "which of the two it is, a name does not say"


def test_a_folder_with_an_unknown_class_is_refused(tree):
    with pytest.raises(PerlclipError, match="unknown class 'green grass'; did you mean 'green glass'"):
        images_to_test(tree, Classes(("red", "green glass", "blue")))
    assert images_to_test(f"{tree}/novel", Classes(("cat",))).class_names == ("red",)
    named = images_to_test(tree, Classes(("cat",)), class_names=["a", "b", "c"])
    assert named.class_names == ("a", "b", "c")
