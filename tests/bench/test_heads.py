"""Runs with a head: rows of their own beside those without, which stay what they were; all classes at once."""

import pytest

from perlclip.adapters.folder import read_info
from perlclip.bench.protocols import ASKED, Benchmark
from perlclip.bench.schedule import run_all
from perlclip.bench.store import Run, Store
from perlclip.report.write import write_report
from tests.bench.suites import load

SET = "a"
GRID = dict(suite="little", datasets=[SET], seeds=[1], shots=[4])


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(tmp_path_factory.mktemp("bench") / "runs")


@pytest.fixture(scope="module")
def records(store) -> dict[str, dict]:
    grids = [
        Benchmark(methods=["zero-shot", "ridge", "coop"], **GRID),
        Benchmark(methods=["zero-shot", "ridge", "coop"], head=True, **GRID),
        Benchmark(protocol="generalised", methods=["ridge", "coop"], head=True, **GRID),
    ]
    runs = list(dict.fromkeys(run for grid in grids for run in grid.runs()))
    return {run.name: record for run, record in zip(runs, run_all(runs, store), strict=True)}


def test_a_run_without_a_head_is_called_and_identified_as_before():
    run = Run(protocol="base-to-novel", suite="little", dataset=SET, method="perl", recipe="fast", shots=16, seed=1)
    assert run.name == f"base-to-novel/little/{SET}/perl-fast-16shot-seed1" and "head" not in run.identity()


def test_every_row_is_there_once(records):
    names = {name.rpartition("/")[2] for name in records if name.startswith("base-to-novel")}
    assert names == {"zero-shot", "ridge-fast-4shot-seed1", "coop-fast-4shot-seed1", "coop-fast-4shot-seed1-head"}
    assert {record["status"] for record in records.values()} == {"complete"}


def test_a_head_is_counted_recorded_and_saved(records, store):
    with_head = records[f"base-to-novel/little/{SET}/coop-fast-4shot-seed1-head"]
    without = records[f"base-to-novel/little/{SET}/coop-fast-4shot-seed1"]
    ridge = records[f"base-to-novel/little/{SET}/ridge-fast-4shot-seed1"]
    assert "head" not in without and "head" not in without["run"]
    assert with_head["run"]["head"] is True and with_head["head"]["how"] == "rehearsal"
    classes = len(load(SET).test.base().class_names)
    assert ridge["parameters"] == classes * 129
    home = store.folder / f"base-to-novel/little/{SET}/coop-fast-4shot-seed1-head"
    numbers = with_head["parameters"] - without["parameters"]
    assert numbers == read_info(home)["head"]["numbers"] and numbers > classes * 128
    assert numbers % 128 in (0, classes), "what is read half way up has a bias for each class"
    assert (
        with_head["metrics"]["novel"] == without["metrics"]["novel"] or with_head["head"]["answer"] != "adapted + head"
    )
    home = store.folder / f"base-to-novel/little/{SET}/ridge-fast-4shot-seed1"
    assert read_info(home)["head"]["numbers"] == ridge["parameters"]


def test_all_classes_at_once_with_the_same_training(records):
    for method in ("ridge-fast-4shot-seed1", "coop-fast-4shot-seed1-head"):
        half, among = (records[f"{name}/little/{SET}/{method}"] for name in ("base-to-novel", "generalised"))
        assert (
            among["adapter_of"] == f"base-to-novel/little/{SET}/{method}" and among["parameters"] == half["parameters"]
        )
        for part in ("base", "novel"):
            assert among["metrics"][part]["images"] == half["metrics"][part]["images"]
            assert among["metrics"][part]["accuracy"] <= half["metrics"][part]["accuracy"] + 1e-9


def test_a_run_without_a_head_takes_the_training_of_one_with(records, tmp_path):
    store = Store(tmp_path)
    (with_head,) = Benchmark(methods=["coop"], head=True, **GRID).runs()
    run_all([with_head], store)
    (run,) = Benchmark(methods=["coop"], **GRID).runs()
    (bare,) = run_all([run], store)
    alone = records[run.name]
    assert bare["adapter_of"] == with_head.name and bare["seconds"]["fit"] == 0 and not bare.get("head")
    for key in ("metrics", "predictions", "parameters", "fit"):
        assert bare[key] == alone[key]


def test_halves_among_all_keep_every_class():
    test = load(SET).test
    base, novel = (ASKED[f"{half} among all"](test) for half in ("base", "novel"))
    assert base.class_names == novel.class_names == test.class_names
    assert sorted([*base.labels, *novel.labels]) == sorted(test.labels)
    assert max(base.labels) < min(novel.labels)


def test_the_report_has_rows_with_a_head_and_all_classes_at_once(records, store, tmp_path):
    write_report([store.folder], tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "coop + head" in page and "Generalised on little" in page and "ridge" in page
