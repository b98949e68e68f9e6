"""The ray executor, against a real Ray on this machine: the same numbers, also when a worker is killed."""

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perlclip
from perlclip.bench.executors import ray as executor_ray
from perlclip.bench.machines import Machines
from perlclip.bench.schedule import run_all
from perlclip.bench.store import CHECKPOINT, Store
from tests.bench.test_runs import bench, done, grid, numbers, one_thread, weights  # noqa: F401 (fixtures)
from tests.cli.test_cli import fails

ray = pytest.importorskip("ray")


# A plugin as a user would write one, in a file: one worker dies in its second step, once.
KILLER = """
import os, signal
from pathlib import Path
import perlclip.training.loop as loop
import tests.bench.eager

train_step = loop._Run.train_step

def step(run, *batch):
    if run.step == 1:
        try:
            Path({marker!r}).touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return train_step(run, *batch)

loop._Run.train_step = step
"""


def test_a_killed_worker_is_replaced_and_its_run_goes_on(done, tmp_path, capsys):  # noqa: F811
    """Two workers, one of which is killed in the middle of a training: the end is that of the local executor."""
    store, marker = Store(tmp_path / "runs"), tmp_path / "killed"
    plugin = tmp_path / "killer.py"
    plugin.write_text(KILLER.format(marker=str(marker)))
    runs = grid(datasets=["a"])
    records = run_all(runs, store, Machines(executor="ray", jobs=2, plugins=(str(plugin),)))
    assert marker.exists(), "a worker was killed"
    assert [numbers(record) for record in records] == [numbers(record) for record in done[1][: len(runs)]]
    assert [weights(store, one) for one in runs] == [weights(done[0], one) for one in runs]
    assert not list(store.folder.rglob(CHECKPOINT)) and not ray.is_initialized()
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("runs: ")]  # of progress
    assert len(lines) == len(runs) and all(line.startswith("[") for line in lines), "nothing but our own lines"


def cluster_with(error: Exception) -> SimpleNamespace:
    def get(_: Any) -> None:
        raise error

    return SimpleNamespace(get=get, exceptions=ray.exceptions)


def test_a_run_whose_workers_all_die_has_failed_unless_it_was_complete(done, tmp_path):  # noqa: F811
    one, dead = grid()[0], cluster_with(ray.exceptions.WorkerCrashedError())
    assert executor_ray._record(dead, None, one, done[0], Machines()) == done[1][0], "it died after its last write"
    record = executor_ray._record(dead, None, one, Store(tmp_path), Machines())
    assert record["status"] == "failed" and record["error"].startswith("its workers died, 4 times: The worker died")
    unfit = cluster_with(ray.exceptions.RayTaskError("perform", "", perlclip.PerlclipError("no backbone here")))
    assert executor_ray._record(unfit, None, one, Store(tmp_path), Machines())["error"] == "no backbone here"
    assert len(Store(tmp_path).records().failed) == 1


@pytest.mark.parametrize(
    ("cards", "given", "expected"),
    [
        (0, dict(device="auto"), ("cpu", 0)),
        (2, dict(device="auto"), ("cuda", 1)),
        (2, dict(device="cpu"), ("cpu", 0)),
        (2, dict(device="auto", gpus_per_run=0.25), ("cuda", 0.25)),
        (2, dict(device="auto", gpus_per_run=0.0), ("cpu", 0)),
    ],
)
def test_runs_get_a_share_of_a_gpu_where_there_are_any(cards, given, expected):
    cluster = SimpleNamespace(cluster_resources=lambda: {"GPU": cards} if cards else {})
    there = executor_ray._there(Machines(executor="ray", data=Path("data"), **given), cluster)
    assert (there.device, there.gpus_per_run) == expected and there.data.is_absolute()


def test_what_ray_cannot_do_is_said_in_a_sentence(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ("--executor", "ray", "--methods", "zero-shot")
    said = fails(*bench(tmp_path, *options, "--address", f"127.0.0.1:{port}"))
    assert f"no Ray cluster answers at 127.0.0.1:{port}" in said
    with pytest.raises(perlclip.PerlclipError, match="the Ray cluster has no GPU"):
        executor_ray._there(Machines(gpus_per_run=0.5), SimpleNamespace(cluster_resources=dict))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "the ray executor needs Ray: pip install 'perlclip[ray]'" in fails(*bench(tmp_path, *options))
