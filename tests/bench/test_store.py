"""What makes a run complete: the same recipe, settings, data and weights; and what a failure leaves alone."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import perlclip
from perlclip.bench import run as performing
from perlclip.bench.machines import Machines
from perlclip.bench.run import Lookup, Workspace
from perlclip.bench.schedule import run_all
from perlclip.bench.store import CHECKPOINT, FAILED, RECORD, Run, Store, failed_record
from perlclip.data import DataSet
from perlclip.data.suites import SUITES
from tests.bench.suites import load
from tests.bench.test_runs import bench, grid
from tests.cli.test_cli import run
from tests.data.test_catalog import SPLIT_SETS, make_split_set

STORED = Path(__file__).parents[1] / "stored" / "0.1.0" / "store"


@pytest.fixture
def done(tmp_path) -> tuple[Store, list[Run]]:
    store = Store(tmp_path / "done" / "runs")
    runs = grid(datasets=["a"], seeds=[1])
    assert all(record["status"] == "complete" for record in run_all(runs, store))
    return store, runs


@pytest.fixture
def backbones(monkeypatch) -> Counter:
    """How often each backbone is loaded in this process."""
    loads = Counter()

    def counted(name: str, **options) -> perlclip.Backbone:
        loads[name] += 1
        return perlclip.load_backbone(name, **options)

    monkeypatch.setattr(performing, "load_backbone", counted)
    return loads


@pytest.fixture
def sets(monkeypatch) -> Counter:
    """How often each set of the suites `little` and `fine` is loaded in this process."""
    loads = Counter()

    def counted(name: str, root: Path | None = None) -> DataSet:
        loads[name] += 1
        return load(name)

    for name in ("little", "fine"):
        monkeypatch.setitem(SUITES, name, replace(SUITES[name], load=counted))
    return loads


def changed(store: Store, one: Run, **fields) -> None:
    """Another value, or with None no value, in a stored record."""
    record = json.loads((store.home(one) / RECORD).read_bytes()) | fields
    text = json.dumps({key: value for key, value in record.items() if value is not None or key not in fields})
    (store.home(one) / RECORD).write_text(text)


# ---- stores of earlier versions ----


@pytest.mark.parametrize("options", [("--jobs", 1), ("--jobs", 2), ("--dry-run",)])
def test_a_store_of_version_0_1_0_is_complete(tmp_path, monkeypatch, options):
    runs = Path(shutil.copytree(STORED, tmp_path / "runs"))
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    monkeypatch.setattr(performing, "perform", None)
    for words in (("--methods", "zero-shot,perl,coop"), ("--methods", "perl", "--set", "steps=2")):
        where = ("--datasets", "blurred_shapes", "--shots", 1, "--seeds", 1, "--device", "cpu", "--out", tmp_path)
        result = run("bench", "base-to-novel", *words, *where, *options)
        assert result.exit_code == 0, result.output
        assert " 0 to do" in result.stdout or "--dry-run" not in options
    assert before == {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}


# ---- failures ----


def test_a_failure_never_replaces_what_was_complete(done, monkeypatch):
    store, runs = done
    before = (store.home(runs[1]) / RECORD).read_bytes()
    with monkeypatch.context() as patch:
        patch.setitem(SUITES, "little", replace(SUITES["little"], load=lambda name, root: load("broken")))
        records = run_all(runs, store)
    assert [record["error"] for record in records] == ["these pictures are lost"] * 2
    assert (store.home(runs[1]) / RECORD).read_bytes() == before
    found = store.records()
    assert (len(found.complete), len(found.failed), found.damaged) == (2, 2, [])
    monkeypatch.setattr(performing, "perform", None)
    assert [record["status"] for record in run_all(runs, store)] == ["complete"] * 2, "the pictures are back"
    assert not store.records().failed


def test_a_failure_where_version_0_1_0_kept_it_counts_once(tmp_path):
    store, (one,) = Store(tmp_path), grid(datasets=["a"], methods=["zero-shot"])
    store.home(one).mkdir(parents=True)
    (store.home(one) / RECORD).write_text(json.dumps(failed_record(one, ValueError("old"))))
    assert [record["error"] for record in store.records().failed] == ["ValueError: old"]
    store.write(one, failed_record(one, ValueError("new")))
    assert [record["error"] for record in store.records().failed] == ["ValueError: new"]
    (record,) = run_all([one], store)
    assert record["status"] == "complete" and not (store.home(one) / FAILED).exists()
    assert (len(store.records().complete), store.records().failed) == (1, [])


@pytest.mark.parametrize(
    "fields",
    [{"seconds": {"fit": "abc"}}, {"seconds": "abc"}, {"parameters": 10**30}, {"metrics": {"base": 5}}, {"run": {}},
     {"metrics": {"base": {"accuracy": 1.0, "step_accuracy": [float("nan")]}}}, {"config": [1]}],
)  # fmt: skip
def test_a_record_with_absurd_fields_is_damaged(fields, tmp_path, monkeypatch):
    """`bench --dry-run` and `report` computed with them."""
    runs = Path(shutil.copytree(STORED, tmp_path / "runs"))
    store, home = Store(runs), sorted(runs.rglob(RECORD))[1].parent
    record = json.loads((home / RECORD).read_bytes())
    (home / RECORD).write_text(json.dumps(record | fields))
    assert (len(store.records().complete), store.records().damaged) == (3, [home / RECORD])
    where = ("--datasets", "blurred_shapes", "--shots", 1, "--seeds", 1, "--device", "cpu", "--out", tmp_path)
    result = run("bench", "base-to-novel", "--methods", "zero-shot,perl,coop", *where, "--dry-run")
    assert result.exit_code == 0 and " 1 to do" in result.stdout and "1 damaged records" in result.stderr


def test_records_that_have_no_end_are_damaged(tmp_path):
    runs = Path(shutil.copytree(STORED, tmp_path / "runs"))
    first, second = sorted(runs.rglob(RECORD))[:2]
    first.unlink()
    first.symlink_to("/dev/zero")
    second.unlink()
    os.mkfifo(second)
    assert Store(runs).records().damaged == [first, second]


# ---- data ----


@pytest.mark.parametrize("part", ["test", "train"])
def test_rows_changed_on_disk_make_the_run_incomplete(part, tmp_path, clip_folder):
    """On the real sets' layout: other labels in the list that is tested or trained on."""
    for name in ("dtd", "eurosat"):
        make_split_set(tmp_path / "data", *SPLIT_SETS[name])
    options = ("--suite", "coop", "--backbone", clip_folder, "--device", "cpu", "--methods", "coop", "--seeds", 1)
    blind = ("bench", "few-shot", *options, "--shots", 2, "--datasets", "dtd,eurosat", "--out", tmp_path)
    command = (*blind, "--data", tmp_path / "data")
    assert run(*command).exit_code == 0
    store = Store(tmp_path / "runs")
    before = {path: path.stat().st_mtime_ns for path in store.folder.rglob(RECORD)}
    assert run(*command).exit_code == 0
    assert before == {path: path.stat().st_mtime_ns for path in store.folder.rglob(RECORD)}

    file = tmp_path / "data" / SPLIT_SETS["dtd"][0]
    lists = json.loads(file.read_bytes())
    for row in lists[part]:
        row[1:] = [1 - row[1], next(other[2] for other in lists[part] if other[1] != row[1])]
    file.write_text(json.dumps(lists))
    assert "2 runs: 1 complete, 1 to do" in run(*command, "--dry-run").stdout
    said = run(*blind, "--dry-run").stdout
    assert (
        "2 complete, 0 to do" in said and "not compared: the backbone's weights and, without --data, the data" in said
    )
    assert run(*command).exit_code == 0
    again = [path for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert [path.parent.parent.name for path in again] == ["dtd"]
    shutil.rmtree(file.parent)
    assert "2 runs: 1 complete, 1 to do" in run(*command, "--dry-run").stdout, "what is gone is not the same"


def test_only_what_a_record_has_is_compared(done):
    store, runs = done
    perl = runs[1]
    lookup = Lookup(store, Workspace())
    assert lookup.find(perl)["roles"] == {"source": "a", "targets": ["b"], "variants": ["broken", "deadly"]}
    changed(store, perl, train="0")
    assert lookup.find(perl) is None
    changed(store, perl, train=None)
    assert lookup.find(perl) is not None, "as in version 0.1.0"
    changed(store, perl, tests={"base": "0", "novel": "0"})
    assert lookup.find(perl) is None


def test_drawn_pictures_are_not_compared(done, monkeypatch, sets):
    """Other machines draw them a little differently."""
    store, runs = done
    changed(store, runs[1], tests={"base": "0", "novel": "0"}, train="0")
    assert run_all(runs, store)[1]["train"] != "0", "done again"
    changed(store, runs[1], tests={"base": "0", "novel": "0"}, train="0")
    monkeypatch.setitem(SUITES, "little", replace(SUITES["little"], drawn=True))
    sets.clear()
    assert run_all(runs, store)[1]["train"] == "0" and not sets


def test_what_is_dear_is_looked_at_last_and_once(tmp_path, sets, backbones):
    runs = grid(suite="fine", protocol="all", methods=["zero-shot"])
    runs += grid(suite="fine", protocol="few-shot", methods=["perl"], shots=[1, 2])
    store = Store(tmp_path)
    lookup = Machines().lookup(store)
    assert not any(lookup.find(one) for one in runs) and not sets and not backbones, "there is nothing to compare"
    assert all(record["status"] == "complete" for record in run_all(runs, store))
    sets.clear(), backbones.clear()
    lookup = Machines().lookup(store)
    assert all(lookup.find(one, weights=False) for one in runs) and not backbones
    assert sets == dict.fromkeys("abcd", 1)
    assert all(lookup.find(one) for one in runs) and sum(sets.values()) == 4 and backbones == {"tiny": 1}


# ---- weights ----


def test_a_dry_run_loads_no_backbone_and_says_what_it_did_not_compare(done, backbones):
    store, runs = done
    command = bench(store.folder.parent, "--datasets", "a", "--methods", "zero-shot,perl", "--seeds", 1, "--shots", 4)
    for one in runs:
        changed(store, one, backbone="other weights")
    result = run(*command, "--dry-run")
    assert result.stdout.startswith("not compared: the backbone's weights\n2 runs: 2 complete, 0 to do"), result.output
    assert not backbones
    assert run(*command).exit_code == 0 and backbones
    assert {record["backbone"] for record in store.records().complete} == {perlclip.load_backbone("tiny").fingerprint}


def test_the_parent_of_processes_loads_no_backbone_for_what_is_not_there(tmp_path, backbones):
    machines = Machines(jobs=2, plugins=("tests.bench.suites",))
    runs = grid(datasets=["a", "b"], methods=["zero-shot"])
    assert all(record["status"] == "complete" for record in run_all(runs, Store(tmp_path), machines))
    assert not backbones
    assert run_all(runs, Store(tmp_path), machines) and backbones == {"tiny": 1}, "compared before they are skipped"


# ---- memory ----


def test_the_room_for_test_images_is_an_option(tmp_path, monkeypatch):
    limits = []
    cache = performing.EvalCache
    monkeypatch.setattr(performing, "EvalCache", lambda limit: limits.append(limit) or cache(limit))
    options = ("--methods", "zero-shot", "--datasets", "a")
    assert run(*bench(tmp_path, *options)).exit_code == 0
    assert run(*bench(tmp_path, *options, "--cache-gib", 0.5)).exit_code == 0
    assert limits == [2 * 2**30, 2**29]
    assert run(*bench(tmp_path, *options, "--cache-gib", -1)).exit_code == 2


def test_what_a_kill_left_of_a_complete_run_is_removed(tmp_path, monkeypatch):
    """Killed right after its record was written, it kept its checkpoint for ever."""
    runs = Path(shutil.copytree(STORED, tmp_path / "runs"))
    before = {path.name: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    home = next(path.parent for path in runs.rglob(RECORD) if "zero-shot" in str(path))
    for name in (CHECKPOINT, FAILED, f".{FAILED}.0123456789abcdef", f".{CHECKPOINT}.0123456789abcdef"):
        (home / name).write_bytes(b"left")
    monkeypatch.setattr(performing, "perform", None)
    where = ("--datasets", "blurred_shapes", "--shots", 1, "--seeds", 1, "--device", "cpu", "--out", tmp_path)
    assert run("bench", "base-to-novel", "--methods", "zero-shot", *where).exit_code == 0
    assert before == {path.name: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
