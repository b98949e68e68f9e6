"""`check` on drawn toys with labels changed, a copy in another split, and a page to look at; and its command."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import perlclip
from perlclip.data.images import read_image
from perlclip.data.toybox import load_toybox
from perlclip.errors import PerlclipError
from perlclip.labels.checking import labelled_splits
from perlclip.viz.suspects import suspects_page
from tests.cli.test_cli import fails, run

CLASSES, EACH = 5, 10


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    """train and val folders of toys: three labels changed, one image in both splits, one there as a JPEG as well."""
    root, drawn = tmp_path_factory.mktemp("toys"), load_toybox("covered_toys").train
    places = drawn.by_class()
    for c in range(CLASSES):
        for k, i in enumerate(places[c][:EACH]):
            name = drawn.class_names[(c + 1) % CLASSES if k == 3 and c < 3 else c]
            folder = root / ("val" if k > 7 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            read_image(drawn.images[i]).save(folder / f"{c}-{k}.png")
    name = drawn.class_names[4]
    shutil.copy(root / "train" / name / "4-0.png", root / "val" / name / "again.png")
    read_image(drawn.images[places[4][1]]).resize((128, 128)).save(root / "train" / name / "large.jpg", quality=95)
    return root


@pytest.fixture(scope="module")
def found(toys, tiny) -> perlclip.LabelCheck:
    return perlclip.check(perlclip.create_method("zero-shot", tiny), labelled_splits(toys), progress=False)


def test_wrong_labels_are_first_and_have_the_right_one(found):
    names = found.images.class_names
    first = {Path(found.name(one.place)).name: one.likely for one in found.wrong[:3]}
    assert first.keys() == {"0-3.png", "1-3.png", "2-3.png"}
    right = load_toybox("covered_toys").class_names
    assert [first[f"{c}-3.png"] for c in range(3)] == [right[c] for c in range(3)] and set(names) == set(
        right[:CLASSES]
    )
    assert [one.probability for one in found.wrong] == sorted((one.probability for one in found.wrong), reverse=True)
    assert 0.02 < found.noise < 0.15 and found.accuracy < 100


def test_copies_are_groups_that_say_which_splits(found):
    groups = {frozenset(Path(found.name(i)).name for i in group.places): group for group in found.duplicates}
    copied, scaled = groups[frozenset({"4-0.png", "again.png"})], groups[frozenset({"4-1.png", "large.jpg"})]
    assert copied.across_splits and not scaled.across_splits and not copied.contradict
    assert any("different splits" in sentence for sentence in found.warnings)
    assert "3 labels" in str(found) or "labels probably wrong" in str(found)


def test_the_page_is_one_file_with_the_suspects(found):
    page = suspects_page(found, title="Labels & more")
    assert not re.search(r"""(src|href)=(?!["']?(data:|#))|url\((?!#)|@import|https?://""", page)
    assert "Labels &amp; more" in page and page.count("data:image/png") >= len(found.wrong) + 2
    assert "different splits" in page
    few = suspects_page(found, max_images=1)
    assert few.count("<img") <= 3 and f"1 of {len(found.wrong)}" in few


def test_a_set_in_memory_can_be_checked_and_the_head_is_not_asked(tiny):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(6)]
    labelled = perlclip.ImageSet(images=images, labels=[0, 1, 0, 1, 0, 1], class_names=("cat", "dog"))
    method = perlclip.create_method("perl", tiny)
    adapter = perlclip.Adapter(method=method, class_names=("cat", "dog"), template="a photo of a {}.")
    found = perlclip.check(adapter, labelled, progress=False)
    assert found.splits == ("",) * 6 and found.name(2) == "image 2"
    with pytest.raises(PerlclipError, match="no images"):
        perlclip.check(adapter, labelled.select([]))


def test_the_command_shows_writes_and_ends_well(toys, tmp_path):
    out, page = tmp_path / "found.csv", tmp_path / "found.html"
    result = run("check", toys, "--backbone", "tiny", "--out", out, "--page", page)
    assert result.exit_code == 0, result.output
    assert "labels probably wrong" in result.stdout and "0-3.png" in result.stdout and page.stat().st_size > 5000
    rows = list(csv.DictReader(out.open()))
    assert {"label", "duplicate"} <= {row["kind"] for row in rows}
    assert rows[0]["split"] == "train" and rows[0]["likely"] and rows[0]["label"] != rows[0]["likely"]
    said = json.loads(run("check", toys, "--backbone", "tiny", "--json").stdout)
    assert said["images"] == CLASSES * EACH + 2 and len(said["found"]) == len(rows) and said["skipped"] == []
    assert "must end in .html" in fails("check", toys, "--backbone", "tiny", "--page", tmp_path / "x.pdf")


def test_an_unreadable_image_is_left_out_and_listed(tree, tmp_path):
    shutil.copytree(tree, tmp_path / "toys")
    Image.new("RGB", (8, 8)).save(tmp_path / "toys" / "red" / "x.png")
    (tmp_path / "toys" / "red" / "x.png").write_bytes((tmp_path / "toys" / "red" / "x.png").read_bytes()[:40])
    assert "skipped 1 of 25 images" in fails("check", tmp_path / "toys", "--backbone", "tiny")
    assert "x.png" in fails("check", tmp_path / "toys", "--backbone", "tiny", "--on-error", "stop")


def test_fit_warns_of_labels_before_it_trains(toys, tmp_path):
    result = run("fit", toys, "--backbone", "tiny", "--check", "--dry-run")
    assert result.exit_code == 0 and "probably wrong" in result.stdout and "0-3.png" in result.stdout
    command = ("fit", toys, "--backbone", "tiny", "--method", "zero-shot", "--no-head", "--out", tmp_path / "a")
    assert "probably wrong" in run(*command, "--check").stderr
    assert "probably wrong" not in run(*command, "--overwrite").stderr


def test_the_command_suggests_for_a_list_of_classes(tree, tmp_path):
    (tmp_path / "classes.txt").write_text("red\ngreen grass\nblue\n")
    how = ("suggest", tmp_path / "classes.txt", tree, "--backbone", "tiny", "--count", 4)
    lines = run(*how, "--json").stdout.splitlines()
    assert [json.loads(line)["rank"] for line in lines] == [1, 2, 3, 4]
    result = run(*how, "--out", tmp_path / "next.csv")
    assert result.exit_code == 0 and "4 of 24 images to label" in result.stdout
    rows = list(csv.DictReader((tmp_path / "next.csv").open()))
    assert [row["image"] for row in rows] == [json.loads(line)["image"] for line in lines]
    assert "taken for" in run(*how).stdout
    assert "no-such" in fails("suggest", tmp_path / "no-such", tree)
