"""A user's own folders as a suite: every protocol, in this process and in others, and the report of it."""

import csv

import pytest

from perlclip.bench.store import Store
from perlclip.data import suites
from tests.cli.test_cli import fails, run
from tests.conftest import draw_tree

COLOURS = {"red": (200, 30, 30), "green_grass": (30, 180, 40), "blue": (30, 40, 200), "white": (230, 230, 230)}
GARDEN = """
name = "garden"
backbone = "tiny"
[sets.plants]
data = "plants"
role = "source"
[sets.birds]
data = "birds"
template = "a photo of a {}, a type of bird."
[sets.drawings]
data = "drawings"
role = "variant"
"""


@pytest.fixture
def garden(tmp_path):
    for name in ("plants", "birds", "drawings"):
        draw_tree(tmp_path / name, COLOURS, images=6)
    (tmp_path / "garden.toml").write_text(GARDEN)
    yield tmp_path / "garden.toml"
    suites.SUITES.pop("garden", None)


def test_every_protocol_runs_on_own_folders(garden, tmp_path):
    out = tmp_path / "out"
    common = ("--suite", garden, "--methods", "zero-shot,perl", "--shots", 1, "--seeds", 1, "--device", "cpu")
    for protocol, jobs in (("all", 2), ("few-shot", 1)):
        done = run("bench", protocol, *common, "--jobs", jobs, "--out", out)
        assert done.exit_code == 0, done.output
    records = Store(out / "runs").records()
    assert len(records.complete) == 12 and not records.failed
    tested = {(r["run"]["protocol"], r["run"]["dataset"]): sorted(r["metrics"]) for r in records.complete}
    assert tested == {
        ("base-to-novel", "plants"): ["base", "novel"],
        ("base-to-novel", "birds"): ["base", "novel"],
        ("cross-dataset", "plants"): ["birds", "plants"],
        ("domain-shift", "plants"): ["drawings", "plants"],
        ("few-shot", "plants"): ["all"],
        ("few-shot", "birds"): ["all"],
    }
    (summary,) = (out / "tables").glob("cross-dataset-garden-*-summary.csv")
    assert [row["method"] for row in csv.DictReader(summary.open())] == ["zero-shot", "perl"]
    (garden.parent / "plants" / "white" / "0.png").unlink()
    again = run("bench", "base-to-novel", *common, "--out", out, "--dry-run").output
    assert "birds" not in again and again.count("base-to-novel/garden/plants") == 2, "only what has other data"


def test_a_role_that_is_missing_is_one_sentence(garden, tmp_path):
    garden.write_text(GARDEN.replace('role = "source"', "").replace('role = "variant"', ""))
    said = fails("bench", "cross-dataset", "--suite", garden, "--out", tmp_path / "out")
    assert "suite 'garden' has no source, which cross-dataset needs" in said
