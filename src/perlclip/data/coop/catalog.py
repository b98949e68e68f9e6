"""The fifteen data sets of CoOp's protocol: a table, and what is done with its rows (load, check, sample).

Folders, split files, class names, templates and sizes are CoOp's; `docs/data.md` says what to download. Labels tell
classes apart, not names: ImageNet has more than one class called "missile" or "sunglasses", and they keep their names,
because other prompts than CoOp's would give other results.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perlclip.data.coop.lists import (
    Items,
    Reader,
    aircraft_lists,
    imagenet_folders,
    labelled,
    numbered_folders,
    own_wnid_folders,
    read_object,
    split_json,
    wnid_folders,
)
from perlclip.data.sets import SPLITS, DataSet, ImageSet, few_shot_split
from perlclip.errors import PerlclipError, unknown_name
from perlclip.progress import progress_bar
from perlclip.text.templates import DEFAULT_TEMPLATE

MIRROR = "https://huggingface.co/zhengli97/prompt_learning_dataset"  # all but ImageNet itself
_DRIVE = "https://drive.google.com/file/d/"
_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data/"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One data set: where it lies, how it is read, how its classes are put into words, what to expect of it."""

    name: str
    role: str = "target"  # or "source", or "variant" of the source; see `suites.py`
    folder: str  # below the root that holds all data sets
    images: str  # below the folder; paths in lists are relative to it
    lists: tuple[str, ...]  # files in the folder that say which images and classes there are
    read: Reader = split_json
    class_name: Callable[[str], str] | None = None  # CoOp's rule from an image's path to the name of its class
    template: str = DEFAULT_TEMPLATE
    sizes: tuple[int, int, int, int]  # classes, and images in train, val and test
    images_from: str
    lists_from: str = ""  # if they do not come with the images

    @property
    def where(self) -> str:
        """Where to get it."""
        lists = f", {self.lists[0]} from {self.lists_from}" if self.lists_from else ""
        return f"get the images from {self.images_from}{lists}"


def _folder(path: str) -> str:
    return path.partition("/")[0]


def _folder_renamed(**names: str) -> Callable[[str], str]:
    return lambda path: names.get(_folder(path), _folder(path))


def _breed(path: str) -> str:
    """`Egyptian_Mau_167.jpg`: `egyptian_mau`."""
    return path.rpartition("_")[0].lower()


def _scene(path: str) -> str:
    """`a/apartment_building/outdoor/x.jpg`: `outdoor apartment_building`."""
    return " ".join(reversed(path.split("/")[1:-1]))


_WNID_NAMES, _WNID_NAMES_FROM = ("classnames.txt",), f"{_DRIVE}1-61f_ol79pViBFDG_IDlUQSwoLcn2XXF"

CATALOG = (
    Entry(
        name="imagenet",
        role="source",
        folder="imagenet",
        images="images",
        lists=_WNID_NAMES,
        lists_from=_WNID_NAMES_FROM,
        read=imagenet_folders,
        sizes=(1000, 1_281_167, 50_000, 50_000),
        images_from="https://image-net.org",
    ),
    Entry(
        name="caltech101",
        folder="caltech-101",
        images="101_ObjectCategories",
        lists=("split_zhou_Caltech101.json",),
        class_name=_folder_renamed(airplanes="airplane", Faces="face", Leopards="leopard", Motorbikes="motorbike"),
        sizes=(100, 4128, 1649, 2465),
        images_from="http://www.vision.caltech.edu/Image_Datasets/Caltech101/101_ObjectCategories.tar.gz",
        lists_from=f"{_DRIVE}1hyarUivQE36mY6jSomru6Fjd-JzwcCzN",
    ),
    Entry(
        name="oxford_pets",
        folder="oxford_pets",
        images="images",
        lists=("split_zhou_OxfordPets.json",),
        class_name=_breed,
        template="a photo of a {}, a type of pet.",
        sizes=(37, 2944, 736, 3669),
        images_from=f"{_OXFORD}pets/data/images.tar.gz",
        lists_from=f"{_DRIVE}1501r8Ber4nNKvmlFVQZ8SeUHTcdTTEqs",
    ),
    Entry(
        name="stanford_cars",
        folder="stanford_cars",
        images="",
        lists=("split_zhou_StanfordCars.json",),
        sizes=(196, 6509, 1635, 8041),
        images_from=MIRROR,  # the authors' own server is gone
        lists_from=f"{_DRIVE}1ObCFbaAgVu0I-k_Au-gIUcefirdAuizT",
    ),
    Entry(
        name="oxford_flowers",
        folder="oxford_flowers",
        images="jpg",
        lists=("split_zhou_OxfordFlowers.json",),
        template="a photo of a {}, a type of flower.",
        sizes=(102, 4093, 1633, 2463),
        images_from=f"{_OXFORD}flowers/102/102flowers.tgz",
        lists_from=f"{_DRIVE}1Pp0sRXzZFZq15zVOzKjKBu4A9i01nozT",
    ),
    Entry(
        name="food101",
        folder="food-101",
        images="images",
        lists=("split_zhou_Food101.json",),
        class_name=_folder,
        template="a photo of {}, a type of food.",
        sizes=(101, 50_500, 20_200, 30_300),
        images_from="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        lists_from=f"{_DRIVE}1QK0tGi096I0Ba6kggatX1ee6dJFIcEJl",
    ),
    Entry(
        name="fgvc_aircraft",
        folder="fgvc_aircraft",
        images="images",
        lists=("variants.txt", *(f"images_variant_{part}.txt" for part in SPLITS)),
        read=aircraft_lists,
        template="a photo of a {}, a type of aircraft.",
        sizes=(100, 3334, 3333, 3333),
        images_from=f"{_OXFORD}fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
    ),
    Entry(
        name="sun397",
        folder="sun397",
        images="SUN397",
        lists=("split_zhou_SUN397.json",),
        class_name=_scene,
        sizes=(397, 15_880, 3970, 19_850),
        images_from=MIRROR,  # the authors' own links are dead
        lists_from=f"{_DRIVE}1y2RD81BYuiyvebdN-JymPfyWYcd8_MUq",
    ),
    Entry(
        name="dtd",
        folder="dtd",
        images="images",
        lists=("split_zhou_DescribableTextures.json",),
        class_name=_folder,
        template="{} texture.",
        sizes=(47, 2820, 1128, 1692),
        images_from=f"{_OXFORD}dtd/download/dtd-r1.0.1.tar.gz",
        lists_from=f"{_DRIVE}1u3_QfB467jqHgNXC00UIzbLZRQCg2S7x",
    ),
    Entry(
        name="eurosat",
        folder="eurosat",
        images="2750",
        lists=("split_zhou_EuroSAT.json",),
        class_name=_folder_renamed(
            AnnualCrop="Annual Crop Land",
            HerbaceousVegetation="Herbaceous Vegetation Land",
            Highway="Highway or Road",
            Industrial="Industrial Buildings",
            Pasture="Pasture Land",
            PermanentCrop="Permanent Crop Land",
            Residential="Residential Buildings",
            SeaLake="Sea or Lake",
        ),
        template="a centered satellite photo of {}.",
        sizes=(10, 13_500, 5400, 8100),
        images_from="http://madm.dfki.de/files/sentinel/EuroSAT.zip",
        lists_from=f"{_DRIVE}1Ip7yaCWFi0eaOFUGga0lUdVi_DDQth1o",
    ),
    Entry(
        name="ucf101",
        folder="ucf101",
        images="UCF-101-midframes",
        lists=("split_zhou_UCF101.json",),
        class_name=_folder,
        template="a photo of a person doing {}.",
        sizes=(101, 7639, 1898, 3783),
        images_from=f"{_DRIVE}10Jqome3vtUA2keJkNanAiFpgbyC9Hc2O",
        lists_from=f"{_DRIVE}1I0S0q91hJfsV9Gf4xDIjgDq4AqBNJb1y",
    ),
    # variants of ImageNet, for testing only
    Entry(
        name="imagenet_v2",
        role="variant",
        folder="imagenetv2",
        images="imagenetv2-matched-frequency-format-val",
        lists=_WNID_NAMES,
        lists_from=_WNID_NAMES_FROM,
        read=numbered_folders,
        sizes=(1000, 0, 0, 10_000),
        images_from="https://s3-us-west-2.amazonaws.com/imagenetv2public/imagenetv2-matched-frequency.tar.gz",
    ),
    Entry(
        name="imagenet_sketch",
        role="variant",
        folder="imagenet-sketch",
        images="images",
        lists=_WNID_NAMES,
        lists_from=_WNID_NAMES_FROM,
        read=wnid_folders,
        sizes=(1000, 0, 0, 50_889),
        images_from="https://github.com/HaohanWang/ImageNet-Sketch",
    ),
    Entry(
        name="imagenet_a",
        role="variant",
        folder="imagenet-adversarial",
        images="imagenet-a",
        lists=_WNID_NAMES,
        lists_from=_WNID_NAMES_FROM,
        read=own_wnid_folders,
        sizes=(200, 0, 0, 7500),
        images_from="https://github.com/hendrycks/natural-adv-examples",
    ),
    Entry(
        name="imagenet_r",
        role="variant",
        folder="imagenet-rendition",
        images="imagenet-r",
        lists=_WNID_NAMES,
        lists_from=_WNID_NAMES_FROM,
        read=own_wnid_folders,
        sizes=(200, 0, 0, 30_000),
        images_from="https://github.com/hendrycks/imagenet-r",
    ),
)
_BY_NAME = {entry.name: entry for entry in CATALOG}


def dataset_names() -> tuple[str, ...]:
    """Names of the fifteen, in the order of the table."""
    return tuple(_BY_NAME)


def load_dataset(name: str, root: str | Path) -> DataSet:
    """One of the fifteen, from its folder below `root`. Only lists are read; `check_dataset` looks for every image."""
    entry, root = _entry(name), _root(root)
    try:
        return _load(entry, root / entry.folder)
    except PerlclipError as error:
        raise PerlclipError(f"{name}: {error}; {entry.where}") from error


def _load(entry: Entry, folder: Path) -> DataSet:
    _require(entry, folder)
    root = folder / entry.images
    lists = entry.read(root, *(folder / file for file in entry.lists))
    train, val, test = (_image_set(entry, lists.class_names, root, items) for items in lists[1:])
    return DataSet(name=entry.name, train=train, val=test if lists.val is lists.test else val, test=test)


def _entry(name: str) -> Entry:
    if name not in _BY_NAME:
        raise unknown_name("data set", name, _BY_NAME)
    return _BY_NAME[name]


def _root(root: str | Path) -> Path:
    if not Path(root).is_dir():
        raise PerlclipError(f"no data folder {root}; it is to hold folders such as {CATALOG[1].folder}/")
    return Path(root)


def _require(entry: Entry, folder: Path) -> None:
    for path in (folder, folder / entry.images):
        if not path.is_dir():
            raise PerlclipError(f"folder {path} is missing")
    for path in (folder / file for file in entry.lists):
        if not path.exists():
            raise PerlclipError(f"{path} is missing, and one made anew would not be comparable with published results")


def _image_set(entry: Entry, class_names: tuple[str, ...], root: Path, items: Items) -> ImageSet:
    return ImageSet(
        images=[f"{root}/{path}" for path, _ in items],  # a million of them: text is ten times quicker than Path
        labels=[label for _, label in items],
        class_names=class_names,
        template=entry.template,
        name=entry.name,
        unique_names=False,
    )


# ---- checking ----


@dataclass(frozen=True, kw_only=True)
class Check:
    """What `check_dataset` found: `status` is complete, incomplete or absent."""

    name: str
    status: str
    problems: tuple[str, ...] = ()
    missing: int = 0  # images
    where: str

    def __str__(self) -> str:
        detail = "" if self.status == "complete" else f": {'; '.join([*self.problems, self.where])}"
        return f"{self.name:16}{self.status}{detail}"


def check_dataset(name: str, root: str | Path) -> Check:
    """Every file of a data set, its class names and its sizes, against what CoOp has."""
    entry, root = _entry(name), _root(root)
    if not (root / entry.folder).is_dir():
        return Check(name=name, status="absent", where=entry.where)
    try:
        data = _load(entry, root / entry.folder)
    except PerlclipError as error:
        return Check(name=name, status="incomplete", problems=(str(error),), where=entry.where)
    files = list(dict.fromkeys(str(path) for part in (data.train, data.val, data.test) for path in part.images))
    missing = _missing(name, files)
    problems = (
        *_missing_files(missing, len(files), root),
        *_wrong_sizes(data, entry),
        *_wrong_names(data, entry, root / entry.folder / entry.images),
    )
    status = "incomplete" if problems else "complete"
    return Check(name=name, status=status, problems=problems, missing=len(missing), where=entry.where)


def _missing(name: str, files: list[str], chunk: int = 1000) -> list[str]:
    missing: list[str] = []
    with progress_bar(f"check {name}", len(files)) as bar:
        for start in range(0, len(files), chunk):
            part = files[start : start + chunk]
            missing += [path for path in part if not _has_content(path)]
            bar(len(part))
    return missing


def _has_content(path: str) -> bool:
    try:
        return os.stat(path).st_size > 0  # noqa: PTH116
    except OSError:
        return False


def _missing_files(missing: list[str], total: int, root: Path) -> Iterable[str]:
    if missing:
        first = ", ".join(_relative(missing[:3], root))
        yield f"{len(missing):,} of {total:,} files missing or empty, first {first}"


def _wrong_sizes(data: DataSet, entry: Entry) -> Iterable[str]:
    found = (len(data.class_names), len(data.train), len(data.val), len(data.test))
    kinds = ("classes", "train images", "val images", "test images")
    for kind, got, want in zip(kinds, found, entry.sizes, strict=True):
        if got != want:
            yield f"{got:,} {kind} instead of {want:,}"


def _wrong_names(data: DataSet, entry: Entry, root: Path) -> Iterable[str]:
    """By one training image of each class."""
    one = {int(label): image for label, image in zip(data.train.labels, data.train.images, strict=True)}
    for label, path in zip(one, _relative(one.values(), root), strict=True):
        name, rule = data.class_names[label], entry.class_name(path) if entry.class_name else None
        if rule not in (None, name):
            yield f"the class of {path} is called {name!r} instead of {rule!r}"
            return


def _relative(paths: Iterable[Any], root: Path) -> list[str]:
    return [Path(path).relative_to(root).as_posix() for path in paths]


# ---- shots that others can use ----


def shots_json(name: str, root: str | Path, shots: int, seed: int) -> bytes:
    """CoOp's shots as a file, always the same bytes: paths relative to `root`, and a hash that `load_shots` checks."""
    data = load_dataset(name, root)
    content: dict[str, Any] = {"dataset": name, "shots": shots, "seed": seed}
    for part, images in zip(("train", "val"), few_shot_split(data, shots, seed), strict=True):
        paths = _relative(images.images, Path(root))
        content[part] = [[path, y, data.class_names[y]] for path, y in zip(paths, images.labels, strict=True)]
    content["sha256"] = _digest(content)
    fields = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in content.items())
    return f"{{\n{fields}\n}}\n".encode()


def load_shots(file: str | Path, root: str | Path) -> tuple[ImageSet, ImageSet]:
    """Train and val of a file that `perlclip data sample` wrote, with the images below `root`."""
    file = Path(file)
    content = read_object(file)
    if _digest({key: value for key, value in content.items() if key != "sha256"}) != content.get("sha256"):
        raise PerlclipError(f"{file} is not as it was written: its contents do not have the sha256 that it states")
    entry = _entry(str(content.get("dataset")))
    class_names, (train, val) = labelled({part: content.get(part) for part in ("train", "val")}, file)
    return _image_set(entry, class_names, _root(root), train), _image_set(entry, class_names, _root(root), val)


def _lines(value: Any) -> str:
    """As JSON, a list with a line for each of its items."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
