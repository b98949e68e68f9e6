"""Suites: roles by name, and a user's own folders as a suite."""

import pickle
from dataclasses import replace

import pytest

from perlclip import PerlclipError
from perlclip.data import SUITES, has_split, load_images, suite, train_and_val
from perlclip.data.coop.catalog import CATALOG
from perlclip.data.suites import by_role
from perlclip.data.toybox import TASKS
from tests.conftest import draw_tree

PLANTS = {"red_rose": (200, 30, 30), "fern": (30, 160, 40), "lily": (230, 230, 220)}
GARDEN = """
name = "garden"
backbone = "tiny"
[sets.plants]
data = "plants"
role = "source"
template = "a photo of a {}, a type of plant."
[sets.birds]
data = "birds"
class_names = "names.json"
[sets.dusk]
data = "dusk"
role = "variant"
"""


@pytest.fixture
def garden(tmp_path, write_json):
    """An unsplit source, a target that is split, and a variant of the source."""
    draw_tree(tmp_path / "plants", PLANTS, images=10)
    draw_tree(tmp_path / "dusk", {"Lily": (90, 90, 80), "red rose": (80, 9, 9)}, images=3)
    for split, count in (("train", 4), ("test", 2)):
        draw_tree(tmp_path / "birds" / split, {"owl": (120, 90, 60), "jay": (40, 60, 200)}, images=count)
    write_json(tmp_path / "names.json", {"jay": "blue jay"})
    file = tmp_path / "garden.toml"
    file.write_text(GARDEN)
    before = dict(SUITES)
    yield file
    SUITES.clear()
    SUITES.update(before)


@pytest.mark.parametrize(
    ("name", "rows", "size"), [("coop", CATALOG, (10, 4)), ("toybox", TASKS, (10, 4))], ids=["coop", "toybox"]
)
def test_the_place_of_a_row_says_nothing(name, rows, size):
    found = suite(name)
    assert (len(found.targets), len(found.variants)) == size and len(found.names) == 15
    for place in range(len(rows) + 1):
        more = [(row.name, row.role) for row in rows]
        more.insert(place, ("new_set", replace(rows[1], name="new_set").role))
        changed = by_role(name, more, found.load)
        assert (changed.source, changed.variants) == (found.source, found.variants)
        assert set(changed.targets) == {*found.targets, "new_set"}


def test_own_folders_make_a_suite(garden):
    found = suite(garden)
    assert suite("garden") is found and found.names == ("plants", "birds", "dusk") and found.backbone == "tiny"
    assert (found.source, found.targets, found.variants) == ("plants", ("birds",), ("dusk",))
    assert not (found.on_disk or found.drawn or found.published)
    plants = found.load("plants", None)
    assert [len(part) for part in (plants.train, plants.val, plants.test)] == [15, 6, 9]
    parts = [set(part.images) for part in (plants.train, plants.val, plants.test)]
    assert len(set.union(*parts)) == 30, "no image twice"
    assert plants.class_names == ("fern", "lily", "red rose") and plants.template.endswith("a type of plant.")
    assert plants.train.fingerprint() == suite(str(garden)).load("plants", None).train.fingerprint()
    birds = found.load("birds", None)
    assert birds.class_names == birds.test.class_names == ("blue jay", "owl")
    assert [len(part) for part in (birds.train, birds.val, birds.test)] == [8, 0, 4]
    dusk = found.load("dusk", None)
    assert dusk.test.class_names == plants.class_names and dusk.template == plants.template
    assert [len(part) for part in (dusk.train, dusk.val, dusk.test)] == [0, 0, 6]
    assert [plants.class_names[label] for label in dusk.test.labels] == ["lily"] * 3 + ["red rose"] * 3
    assert pickle.loads(pickle.dumps(found)).load("dusk", None).test.labels == dusk.test.labels, "for other processes"


def test_its_sets_are_sources_like_any_other(garden):
    novel = load_images(f"{garden}:plants/novel", split="test")
    assert novel.class_names == ("red rose",) and len(novel) == 3
    assert load_images("garden:birds").class_names == ("blue jay", "owl")
    assert has_split("garden:dusk", "test") and not has_split("garden:dusk", "train")
    train, val = train_and_val("garden:plants", shots=2)
    assert (len(train), len(val)) == (6, 6)
    with pytest.raises(PerlclipError, match="suite 'garden': 'plant'; did you mean 'plants'"):
        load_images("garden:plant")


@pytest.mark.parametrize(("images", "sizes"), [(2, (1, 0, 1)), (3, (2, 0, 1)), (4, (2, 1, 1)), (7, (4, 1, 2))])
def test_small_classes_have_something_to_train_and_to_test_on(garden, images, sizes):
    draw_tree(garden.parent / "few", {"a": (9, 9, 9), "b": (200, 9, 9)}, images=images)
    (garden.parent / "few.toml").write_text('name = "few"\n[sets.few]\ndata = "few"')
    found = suite(garden.parent / "few.toml")
    assert found.source == "" and found.names == found.targets == ("few",)
    data = found.load("few", None)
    assert tuple(len(part) for part in (data.train, data.val, data.test)) == tuple(2 * size for size in sizes)


def test_other_classes_change_no_split(garden):
    before = suite(garden).load("plants", None)
    draw_tree(garden.parent / "plants", {"aster": (90, 60, 160)}, images=5)
    after = suite(garden).load("plants", None)
    assert set(before.test.images) < set(after.test.images)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "garden"', "", "a line name = … is missing"),
        ('name = "garden"', 'name = "coop"', "a suite 'coop' is already built in; give this one another name"),
        ('name = "garden"', 'name = "my/garden"', "name 'my/garden' may have letters, digits, _ and - only"),
        ("[sets.birds]", '[sets."a:b"]', "name 'a:b' may have"),
        ("backbone", "backbon", "unknown key of suite .*garden.toml: 'backbon'; did you mean 'backbone'"),
        ("class_names", "class_nams", "garden.toml, set 'birds': 'class_nams'; did you mean 'class_names'"),
        ('data = "dusk"\nrole = "variant"', 'data = "dusk"\nrole = "source"', "has two sources, plants and dusk"),
        ('role = "source"', "", "has a variant 'dusk', but no source"),
        ('role = "source"', 'role = "sauce"', "role of suite .*'sauce'; did you mean 'source'"),
        ('data = "plants"', 'data = "nowhere"', "set 'plants': no such file or folder: .*nowhere"),
        ('data = "plants"', "data = 3", "data must be a text in quotes, got 3"),
        ('data = "plants"\nrole = "source"', 'role = "source"', "set 'plants': a line data = … is missing"),
        ('data = "dusk"', 'data = "birds"', "variant 'dusk' has classes that the source 'plants' has not"),
        ("a type of plant", "{}", "must contain one"),
        ("names.json", "nams.json", "cannot read class names from .*nams.json"),
        ("[sets.birds]", "[sets.birds", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_sentence(garden, old, new, words):
    assert old in GARDEN
    garden.write_text(GARDEN.replace(old, new))
    with pytest.raises(PerlclipError, match=words) as caught:
        suite(garden)
    assert "\n" not in str(caught.value)


def test_a_name_belongs_to_one_file(garden, tmp_path):
    suite(garden)
    suite(garden)
    (tmp_path / "other.toml").write_text(GARDEN)
    with pytest.raises(PerlclipError, match=r"a suite 'garden' is already read from .*garden.toml"):
        suite(tmp_path / "other.toml")
    for name, words in (("gardn", "did you mean 'garden'"), ("none.toml", "cannot read suite .*none.toml")):
        with pytest.raises(PerlclipError, match=words):
            suite(name)


def test_a_split_without_test_images_is_refused(garden):
    (garden.parent / "birds" / "test").rename(garden.parent / "birds" / "val")
    with pytest.raises(PerlclipError, match=r"set 'birds': .* has no split 'test'; it has train, val"):
        suite(garden)
