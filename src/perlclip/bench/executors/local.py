"""Doing many runs: what is complete is skipped, the rest is done in this process, in several, or on a Ray cluster.

A killed benchmark loses the run in progress at most, and of that only what came after its last checkpoint. Runs that
share a training are done one after the other, so that the later ones find the adapter of the first in the store.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from perlclip.bench.protocols import training_of
from perlclip.bench.run import Workspace, perform, resolve
from perlclip.bench.store import Record, Run, Store, failed_record
from perlclip.data.suites import SUITES
from perlclip.errors import PerlclipError, unknown_name
from perlclip.files import require_writable
from perlclip.progress import progress_bar

STOP_SECONDS = 10.0  # what a process gets to finish its step and write its checkpoint

Plans = Mapping[Run, Mapping[str, Any]]  # what each run would be done with now
Unit = deque[Run]  # runs that share a training
Outcomes = Generator[tuple[Run, Record], None, None]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where runs are done, which is no part of what they are."""

    executor: str = "local"  # or "ray"
    jobs: int = 1  # runs at a time
    device: str = "cpu"
    data: Path | None = None  # folder of the data sets, for suites that are on disk
    workers: int = 0  # processes that decode images, for each run
    prepare: Callable[[], None] | None = None  # called first in each new process, which lacks the caller's suites
    address: str = ""  # of a Ray cluster; a small one is started without
    gpus_per_run: float | None = None  # on Ray; if not given, one where the cluster has any

    def workspace(self) -> Workspace:
        """What the runs of one process share."""
        return Workspace(self.device, self.data, self.workers)


def run_all(runs: Sequence[Run], store: Store, machines: Machines | None = None) -> list[Record]:
    """Do what is not complete in the store; the records of all runs in their order, failed ones among them."""
    machines = machines or Machines()
    if machines.executor not in _EXECUTORS:
        raise unknown_name("executor", machines.executor, _EXECUTORS)
    for suite in {run.suite for run in runs}:
        if SUITES[suite].on_disk and machines.data is None:
            raise PerlclipError(f"suite {suite!r} reads its data sets from a folder: name it with --data ROOT")
    require_writable(store.folder)
    alone = machines.executor == "local" and machines.jobs == 1
    workspace = machines.workspace() if alone else Workspace()
    plans = {run: resolve(run, workspace) for run in runs}
    done = complete(plans, store)
    todo = units(runs, done)
    if alone or not todo:
        outcomes = _in_process(todo, store, workspace)
    else:
        del workspace  # the processes load their own
        outcomes = _EXECUTORS[machines.executor](todo, plans, store, machines)
    with progress_bar("runs", len(plans), done=len(done)) as bar, closing(outcomes):
        try:
            for run, record in outcomes:
                done[run] = record
                print(f"[{len(done)}/{len(plans)}] {summary(record)}", file=sys.stderr, flush=True)
                bar()
        except KeyboardInterrupt as error:
            count = sum(record["status"] == "complete" for record in done.values())
            raise KeyboardInterrupt(
                f"interrupted with {count} of {len(plans)} runs complete; the same command goes on from there"
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


def complete(plans: Plans, store: Store) -> dict[Run, Record]:
    """The runs that need not be done again."""
    found = ((run, store.find(run, plan)) for run, plan in plans.items())
    return {run: record for run, record in found if record is not None}


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


def attempt(run: Run, store: Store, workspace: Workspace) -> Record:
    """Perform a run and keep its record; an error makes one, too."""
    try:
        record = perform(run, workspace, store)
    except Exception as error:
        record = failed_record(run, error)
    store.write(run, record)
    return record


def _in_process(todo: Sequence[Unit], store: Store, workspace: Workspace) -> Outcomes:
    for unit in todo:
        for run in unit:
            yield run, attempt(run, store, workspace)


def _in_processes(todo: Sequence[Unit], plans: Plans, store: Store, machines: Machines) -> Outcomes:
    """So many processes, each taking the next unit when it has done one."""
    queue = deque(todo)
    devices = _devices(machines.device, min(machines.jobs, len(todo)))
    threads = max(1, torch.get_num_threads() // len(devices))
    busy: dict[Any, _Worker] = {}  # by connection

    def start(device: str, unit: Unit) -> None:
        worker = _Worker(store, replace(machines, device=device), threads)
        busy[worker.connection] = worker.give(unit)

    try:
        for device in devices:
            start(device, queue.popleft())
        while busy:
            for connection in wait(list(busy)):
                worker = busy.pop(connection)
                run, record = worker.run, worker.answer()
                unit = worker.unit or (queue.popleft() if queue else None)
                if record is None:
                    record = store.find(run, plans[run])  # it may have died after its last write
                    if record is None:
                        record = failed_record(run, PerlclipError(f"its process died ({worker.cause()})"))
                        store.write(run, record)
                    if unit:
                        start(worker.device, unit)
                elif unit:
                    busy[connection] = worker.give(unit)
                else:
                    worker.dismiss()
                yield run, record
    finally:
        _stop(list(busy.values()))


def _on_ray(todo: Sequence[Unit], plans: Plans, store: Store, machines: Machines) -> Outcomes:
    from perlclip.bench.executors.ray import on_ray

    return on_ray(todo, plans, store, machines)


_EXECUTORS = {"local": _in_processes, "ray": _on_ray}


class _Worker:
    """A process that performs the runs of a unit, one at a time."""

    run: Run
    unit: Unit

    def __init__(self, store: Store, machines: Machines, threads: int) -> None:
        self.device = machines.device
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        daemon = not machines.workers  # a daemon may not have processes of its own
        self.process = context.Process(target=_work, args=(theirs, store, machines, threads), daemon=daemon)
        with _start_conditions(threads):
            self.process.start()
        theirs.close()

    def give(self, unit: Unit) -> "_Worker":
        """Send the next run of a unit."""
        self.unit, self.run = unit, unit.popleft()
        with suppress(OSError):  # if it has just died, that shows when its answer is waited for
            self.connection.send(self.run)
        return self

    def answer(self) -> Record | None:
        """The record of the run, or None if the process is dead."""
        try:
            record: Record = self.connection.recv()
            return record
        except (EOFError, OSError):
            return None

    def cause(self) -> str:
        """What the process died of."""
        self.process.join()
        code = self.process.exitcode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def dismiss(self) -> None:
        """No more runs: the process ends by itself."""
        self.connection.close()
        self.process.join(STOP_SECONDS)

    def interrupt(self) -> None:
        """Ctrl-C, as if pressed in a terminal of its own."""
        if sys.platform == "win32" or self.process.pid is None:
            self.process.terminate()
        else:
            os.kill(self.process.pid, signal.SIGINT)


def _stop(workers: Sequence[_Worker]) -> None:
    """Let processes finish their step and write their checkpoint; all writes are atomic, so the rest may be killed."""
    for worker in workers:
        worker.interrupt()
    deadline = time.monotonic() + STOP_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()


@contextmanager
def _start_conditions(threads: int) -> Iterator[None]:
    """What a process inherits: its number of threads, which torch reads on import, and Ctrl-C held back for now."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # it would lift the block
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _work(connection: Connection, store: Store, machines: Machines, threads: int) -> None:
    """The life of a process: runs are received and their records sent until there are no more."""
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        if sys.platform != "win32":
            os.setpgrp()  # a terminal's Ctrl-C is for the parent, which passes it on once
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        torch.set_num_threads(threads)
        if machines.prepare:
            machines.prepare()
        workspace = machines.workspace()
        while True:
            connection.send(attempt(connection.recv(), store, workspace))


def default_jobs(device: str) -> int:
    """One process for each CUDA card, or one."""
    return max(1, _cards(device))


def _devices(device: str, jobs: int) -> list[str]:
    """A device for each process: several CUDA cards in turn."""
    cards = _cards(device)
    return [f"cuda:{i % cards}" if cards else device for i in range(jobs)]


def _cards(device: str) -> int:
    return torch.cuda.device_count() if device in ("auto", "cuda") else 0
