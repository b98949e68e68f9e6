"""Doing many runs: what is complete is skipped, the rest is done in this process or in several.

A killed benchmark loses the run in progress at most, and of that only what came after its last checkpoint.
"""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from statistics import mean
from typing import Any

import torch

from perlclip.errors import PerlclipError
from perlclip.files import require_writable
from perlclip.progress import progress_bar
from perlclip.protocols import Workspace, perform, resolve
from perlclip.runs import Record, Run, Store, failed_record

STOP_SECONDS = 10.0  # what a process gets to finish its step and write its checkpoint

Plans = Mapping[Run, Mapping[str, Any]]  # what each run would be done with now
Prepare = Callable[[], None]
Outcomes = Generator[tuple[Run, Record], None, None]


def run_all(
    runs: Sequence[Run], store: Store, *, jobs: int = 1, device: str = "cpu", prepare: Prepare | None = None
) -> list[Record]:
    """Do what is not complete in the store; the records of all runs in their order, failed ones among them.

    With several jobs, `prepare` is called first in each process: fresh ones know no methods or suites that the caller
    has registered.
    """
    require_writable(store.folder)
    workspace = Workspace(device)
    plans = {run: resolve(run, workspace) for run in runs}
    done = complete(plans, store)
    sets = list(dict.fromkeys(run.dataset for run in runs))
    todo = sorted((run for run in plans if run not in done), key=lambda run: sets.index(run.dataset))
    jobs = min(jobs, len(todo))
    if jobs > 1:
        del workspace  # the processes load their own
        outcomes = _in_processes(todo, plans, store, _devices(device, jobs), prepare)
    else:
        outcomes = _in_process(todo, store, workspace)
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


def complete(plans: Plans, store: Store) -> dict[Run, Record]:
    """The runs that need not be done again."""
    found = ((run, store.find(run, plan)) for run, plan in plans.items())
    return {run: record for run, record in found if record is not None}


def estimate(todo: Sequence[Run], records: Sequence[Record], jobs: int = 1) -> float | None:
    """Seconds that runs will take: each the mean of its method's records, else of all; None if there are none."""
    times = [(record["run"]["method"], sum(record["seconds"].values())) for record in records]
    if not times:
        return None
    overall: float = mean(seconds for _, seconds in times)
    by_method: dict[str, float] = {
        name: mean(seconds for other, seconds in times if other == name) for name, _ in times
    }
    total = sum(by_method.get(run.method, overall) for run in todo)
    return total / max(1, min(jobs, len(todo)))


def summary(record: Record) -> str:
    """`noisy_shapes mmrl seed 2: base 71.2 novel 69.0, 14 s`."""
    run = record["run"]
    seed = f" seed {run['seed']}" if run["shots"] else ""
    if record["status"] == "failed":
        result = f"failed: {record['error']}"
    else:
        accuracies = " ".join(f"{name} {metrics['accuracy']:.1f}" for name, metrics in record["metrics"].items())
        result = f"{accuracies}, {sum(record['seconds'].values()):.0f} s"
    return f"{run['dataset']} {run['method']}{seed}: {result}"


def _attempt(run: Run, store: Store, workspace: Workspace) -> Record:
    """Perform a run and keep its record; an error makes one, too."""
    try:
        record = perform(run, workspace, store.home(run))
    except Exception as error:
        record = failed_record(run, error)
    store.write(run, record)
    return record


def _in_process(todo: Sequence[Run], store: Store, workspace: Workspace) -> Outcomes:
    for run in todo:
        yield run, _attempt(run, store, workspace)


def _in_processes(
    todo: Sequence[Run], plans: Plans, store: Store, devices: Sequence[str], prepare: Prepare | None
) -> Outcomes:
    """A process for each of `devices`, each taking the next run when it has done one."""
    queue = deque(todo)
    threads = max(1, torch.get_num_threads() // len(devices))
    busy: dict[Any, _Worker] = {}  # by connection

    def start(device: str) -> None:
        worker = _Worker(device, threads, (store, device, threads, prepare))
        busy[worker.connection] = worker.give(queue.popleft())

    try:
        for device in devices:
            start(device)
        while busy:
            for connection in wait(list(busy)):
                worker = busy.pop(connection)
                run, record = worker.run, worker.answer()
                if record is None:
                    record = store.find(run, plans[run])  # it may have died after its last write
                    if record is None:
                        record = failed_record(run, PerlclipError(f"its process died ({worker.cause()})"))
                        store.write(run, record)
                    if queue:
                        start(worker.device)
                elif queue:
                    busy[connection] = worker.give(queue.popleft())
                else:
                    worker.dismiss()
                yield run, record
    finally:
        _stop(list(busy.values()))


class _Worker:
    """A process that performs the runs it is given, one at a time."""

    run: Run

    def __init__(self, device: str, threads: int, arguments: tuple[Any, ...]) -> None:
        self.device = device
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, *arguments), daemon=True)
        with _start_conditions(threads):
            self.process.start()
        theirs.close()

    def give(self, run: Run) -> "_Worker":
        """Send the next run."""
        self.run = run
        with suppress(OSError):  # if it has just died, that shows when its answer is waited for
            self.connection.send(run)
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


def _work(connection: Connection, store: Store, device: str, threads: int, prepare: Prepare | None) -> None:
    """The life of a process: runs are received and their records sent until there are no more."""
    with suppress(KeyboardInterrupt, EOFError, BrokenPipeError):
        if sys.platform != "win32":
            os.setpgrp()  # a terminal's Ctrl-C is for the parent, which passes it on once
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        torch.set_num_threads(threads)
        if prepare:
            prepare()
        workspace = Workspace(device)
        while True:
            connection.send(_attempt(connection.recv(), store, workspace))


def _devices(device: str, jobs: int) -> list[str]:
    """A device for each process: several CUDA cards in turn."""
    cards = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    return [f"cuda:{i % cards}" if cards else device for i in range(jobs)]
