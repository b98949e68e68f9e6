"""Runs and benchmarks: identity, the store, doing many runs, what survives kills and failures, tables."""

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import perlclip
import perlclip.training.loop
from perlclip.bench import run as performing
from perlclip.bench.executors import local
from perlclip.bench.machines import Machines
from perlclip.bench.protocols import Benchmark
from perlclip.bench.run import Lookup, Workspace, resolve
from perlclip.bench.schedule import estimate, run_all
from perlclip.bench.store import CHECKPOINT, RECORD, Run, Store, failed_record
from perlclip.cli import main
from perlclip.data import DataSet
from perlclip.data.suites import SUITES
from perlclip.methods.base import config_dict
from perlclip.report.formats import runs_csv
from tests.bench.suites import NAMES, load
from tests.cli.test_cli import fails, run


def grid(**changes) -> list[Run]:
    return Benchmark(
        **{"suite": "little", "methods": ["zero-shot", "perl"], "seeds": [1, 2], "shots": [4]} | changes
    ).runs()


def numbers(record: dict) -> dict:
    """What must not depend on how and where the run was done."""
    return {key: record[key] for key in ("run", "backbone", "recipe", "config", "fit", "metrics", "predictions")}


def weights(store: Store, one: Run) -> bytes | None:
    path = store.home(one) / "adapter_model.safetensors"
    return path.read_bytes() if one.shots else None


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The last bits of a training depend on the number of threads; here it is the same in all processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace()


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Store, list[dict]]:
    """A benchmark without disturbances."""
    store = Store(tmp_path_factory.mktemp("done"))
    return store, run_all(grid(), store)


@pytest.fixture
def copy(done, tmp_path) -> Store:
    return Store(Path(shutil.copytree(done[0].folder, tmp_path / "copy")))


# ---- which runs ----


def test_the_grid_has_every_method_on_every_set_with_every_seed():
    runs = Benchmark(methods=["zero-shot", "perl", "perl"], seeds=[1, 2, 2]).runs()
    assert len({r.dataset for r in runs}) == 11 and len(runs) == 11 * (1 + 2)
    assert [r.dataset for r in runs[:3]] == ["toybox"] * 3, "runs of a set are together"
    assert {(r.recipe, r.shots, r.seed) for r in runs if r.method == "zero-shot"} == {("none", 0, 0)}
    assert {r.method for r in Benchmark().runs()} == set(perlclip.list_methods())


def test_names_are_readable_unique_and_safe():
    first = grid(methods=["perl"], shots=[16])[0]
    assert first.name == "base-to-novel/little/a/perl-fast-16shot-seed1"
    assert grid()[0].name == "base-to-novel/little/a/zero-shot"
    changes = (
        dict(dataset="b"), dict(method="coop"), dict(settings=(("steps", 2),)), dict(settings=(("steps", 3),)),
        dict(recipe="extended"), dict(shots=1), dict(seed=2), dict(backbone="x/y"), dict(precision="bfloat16"),
    )  # fmt: skip
    names = [first.name, *(replace(first, **change).name for change in changes)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[\w./+-]+", name) and ".." not in name for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(methods=["perll"]), "unknown method 'perll'; did you mean 'perl'?"),
        (dict(datasets=["bb"]), "unknown data set of suite 'little': 'bb'"),
        (dict(suite="toybix"), "did you mean 'toybox'?"),
        (dict(protocol="base-to-base"), "did you mean 'base-to-novel'?"),
        (dict(settings={"perl": {"stps": 2}}), "did you mean 'steps'?"),
        (dict(seeds=[]), "at least one seed"),
    ],
)
def test_unknown_names_are_refused(changes, words):
    with pytest.raises(perlclip.PerlclipError, match=re.escape(words)):
        grid(**changes)


@pytest.mark.parametrize("method", perlclip.list_methods())
def test_what_a_run_would_use_is_what_it_uses(method, workspace, tiny):
    """Otherwise a finished run would never be recognised."""
    config = resolve(grid(methods=[method])[0], workspace)["config"]
    recipe = "fast" if perlclip.methods.method_class(method).recipes else ""
    assert config == json.loads(json.dumps(config_dict(perlclip.create_method(method, tiny, recipe=recipe))))


# ---- the record and the store ----


def test_a_record_holds_the_whole_run(done):
    store, records = done
    record = records[1]
    assert record["run"] == grid()[1].identity() and record["run"]["method"] == "perl"
    assert record["parameters"] == 1122 and record["fit"]["images"] == 8 and record["config"]["steps"] == 4
    for half in ("base", "novel"):
        metrics, answers = record["metrics"][half], record["predictions"][half]
        for key, accuracy in (("first", metrics["step_accuracy"][0]), ("last", metrics["accuracy"])):
            right = np.equal(answers[key], answers["labels"])
            assert len(right) == metrics["images"] == 10 and 100 * right.mean() == pytest.approx(accuracy)
    zero_shot = records[0]
    assert zero_shot["recipe"] is zero_shot["fit"] is None and zero_shot["parameters"] == 0
    for half in ("base", "novel"):
        assert zero_shot["metrics"][half]["accuracy"] == record["metrics"][half]["step_accuracy"][0]
    assert record["environment"]["perlclip"] == perlclip.__version__ and record["environment"]["threads"] >= 1
    assert set(record["seconds"]) == {"fit", "eval"} and record["memory"]["process_bytes"] > 1e6
    assert json.loads((store.home(grid()[1]) / RECORD).read_bytes()) == record


def test_the_adapter_beside_it_answers_as_recorded(done):
    store, records = done
    adapter = perlclip.load_adapter(store.home(grid()[1]))
    assert adapter.class_names == NAMES[:2]
    result = perlclip.evaluate(adapter.method, load("a").test.base())
    assert result.metrics() == records[1]["metrics"]["base"] == adapter.info["metrics"]["base"]


def test_few_images_are_looked_at_as_often_as_by_fit(tmp_path):
    one, *_ = grid(methods=["perl"], seeds=[1], recipe="strong", settings={"perl": {"steps": 1, "depth": 11}})
    (record,) = run_all([one], Store(tmp_path))
    assert (record["fit"]["images"], record["fit"]["recipe"]["epochs"]) == (8, 40)
    rule = {"epochs": 10, "least_steps": 480, "most_epochs": 40}  # which is known before the images are
    assert record["recipe"] == {**record["fit"]["recipe"], **rule}


def test_complete_runs_are_not_done_again(done, monkeypatch, capsys):
    store, records = done
    monkeypatch.setattr(performing, "perform", None)
    assert run_all(grid(), store) == run_all(grid(), store, Machines(jobs=2)) == records
    assert "/6]" not in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["torn", "not ours", "failed", "other run", "recipe", "config", "backbone"])
def test_a_record_that_does_not_hold_any_more_counts_as_not_done(damage, copy, workspace):
    one = grid()[1]
    path = copy.home(one) / RECORD
    record = json.loads(path.read_bytes())
    content = {
        "torn": path.read_bytes()[:-9],
        "not ours": b"[1, 2]",
        "failed": json.dumps(failed_record(one, ValueError("no"))).encode(),
        "other run": json.dumps(record | {"run": record["run"] | {"seed": 9}}).encode(),
    }
    other = {"recipe": record["recipe"] | {"lr": 1.0}, "config": {}, "backbone": "0"}
    path.write_bytes(content.get(damage) or json.dumps(record | {damage: other[damage]}).encode())
    assert Lookup(copy, workspace).find(one) is None and copy.find(one, resolve(one, workspace)) is None
    assert Lookup(copy, workspace).find(grid()[2]) is not None
    found = copy.records()
    unusable = damage in ("torn", "not ours", "failed")
    assert len(found.complete) == 6 - unusable
    assert len(found.failed) == (damage == "failed") and len(found.damaged) == (damage in ("torn", "not ours"))


def test_a_changed_recipe_makes_runs_stale_and_their_checkpoints_useless(copy, tiny, monkeypatch):
    """The old checkpoint is dropped, not gone on from and not stumbled over."""
    one = grid()[1]
    old = copy.home(one) / CHECKPOINT
    perlclip.fit(perlclip.create_method("perl", tiny), load("a").train.base(), recipe="extended", checkpoint=old)
    monkeypatch.setitem(perlclip.method_class("perl").recipes, "fast", perlclip.Recipe(epochs=2))
    (record,) = run_all([one], copy)
    assert record["status"] == "complete" and record["recipe"]["epochs"] == record["fit"]["recipe"]["epochs"] == 2
    assert not old.exists()


def test_training_never_sees_the_test_set(done, tmp_path, monkeypatch):
    """Other labels in the test set: the same adapter, to the byte."""

    def poisoned(name: str, root: Path | None = None) -> DataSet:
        data = load(name)
        lies = replace(data.test, labels=[3 - label for label in data.test.labels])
        return replace(data, test=lies, val=lies)

    monkeypatch.setitem(SUITES, "little", replace(SUITES["little"], load=poisoned))
    one = grid()[1]
    (record,) = run_all([one], Store(tmp_path))
    assert record["metrics"] != done[1][1]["metrics"]
    assert weights(Store(tmp_path), one) == weights(done[0], one)


# ---- doing many ----


def test_a_failing_run_does_not_stop_the_others(tmp_path, capsys):
    runs = grid(datasets=["broken", "a"], methods=["zero-shot"])
    broken, good = run_all(runs, Store(tmp_path))
    assert (broken["status"], broken["error"]) == ("failed", "these pictures are lost")
    assert 'raise PerlclipError("these pictures are lost")' in broken["traceback"]
    assert good["status"] == "complete" and len(Store(tmp_path).records().failed) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[1/2] broken zero-shot: failed: these pictures are lost"
    assert re.fullmatch(r"\[2/2\] a zero-shot: base \d+\.\d novel \d+\.\d, \d+ s", lines[1])


def test_several_processes_give_the_same_numbers_and_a_dying_one_is_replaced(done, tmp_path):
    shared = grid(suite="fine", protocol="all", datasets=["a"], methods=["perl"], seeds=[1])
    runs = [*grid(datasets=["deadly"], methods=["zero-shot"]), *grid(), *shared]
    died, *records = run_all(runs, Store(tmp_path), Machines(jobs=2, plugins=("tests.bench.suites",)))
    records, (halves, cross, shift) = records[:-3], records[-3:]
    assert (died["status"], died["error"]) == ("failed", "its process died (signal SIGKILL)")
    assert [numbers(record) for record in records] == [numbers(record) for record in done[1]]
    assert [weights(Store(tmp_path), one) for one in grid()] == [weights(done[0], one) for one in grid()]
    assert shift["adapter_of"] == shared[1].name and cross["adapter_of"] is halves["adapter_of"] is None


def test_processes_share_the_cards(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert local._devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert local._devices("cuda:1", 2) == ["cuda:1", "cuda:1"] and local._devices("cpu", 1) == ["cpu"]


TRAINING = ["--suite", "little", "--datasets", "a", "--methods", "perl", "--recipe", "extended", "--shots", "8"]


def start(out: Path, *options: str) -> subprocess.Popen:
    """A benchmark in a process of its own, and in a process group of its own, as a shell would start it."""
    command = [sys.executable, "-c", "from perlclip.cli import main; main()", "bench", "base-to-novel", *TRAINING]
    command += ["--plugin", "tests.bench.eager", "--device", "cpu", "--out", str(out)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, cwd=root, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for(process: subprocess.Popen, found) -> None:
    while not found() and process.poll() is None:
        time.sleep(0.005)


def test_a_killed_benchmark_goes_on_where_it_was(tmp_path):
    """Killed in the second of two trainings; the end is that of an undisturbed benchmark."""
    runs = grid(methods=["perl"], recipe="extended", datasets=["a"], shots=[8])
    store, whole = Store(tmp_path / "out" / "runs"), Store(tmp_path / "whole")
    first, second = (store.home(one) for one in runs)
    process = start(tmp_path / "out", "--seeds", "1", "2")
    wait_for(process, (second / CHECKPOINT).exists)
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.communicate()
    assert (second / CHECKPOINT).exists() and not (second / RECORD).exists()
    written = (first / RECORD).stat().st_mtime_ns
    resumed = run_all(runs, store)
    assert (first / RECORD).stat().st_mtime_ns == written, "what was complete is not done again"
    assert [numbers(record) for record in resumed] == [numbers(record) for record in run_all(runs, whole)]
    assert weights(store, runs[1]) == weights(whole, runs[1])
    assert not list(store.folder.rglob(CHECKPOINT))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_stops_all_processes_and_says_how_to_go_on(tmp_path, number, code):
    process = start(tmp_path, "--jobs", "2", "--seeds", *map(str, range(20)))
    wait_for(process, lambda: list(tmp_path.rglob(CHECKPOINT)))
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)  # ends when the last process has closed stderr
    assert process.returncode == code, errors
    assert re.search(r"error: interrupted with \d+ of 20 runs complete; the same command goes on from there\n$", errors)
    assert "Traceback" not in errors
    found = Store(tmp_path / "runs").records()
    assert len(found.complete) < 20 and not found.failed and not found.damaged


def test_processes_end_with_a_killed_benchmark(tmp_path):
    process = start(tmp_path, "--jobs", "2", "--seeds", *map(str, range(20)))
    wait_for(process, lambda: len(list(tmp_path.rglob(CHECKPOINT))) > 1)
    process.kill()
    process.communicate(timeout=20)  # ends when the last process has closed stderr
    assert process.returncode == -signal.SIGKILL and len(Store(tmp_path / "runs").records().complete) < 20


def test_a_process_that_cannot_begin_is_a_failed_run(tmp_path):
    """The parent knows the suite, its processes do not."""
    machines = Machines(jobs=2, plugins=("tests.bench.missing",))
    (record,) = run_all(grid(datasets=["a"], methods=["zero-shot"]), Store(tmp_path), machines)
    assert record["error"].startswith("cannot load plugin 'tests.bench.missing'")


def test_processes_may_have_processes_that_decode(done, tmp_path):
    machines = Machines(jobs=2, workers=1, plugins=("tests.bench.suites",))
    (record,) = run_all(grid()[1:2], Store(tmp_path), machines)
    assert numbers(record) == numbers(done[1][1])


# ---- the command ----


def bench(out: Path, *options) -> tuple:
    return ("bench", "base-to-novel", "--suite", "little", "--device", "cpu", "--out", out, *options)


def seeds(*words: str) -> list[int]:
    return main.commands["bench"].make_context("bench", ["base-to-novel", "--out", "x", *words]).params["seeds"]


def test_seeds_can_be_given_in_every_way():
    assert seeds() == [1, 2, 3]
    for words in (["--seeds", "4,5,6"], ["--seeds", "4", "5", "6"], ["--seeds", "4", "--seeds", "5,6"]):
        assert seeds(*words) == seeds(*words, "--shots", "1") == [4, 5, 6]
    context = main.commands["bench"].make_context("bench", ["--out", "x", "--seeds", "4", "5", "base-to-novel"])
    assert context.params["seeds"] == [4, 5] and context.params["protocol"] == "base-to-novel"
    for wrong in (["--seeds", "one"], ["--seeds", "-1"], ["--seeds", "1,,2"], ["--methods", ""]):
        assert run(*bench("x", *wrong)).exit_code == 2


def test_bench_prints_and_writes_the_tables(copy, tmp_path):
    shutil.move(copy.folder, tmp_path / "out" / "runs")
    result = run(*bench(tmp_path / "out", "--methods", "zero-shot,perl", "--seeds", 1, 2, "--shots", 4))
    assert result.exit_code == 0, result.output
    report = (tmp_path / "out" / "report.md").read_text()
    mean = next(line for line in report.splitlines() if line.startswith("| perl"))
    assert mean in result.stdout and "4 shots" in report and (tmp_path / "out" / "index.html").exists()
    rows = list(csv.DictReader((tmp_path / "out" / "runs.csv").open()))
    assert len(rows) == 6 and {row["method"] for row in rows} == {"perl", "zero-shot"}
    assert all(row["base_k0"] == "" for row in rows if row["method"] == "zero-shot")
    assert all(float(row["base"]) == float(row["base_k4"]) for row in rows if row["method"] == "perl")


def test_bench_goes_on_after_failures_and_ends_with_an_error(tmp_path):
    options = ("--methods", "zero-shot", "--datasets", "broken,a")
    assert "1 of 2 runs failed, the first with: these pictures are lost" in fails(*bench(tmp_path, *options))
    assert "failed: base-to-novel/little/broken/zero-shot" in (tmp_path / "report.md").read_text()


def test_dry_run_lists_what_is_left_and_how_long_it_takes(copy, tmp_path):
    shutil.move(copy.folder, tmp_path / "out" / "runs")
    options = ("--methods", "perl", "--shots", 4, "--dry-run", "--seeds", 1, 2)
    lines = run(*bench(tmp_path / "out", *options, 3)).stdout.splitlines()
    assert lines[:2] == [f"base-to-novel/little/{name}/perl-fast-4shot-seed3" for name in "ab"]
    assert lines[2] == "not compared: the backbone's weights"
    assert re.fullmatch(r"6 runs: 4 complete, 2 to do, about \d+\.\d min with --jobs 1", lines[3])
    nothing = run(*bench(tmp_path / "new", *options)).stdout.splitlines()[-1]
    assert nothing == "4 runs: 0 complete, 4 to do, an unknown time with --jobs 1"
    assert not (tmp_path / "new").exists()


def test_settings_go_to_the_methods_that_have_them(tmp_path):
    options = ("--datasets", "a", "--seeds", 1, "--dry-run", "--methods", "zero-shot,perl")
    lines = run(*bench(tmp_path, *options, "--set", "steps=2")).stdout.splitlines()
    assert lines[0].endswith("/zero-shot") and re.search(r"/perl-fast-16shot-seed1-[0-9a-f]{8}$", lines[1])
    assert "unknown setting of these methods: 'stps'; did you mean 'steps'?" in fails(
        *bench(tmp_path, *options, "--set", "stps=2")
    )
    assert "unknown recipe of method 'perl'" in fails(*bench(tmp_path, "--methods", "perl", "--recipe", "fats"))


# ---- estimates and tables, from made-up records ----


def made_up(method: str, dataset: str, seed: int, base: float, novel: float, seconds: float = 1.0) -> dict:
    shots, recipe = (16, "fast") if seed else (0, "none")
    one = Run(
        protocol="base-to-novel", suite="little", dataset=dataset, method=method, recipe=recipe, shots=shots, seed=seed
    )
    metrics = {half: {"accuracy": a, "step_accuracy": [a]} for half, a in (("base", base), ("novel", novel))}
    costs = {"parameters": 1000 * bool(seed), "seconds": {"fit": seconds, "eval": 0.0}, "memory": {}}
    return {"run": one.identity(), "status": "complete", "metrics": metrics, **costs}


RECORDS = [
    made_up("zero-shot", "a", 0, 60, 60), made_up("zero-shot", "b", 0, 80, 40),
    made_up("perl", "a", 1, 70, 50), made_up("perl", "a", 2, 74, 54),
    made_up("perl", "b", 1, 90, 30), made_up("perl", "b", 2, 90, 34),
]  # fmt: skip


def test_the_csv_has_every_run_at_full_precision():
    records = [made_up("perl", "a", 1, 100 / 3, 200 / 7), RECORDS[0]]
    rows = list(csv.DictReader(io.StringIO(runs_csv(records))))
    assert float(rows[0]["base"]) == 100 / 3 and float(rows[0]["novel"]) == 200 / 7
    assert [row["recipe"] for row in rows] == ["fast", "none"]


def test_an_estimate_takes_the_same_method_or_else_all():
    records = [made_up("perl", "a", 1, 1, 1, 10), made_up("perl", "b", 1, 1, 1, 20), made_up("coop", "a", 1, 1, 1, 60)]
    todo = grid(methods=["perl", "coop", "mma"], seeds=[7], datasets=["a"])
    assert estimate(todo, records) == 15 + 60 + 30
    assert estimate(todo, records, jobs=2) == 105 / 2
    assert estimate([], records) == 0 and estimate(todo, []) is None
