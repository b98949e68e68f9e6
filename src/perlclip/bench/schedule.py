"""Doing many runs: what is complete is skipped, the rest is done in this process or by an executor.

A killed benchmark loses the run in progress at most, and of that only what came after its last checkpoint. Runs that
share a training are done one after the other, so that the later ones find the adapter of the first in the store.
"""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from statistics import mean

from perlclip.bench.executors import executor
from perlclip.bench.machines import Machines, Outcomes, Unit
from perlclip.bench.protocols import training_of
from perlclip.bench.run import Lookup, Workspace, attempt
from perlclip.bench.store import Record, Run, Store
from perlclip.data.suites import suite
from perlclip.errors import PerlclipError
from perlclip.files import require_writable
from perlclip.progress import progress_bar


def run_all(runs: Sequence[Run], store: Store, machines: Machines | None = None) -> list[Record]:
    """Do what is not complete in the store; the records of all runs in their order, failed ones among them."""
    machines = machines or Machines()
    execute = executor(machines.executor)
    for name in {run.suite for run in runs}:
        if suite(name).on_disk and machines.data is None:
            raise PerlclipError(f"suite {name!r} reads its data sets from a folder: name it with --data ROOT")
    require_writable(store.folder)
    alone = machines.executor == "local" and machines.jobs == 1
    lookup = Lookup(store, machines.workspace()) if alone else machines.lookup(store)
    done = complete(runs, lookup)
    for run in done:
        store.forget_attempts(run)
    todo, total = units(runs, done), len(set(runs))
    here = alone or not todo
    outcomes = _in_process(todo, store, lookup.workspace) if here else execute(todo, store, machines)
    del lookup  # with what it has read: other processes load their own backbone
    with progress_bar("runs", total, done=len(done)) as bar, closing(outcomes):
        try:
            for run, record in outcomes:
                done[run] = record
                print(f"[{len(done)}/{total}] {summary(record)}", file=sys.stderr, flush=True)
                bar()
        except KeyboardInterrupt as error:
            count = sum(record["status"] == "complete" for record in done.values())
            raise type(error)(
                f"interrupted with {count} of {total} runs complete; the same command goes on from there"
            ) from error
    return [done[run] for run in runs]


def units(runs: Sequence[Run], done: Mapping[Run, Record]) -> list[Unit]:
    """What is left to do: runs that share a training together, those that train on one data set behind each other."""
    sets = list(dict.fromkeys(run.dataset for run in runs))
    groups: dict[Run, Unit] = {}
    for run in sorted(dict.fromkeys(runs), key=lambda run: sets.index(run.dataset)):
        if run not in done:
            groups.setdefault(training_of(run), deque()).append(run)
    return list(groups.values())


def complete(runs: Sequence[Run], lookup: Lookup, *, weights: bool = True) -> dict[Run, Record]:
    """The runs that need not be done again."""
    found = {run: lookup.find(run, weights=weights) for run in runs}
    return {run: record for run, record in found.items() if record is not None}


def estimate(todo: Sequence[Run], records: Sequence[Record], jobs: int = 1) -> float | None:
    """Seconds that runs will take: each the mean of records of its kind, or else of all; None if there are none."""
    times: dict[tuple[str, ...], list[float]] = {}
    for record in records:
        run = record["run"]
        for kind in _kinds(run["protocol"], run["method"], str(run["shots"])):
            times.setdefault(kind, []).append(sum(record["seconds"].values()))
    if not times:
        return None
    nearest = (_kinds(run.protocol, run.method, str(run.shots)) for run in todo)
    total = sum(mean(next(times[kind] for kind in kinds if kind in times)) for kinds in nearest)
    return total / max(1, min(jobs, len(todo)))


def _kinds(protocol: str, method: str, shots: str) -> list[tuple[str, ...]]:
    """From the closest to all there are."""
    return [(protocol, method, shots), (protocol, method), (method,), ()]


def summary(record: Record) -> str:
    """`noisy_shapes mmrl seed 2: base 71.2 novel 69.0, 14 s`; of many tests the mean."""
    run = record["run"]
    words = [run["dataset"], run["method"], *(f"{key}={value}" for key, value in run["settings"].items())]
    if run["shots"]:
        words += [f"{run['shots']}-shot"] * (run["protocol"] == "few-shot") + [f"seed {run['seed']}"]
    if record["status"] == "failed":
        return f"{' '.join(words)}: failed: {record['error']}"
    values = {name: metrics["accuracy"] for name, metrics in record["metrics"].items()}
    if len(values) > 2:
        values = {f"{run['protocol']}, mean of {len(values)}": mean(values.values())}
    accuracies = " ".join(f"{name} {value:.1f}" for name, value in values.items())
    return f"{' '.join(words)}: {accuracies}, {sum(record['seconds'].values()):.0f} s"


def _in_process(todo: Sequence[Unit], store: Store, workspace: Workspace) -> Outcomes:
    for unit in todo:
        for run in unit:
            yield run, attempt(run, store, workspace)
