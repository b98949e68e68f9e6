"""The fifteen data sets: miniatures of every layout are read, checked and sampled as CoOp would."""

import io
import json
import math
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

import perlclip
from perlclip import PerlclipError, dataset_names, load_dataset
from perlclip.data import check_dataset, few_shot_split, load_shots, read_image
from perlclip.data.coop import catalog
from tests.cli.test_cli import fails, run

REAL = Path(__file__).parents[3] / "shared" / "data"
PER_CLASS = {"train": 7, "val": 5, "test": 3}

# What CoOp's folders look like, written down a second time: split file, image root, a path of each class with its name.
SPLIT_SETS = {
    "caltech101": (
        "caltech-101/split_zhou_Caltech101.json",
        "caltech-101/101_ObjectCategories",
        {"Faces/image_{:04}.jpg": "face", "Leopards/image_{:04}.jpg": "leopard", "ant/image_{:04}.jpg": "ant"},
    ),
    "oxford_pets": (
        "oxford_pets/split_zhou_OxfordPets.json",
        "oxford_pets/images",
        {"Abyssinian_{}.jpg": "abyssinian", "american_bulldog_{}.jpg": "american_bulldog"},
    ),
    "stanford_cars": (
        "stanford_cars/split_zhou_StanfordCars.json",
        "stanford_cars",
        {"cars_train/0{}.jpg": "2000 AM General Hummer SUV", "cars_test/1{}.jpg": "2012 Acura RL Sedan"},
    ),
    "oxford_flowers": (
        "oxford_flowers/split_zhou_OxfordFlowers.json",
        "oxford_flowers/jpg",
        {"image_0{}.jpg": "pink primrose", "image_1{}.jpg": "colt's foot", "image_2{}.jpg": "king protea"},
    ),
    "food101": (
        "food-101/split_zhou_Food101.json",
        "food-101/images",
        {"apple_pie/{}.jpg": "apple_pie", "waffles/{}.jpg": "waffles"},
    ),
    "sun397": (
        "sun397/split_zhou_SUN397.json",
        "sun397/SUN397",
        {"a/abbey/sun_{}.jpg": "abbey", "a/apartment_building/outdoor/sun_{}.jpg": "outdoor apartment_building"},
    ),
    "dtd": (
        "dtd/split_zhou_DescribableTextures.json",
        "dtd/images",
        {"banded/banded_{:04}.jpg": "banded", "polka-dotted/polka-dotted_{:04}.jpg": "polka-dotted"},
    ),
    "eurosat": (
        "eurosat/split_zhou_EuroSAT.json",
        "eurosat/2750",
        {
            "AnnualCrop/AnnualCrop_{}.jpg": "Annual Crop Land",
            "Forest/Forest_{}.jpg": "Forest",
            "SeaLake/SeaLake_{}.jpg": "Sea or Lake",
        },
    ),
    "ucf101": (
        "ucf101/split_zhou_UCF101.json",
        "ucf101/UCF-101-midframes",
        {
            "Apply_Eye_Makeup/v_ApplyEyeMakeup_g{:02}_c01.jpg": "Apply_Eye_Makeup",
            "Yo_Yo/v_YoYo_g{:02}_c01.jpg": "Yo_Yo",
        },
    ),
}
WNIDS = {"n01440764": "tench", "n03773504": "missile", "n04008634": "missile", "n04356056": "sunglasses"}
CLASSNAMES = "".join(f"{wnid} {name}\n" for wnid, name in reversed(WNIDS.items()))  # the order must not matter
IMAGENET_SETS = {  # folder, and its class folders
    "imagenet": ("imagenet", [f"images/{part}/{wnid}" for part in ("train", "val") for wnid in WNIDS]),
    "imagenet_v2": ("imagenetv2", [f"imagenetv2-matched-frequency-format-val/{k}" for k in range(4)]),
    "imagenet_sketch": ("imagenet-sketch", [f"images/{wnid}" for wnid in WNIDS]),
    "imagenet_a": ("imagenet-adversarial", ["imagenet-a/n04008634", "imagenet-a/n01440764"]),
    "imagenet_r": ("imagenet-rendition", ["imagenet-r/n04356056", "imagenet-r/n03773504", "imagenet-r/n01440764"]),
}
VARIANTS = ("imagenet_v2", "imagenet_sketch", "imagenet_a", "imagenet_r")
TRAINABLE = (*SPLIT_SETS, "fgvc_aircraft", "imagenet")


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def draw() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), (90, 120, 30)).save(buffer, "JPEG")
    return buffer.getvalue()


def make_split_set(root: Path, split_file: str, image_root: str, classes: dict[str, str]) -> None:
    parts = defaultdict(list)
    for label, (pattern, name) in enumerate(classes.items()):
        numbers = iter(range(1, 100))
        for part, count in PER_CLASS.items():
            parts[part] += [[pattern.format(next(numbers)), label, name] for _ in range(count)]
    rng = random.Random(0)
    for items in parts.values():
        rng.shuffle(items)  # labels first appear in any order
        for path, _, _ in items:
            put(root / image_root / path, draw())
    put(root / split_file, json.dumps(parts, indent=4).encode())


def make_aircraft(root: Path) -> None:
    folder, variants = root / "fgvc_aircraft", ["707-320", "F/A-18", "Global Express"]
    put(folder / "variants.txt", "\n".join(variants).encode())
    numbers = iter(range(34309, 40000))
    for part, count in PER_CLASS.items():
        lines = [f"{next(numbers):07} {variant}" for _ in range(count) for variant in variants[::-1]]
        put(folder / f"images_variant_{part}.txt", "\n".join(lines).encode())
        for line in lines:
            put(folder / "images" / f"{line[:7]}.jpg", draw())


def make_imagenet_set(root: Path, folder: str, class_folders: list[str]) -> None:
    put(root / folder / "classnames.txt", CLASSNAMES.encode())
    for number, class_folder in enumerate(class_folders):
        for n in (3, 1, 2):
            put(root / folder / class_folder / f"{number}_{n}.JPEG", draw())
    put(root / folder / class_folders[0] / ".hidden.JPEG", b"")
    put((root / folder / class_folders[0]).parent / "README.txt", b"not a class")


@pytest.fixture(scope="module")
def minis(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for layout in SPLIT_SETS.values():
        make_split_set(root, *layout)
    make_aircraft(root)
    for layout in IMAGENET_SETS.values():
        make_imagenet_set(root, *layout)
    return root


@pytest.fixture
def mini_sizes(minis, monkeypatch):
    """As if the miniatures were what CoOp has."""
    for name, entry in catalog._BY_NAME.items():
        data = load_dataset(name, minis)
        sizes = (len(data.class_names), len(data.train), len(data.val), len(data.test))
        monkeypatch.setitem(catalog._BY_NAME, name, replace(entry, sizes=sizes))


# ---- the table ----


def test_the_names_and_the_templates():
    templates = {entry.name: entry.template for entry in catalog.CATALOG}
    assert (
        dataset_names()
        == tuple(templates)
        == (
            *("imagenet", "caltech101", "oxford_pets", "stanford_cars", "oxford_flowers", "food101", "fgvc_aircraft"),
            *("sun397", "dtd", "eurosat", "ucf101", "imagenet_v2", "imagenet_sketch", "imagenet_a", "imagenet_r"),
        )
    )
    special = {
        "oxford_pets": "a photo of a {}, a type of pet.",
        "oxford_flowers": "a photo of a {}, a type of flower.",
        "food101": "a photo of {}, a type of food.",
        "fgvc_aircraft": "a photo of a {}, a type of aircraft.",
        "dtd": "{} texture.",
        "eurosat": "a centered satellite photo of {}.",
        "ucf101": "a photo of a person doing {}.",
    }
    assert {name: t for name, t in templates.items() if t != "a photo of a {}."} == special


def test_sizes_agree_with_each_other():
    """Totals of the published data sets, and the halves of base-to-novel."""
    sizes = {entry.name: entry.sizes for entry in catalog.CATALOG}
    totals = {"caltech101": 9144 - 467 - 435, "oxford_pets": 7349, "stanford_cars": 16185, "oxford_flowers": 8189}
    totals |= {"food101": 101_000, "fgvc_aircraft": 10_000, "sun397": 39_700, "dtd": 5640, "eurosat": 27_000}
    totals |= {"ucf101": 13_320, "imagenet": 1_281_167 + 2 * 50_000}
    assert {name: sum(sizes[name][1:]) for name in totals} == totals
    base = {"imagenet": 500, "caltech101": 50, "oxford_pets": 19, "stanford_cars": 98, "oxford_flowers": 51}
    base |= {"food101": 51, "fgvc_aircraft": 50, "sun397": 199, "dtd": 24, "eurosat": 5, "ucf101": 51}
    assert {name: math.ceil(sizes[name][0] / 2) for name in TRAINABLE} == base


# ---- reading ----


@pytest.mark.parametrize("name", SPLIT_SETS)
def test_split_sets_are_read_in_file_order(minis, name):
    split_file, image_root, classes = SPLIT_SETS[name]
    data = load_dataset(name, minis)
    split = json.loads((minis / split_file).read_text())
    assert data.class_names == tuple(classes.values()) and data.name == data.test.name == name
    for part in ("train", "val", "test"):
        images = getattr(data, part)
        assert images.images == [str(minis / image_root / path) for path, _, _ in split[part]]
        assert images.labels == [label for _, label, _ in split[part]]
        assert images.class_names == data.class_names
    assert read_image(data.test.images[0]).size == (8, 6)


def test_names_are_spoken_only_in_prompts(minis):
    data = load_dataset("sun397", minis)
    assert data.class_names[1] == "outdoor apartment_building"
    assert data.test.prompts[1] == "a photo of a outdoor apartment building."


def test_aircraft_lists(minis):
    data = load_dataset("fgvc_aircraft", minis)
    assert data.class_names == ("707-320", "F/A-18", "Global Express")
    assert data.train.labels[:4] == [2, 1, 0, 2] and [len(s) for s in (data.train, data.val, data.test)] == [21, 15, 9]
    assert data.train.images[0] == str(minis / "fgvc_aircraft/images/0034309.jpg")


def test_imagenet_is_listed_sorted_and_tested_on_its_validation_images(minis):
    data = load_dataset("imagenet", minis)
    assert data.val is data.test and len(data.train) == len(data.test) == 12
    assert data.train.labels == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert data.train.images[:3] == [str(minis / f"imagenet/images/train/n01440764/0_{n}.JPEG") for n in (1, 2, 3)]


def test_a_repeated_name_stays_as_coop_has_it(minis):
    """Two pairs of ImageNet classes share a name: other names would be other prompts."""
    data = load_dataset("imagenet", minis)
    assert data.class_names == ("tench", "missile", "missile", "sunglasses")
    assert data.test.novel().prompts == ["a photo of a missile.", "a photo of a sunglasses."]
    train, _ = few_shot_split(data, 2, 1)
    assert train.prompts.count("a photo of a missile.") == 2
    with pytest.raises(PerlclipError, match="duplicate class name"):
        replace(data.train, unique_names=True)


def test_the_label_spaces_of_the_variants(minis):
    data = {name: load_dataset(name, minis) for name in VARIANTS}
    assert data["imagenet_v2"].class_names == data["imagenet_sketch"].class_names == tuple(WNIDS.values())
    assert data["imagenet_a"].class_names == ("tench", "missile")
    assert data["imagenet_r"].class_names == ("tench", "missile", "sunglasses")
    for name, folders in (("imagenet_a", ["n01440764", "n04008634"]), ("imagenet_v2", ["0", "1", "2", "3"])):
        test = data[name].test
        assert [Path(path).parent.name for path in test.images[::3]] == folders
        assert test.labels == [label for label in range(len(folders)) for _ in range(3)]


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_for_testing_only(minis, name):
    data = load_dataset(name, minis)
    assert len(data.train) == len(data.val) == 0 and data.train.class_names == data.test.class_names
    with pytest.raises(PerlclipError, match=f"{name} has no images to draw shots from"):
        few_shot_split(data, 16, 1)
    with pytest.raises(PerlclipError, match="no images to draw shots from"):
        data.train.few_shot(16, random.Random(1))


def test_loading_looks_at_no_image(tmp_path, mini_sizes):
    """ImageNet has 1.3 million: one that is gone is found by `check`, or named when it is read."""
    make_split_set(tmp_path, *SPLIT_SETS["dtd"])
    make_imagenet_set(tmp_path, *IMAGENET_SETS["imagenet"])
    for path in (*tmp_path.glob("dtd/images/*/*.jpg"), *tmp_path.glob("imagenet/images/*/*/[0-9]*.JPEG")):
        path.unlink()
        if path.suffix == ".JPEG":
            path.symlink_to(tmp_path / "gone")
    for name, count in (("dtd", 30), ("imagenet", 24)):
        data = load_dataset(name, tmp_path)
        assert check_dataset(name, tmp_path).missing == count
        with pytest.raises(PerlclipError, match=f"cannot read image {data.test.images[0]}: No such file"):
            read_image(data.test.images[0])


# ---- what is missing or wrong ----


def test_what_is_missing_is_named_with_its_source(tmp_path, minis):
    with pytest.raises(PerlclipError, match="unknown data set 'euro_sat'; did you mean 'eurosat'"):
        load_dataset("euro_sat", minis)
    with pytest.raises(PerlclipError, match="no data folder"):
        load_dataset("eurosat", tmp_path / "nowhere")
    with pytest.raises(PerlclipError, match=r"eurosat: folder .*eurosat is missing; get the images from http.*EuroSAT"):
        load_dataset("eurosat", tmp_path)
    (tmp_path / "eurosat" / "2750").mkdir(parents=True)
    words = r"split_zhou_EuroSAT.json is missing, and one made anew would not be comparable .*1Ip7yaCWFi0eaOFUGga0lUdVi"
    with pytest.raises(PerlclipError, match=words):
        load_dataset("eurosat", tmp_path)
    make_aircraft(tmp_path)
    (tmp_path / "fgvc_aircraft" / "images_variant_val.txt").unlink()
    with pytest.raises(PerlclipError, match=r"images_variant_val.txt is missing.*fgvc-aircraft-2013b.tar.gz"):
        load_dataset("fgvc_aircraft", tmp_path)


GOOD = ["Forest/1.jpg", 0, "Forest"]
BAD_SPLITS = {
    "not JSON": ("{", "is not valid JSON"),
    "a list": ([GOOD], "must hold a JSON object, got a list"),
    "no val": ({"train": [GOOD], "test": [GOOD]}, "has no list 'val'"),
    "a pair": ({"train": [GOOD[:2]], "val": [], "test": []}, r"must hold \[path, label, class name\]"),
    "a label in words": ({"train": [["a.jpg", "0", "a"]], "val": [], "test": []}, "must hold"),
    "no items": ({"train": [], "val": [], "test": []}, "without a gap, but 'train' lacks 0"),
    "a gap": ({"train": [GOOD, ["b.jpg", 2, "b"]], "val": [], "test": []}, "without a gap, but 'train' lacks 1"),
    "below zero": ({"train": [GOOD, ["b.jpg", -1, "b"]], "val": [], "test": []}, "without a gap"),
    "two names": ({"train": [GOOD, ["b.jpg", 0, "b"]], "val": [], "test": []}, "label 0, 'b' in 'train', is 'Forest'"),
    "test only": ({"train": [GOOD], "val": [], "test": [["b.jpg", 1, "b"]]}, "label 1, 'b' in 'test', has no name"),
    "absolute": ({"train": [["/etc/passwd", 0, "a"]], "val": [], "test": []}, "does not stay below"),
    "escaping": ({"train": [GOOD], "val": [], "test": [["a/../../b.jpg", 0, "Forest"]]}, "does not stay below"),
    "a drive": ({"train": [["C:\\b.jpg", 0, "a"]], "val": [], "test": []}, "does not stay below"),
    "no name": ({"train": [["a.jpg", 0, " "]], "val": [], "test": []}, "a class name is empty"),
}


@pytest.mark.parametrize("kind", BAD_SPLITS)
def test_bad_splits_are_refused_in_one_sentence(tmp_path, kind):
    content, words = BAD_SPLITS[kind]
    (tmp_path / "eurosat" / "2750").mkdir(parents=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "eurosat" / "split_zhou_EuroSAT.json").write_text(text)
    with pytest.raises(PerlclipError, match=words) as caught:
        load_dataset("eurosat", tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_lists_and_folders(tmp_path):
    make_aircraft(tmp_path)
    (tmp_path / "fgvc_aircraft" / "images_variant_test.txt").write_text("0034309 707-321\n")
    with pytest.raises(PerlclipError, match="'0034309 707-321' is not an image number and a known variant"):
        load_dataset("fgvc_aircraft", tmp_path)
    make_imagenet_set(tmp_path, "imagenet", ["images/train/n01440764", "images/val/n01440764"])
    with pytest.raises(PerlclipError, match="train lacks 3 of 4 class folders, first n03773504, n04008634, n04356056"):
        load_dataset("imagenet", tmp_path)
    (tmp_path / "imagenet" / "classnames.txt").write_text("n04356056 sunglasses")
    make_imagenet_set(tmp_path, "imagenet-adversarial", ["imagenet-a/n00000001"])
    with pytest.raises(PerlclipError, match="n00000001 is not a class of"):
        load_dataset("imagenet_a", tmp_path)
    (tmp_path / "imagenet-adversarial" / "classnames.txt").write_text("n04356056\n")
    with pytest.raises(PerlclipError, match="'n04356056' is not a new wnid and a class name"):
        load_dataset("imagenet_a", tmp_path)


# ---- sampling ----


def coops_shots(lists: dict[str, list], shots: int, seed: int) -> dict[str, list]:
    """CoOp's rule as the fact sheet describes it, with the global generator: lists of [path, label, name]."""
    random.seed(seed)
    drawn = {}
    for part, per_class in (("train", shots), ("val", min(shots, 4))):
        by_label = defaultdict(list)
        for item in lists.get(part, []):
            by_label[item[1]].append(item)
        drawn[part] = []
        for items in by_label.values():
            drawn[part] += random.sample(items, per_class) if len(items) >= per_class else items
    return drawn


@pytest.mark.parametrize("shots", [1, 4, 6, 16])
@pytest.mark.parametrize("name", TRAINABLE)
def test_shots_are_coops_to_the_file(minis, name, shots):
    data = load_dataset(name, minis)
    parts = {"train": data.train} | ({} if name == "imagenet" else {"val": data.val})
    lists = {part: list(zip(s.images, s.labels, strict=True)) for part, s in parts.items()}
    for seed in (1, 2, 3):
        want = coops_shots(lists, shots, seed)
        train, val = few_shot_split(data, shots, seed)
        assert list(zip(train.images, train.labels, strict=True)) == want["train"]
        assert list(zip(val.images, val.labels, strict=True)) == want["val"]
        base = [image for image, label in want["train"] if label < math.ceil(len(data.class_names) / 2)]
        assert train.base().images == base, "classes are halved after drawing"
    with pytest.raises(PerlclipError, match="shots must be at least 1"):
        few_shot_split(data, 0, 1)


def test_a_sample_file_gives_the_same_shots_elsewhere(minis, tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, root in zip(files, (minis, f"{minis}/../{minis.name}/"), strict=True):
        result = run("data", "sample", "eurosat", "--data", root, "--shots", 3, "--seed", 2, "--out", file)
        assert result.exit_code == 0 and "9 train and 9 val images, sha256" in result.stdout
    assert files[0].read_bytes() == files[1].read_bytes(), "whatever the root is called"
    content = json.loads(files[0].read_text())
    split = json.loads((minis / "eurosat" / "split_zhou_EuroSAT.json").read_text())
    want = coops_shots(split, 3, 2)
    for part in ("train", "val"):
        assert content[part] == [[f"eurosat/2750/{path}", label, name] for path, label, name in want[part]]
    assert list(content) == ["dataset", "shots", "seed", "train", "val", "sha256"]
    loaded, drawn = load_shots(files[0], minis), few_shot_split(load_dataset("eurosat", minis), 3, 2)
    assert loaded == drawn and loaded[0].fingerprint() == drawn[0].fingerprint()


def test_a_sample_file_that_was_changed_is_refused(minis, tmp_path):
    file = tmp_path / "shots.json"
    assert run("data", "sample", "imagenet", "--data", minis, "--shots", 2, "--out", file).exit_code == 0
    train, val = load_shots(file, minis)
    assert (len(train), len(val)) == (8, 0) and train.class_names == load_dataset("imagenet", minis).class_names
    assert run("data", "sample", "imagenet", "--data", minis, "--shots", 2, "--out", file).exit_code == 0
    assert "holds something else" in fails("data", "sample", "dtd", "--data", minis, "--out", file)
    file.write_text(file.read_text().replace("train/n03773504/1_1", "train/n03773504/1_2"))
    with pytest.raises(PerlclipError, match="do not have the sha256 that it states"):
        load_shots(file, minis)
    assert "imagenet_r has no images" in fails("data", "sample", "imagenet_r", "--data", minis, "--out", tmp_path / "r")


# ---- checking ----


def test_whole_sets_are_complete(minis, mini_sizes):
    result = run("data", "check", minis)
    assert result.exit_code == 0, result.output
    assert [line.split() for line in result.stdout.splitlines()] == [[name, "complete"] for name in dataset_names()]


def test_missing_files_are_counted_and_named(tmp_path, mini_sizes):
    make_split_set(tmp_path, *SPLIT_SETS["dtd"])
    for n in (1, 2, 8):
        (tmp_path / f"dtd/images/banded/banded_{n:04}.jpg").unlink()
    (tmp_path / "dtd/images/banded/banded_0009.jpg").write_bytes(b"")
    report = check_dataset("dtd", tmp_path)
    assert (report.status, report.missing) == ("incomplete", 4)
    assert report.problems[0].startswith("4 of 30 files missing or empty, first dtd/images/banded/banded_000")
    result = run("data", "check", tmp_path)
    assert result.exit_code == 1 and "dtd             incomplete: 4 of 30 files" in result.stdout
    lines = [json.loads(line) for line in run("data", "check", tmp_path, "dtd", "ucf101", "--json").stdout.splitlines()]
    assert [(line["name"], line["status"], line["missing"]) for line in lines] == [
        ("dtd", "incomplete", 4),
        ("ucf101", "absent", 0),
    ]


def test_an_absent_set_fails_only_if_asked_for(tmp_path):
    result = run("data", "check", tmp_path)
    assert result.exit_code == 0 and result.stdout.count("absent: get the images from http") == 15
    assert run("data", "check", tmp_path, "eurosat").exit_code == 1
    assert "no data folder" in fails("data", "check", tmp_path / "nowhere")
    assert "unknown data set 'x'" in fails("data", "check", tmp_path, "x")


def test_sizes_and_names_are_compared_with_coops(minis, tmp_path, mini_sizes):
    assert check_dataset("caltech101", minis).status == "complete"
    split_file, image_root, classes = SPLIT_SETS["caltech101"]
    raw = {**classes, "Faces/image_{:04}.jpg": "Faces"}
    make_split_set(tmp_path, split_file, image_root, {**raw, "zebra/image_{:04}.jpg": "zebra"})
    assert check_dataset("caltech101", tmp_path).problems[:2] == (
        "4 classes instead of 3",
        "28 train images instead of 21",
    )
    assert "is called 'Faces' instead of 'face'" in check_dataset("caltech101", tmp_path).problems[-1]
    (tmp_path / split_file).write_text("{}")
    assert "caltech101      incomplete: " in str(check_dataset("caltech101", tmp_path))


# ---- a real one ----


@pytest.mark.skipif(not (REAL / "eurosat").is_dir(), reason="no real data on this machine")
def test_a_real_subset_of_eurosat(backbone):
    data = load_dataset("eurosat", REAL)
    assert [len(s) for s in (data.train, data.val, data.test)] == [320, 40, 600] and len(data.class_names) == 10
    assert data.test.prompts[9] == "a centered satellite photo of Sea or Lake."
    report = check_dataset("eurosat", REAL)
    assert report.missing == 0 and len(report.problems) == 3, "whole, with CoOp's names, but a subset"
    train, val = few_shot_split(data, 16, 1)
    assert (len(train.base()), len(val.base()), len(data.test.base())) == (80, 20, 300)
    some = val.base().select(range(0, 20, 4))
    result = perlclip.evaluate(perlclip.create_method("zero-shot", backbone), some, progress=False)
    assert result.total == 5 and list(result.class_accuracy) == list(data.class_names[:5])


# ---- the page ----


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for entry in catalog.CATALOG:
        download, names = (line for line in page.splitlines() if line.startswith(f"| `{entry.name}` |"))
        sizes = " | ".join(f"{size:,}" if size else "–" for size in entry.sizes)
        said = (f"`{entry.folder}/`", entry.images, entry.lists[0], f"({entry.images_from})", entry.lists_from, sizes)
        assert all(words in download for words in said) and names.endswith(f"| {entry.template} |")
