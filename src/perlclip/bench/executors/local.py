"""Runs in processes of this machine, each taking the next unit when it has done one."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from threading import Thread

import torch

from perlclip.bench.machines import STOP_SECONDS, Machines, Outcomes, Unit, cuda_cards, settle, work
from perlclip.bench.store import Record, Run, Store
from perlclip.errors import PerlclipError, Terminated


def execute(todo: Sequence[Unit], store: Store, machines: Machines) -> Outcomes:
    """So many processes; the runs of one that dies are done by the next one in its place, but for that in progress."""
    queue = deque(todo)
    devices = _devices(machines.device, min(machines.jobs, len(todo)))
    slots = [_Slot(store, replace(machines, device=device), len(devices)) for device in devices]
    busy: dict[Future[Record], tuple[_Slot, Run, Unit]] = {}

    def give(slot: _Slot, unit: Unit) -> None:
        run = unit.popleft()
        busy[slot.submit(run)] = slot, run, unit

    try:
        for slot in slots:
            give(slot, queue.popleft())
        while busy:
            for future in wait(busy, return_when=FIRST_COMPLETED).done:
                slot, run, unit = busy[future]
                record = slot.record(future, run)
                del busy[future]
                if unit or queue:
                    give(slot, unit or queue.popleft())
                yield run, record
    finally:
        _stop(slots, busy)


class _Slot:
    """A place for one process, which does one run after the other; if it dies, the next run gets a new one."""

    def __init__(self, store: Store, machines: Machines, slots: int) -> None:
        self.store, self.machines = store, machines
        self.threads = max(1, torch.get_num_threads() // slots)
        self.pool: ProcessPoolExecutor | None = None
        self.process: multiprocessing.process.BaseProcess | None = None

    def submit(self, run: Run) -> Future[Record]:
        """Have the process do a run."""
        task = partial(_work, run, self.store, self.machines, self.threads)
        if self.pool is not None:
            try:
                return self.pool.submit(task)
            except BrokenProcessPool:  # it died with nothing to do
                self.close()
        self.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
        others = set(multiprocessing.active_children())
        try:
            with _start_conditions(self.threads):
                return self.pool.submit(task)
        finally:  # also if Ctrl-C, held back meanwhile, comes right now
            self.process = next(iter(set(multiprocessing.active_children()) - others), None)

    def record(self, future: Future[Record], run: Run) -> Record:
        """What the process brought, or a failed record if it died or could not even begin."""
        try:
            return future.result()
        except BrokenProcessPool:
            self.close()  # after which the exit code is known
            code = self.process.exitcode or 0 if self.process else 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return settle(run, self.store, self.machines, PerlclipError(f"its process died ({how})"))
        except Terminated:  # somebody ended this one alone
            return settle(run, self.store, self.machines, PerlclipError("its process was ended (signal SIGTERM)"))
        except Exception as error:
            return settle(run, self.store, self.machines, error)

    def interrupt(self) -> None:
        """Ctrl-C, as if pressed in a terminal of its own."""
        if self.process is None or self.process.pid is None or not self.process.is_alive():
            return
        if sys.platform == "win32":
            self.process.terminate()
        else:
            os.kill(self.process.pid, signal.SIGINT)

    def close(self, *, kill: bool = False) -> None:
        """Wait for the process to end, which it does by itself when it has died or has nothing to do."""
        if self.pool is not None:
            if kill and self.process is not None:
                self.process.kill()
            self.pool.shutdown()
            self.pool = None


def _stop(slots: Sequence[_Slot], busy: dict[Future[Record], tuple[_Slot, Run, Unit]]) -> None:
    """Let processes finish their step and write their checkpoint; all writes are atomic, so the rest may be killed."""
    try:
        for slot, _, _ in busy.values():
            slot.interrupt()
        wait(busy, timeout=STOP_SECONDS)
    finally:
        # One that Ctrl-C met while a library's threads were loading weights may never end by itself.
        for slot in slots:
            slot.close(kill=True)


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


def _begin() -> None:
    """First of all in a new process: a terminal's Ctrl-C is for the parent, which passes it on once."""
    if sys.platform != "win32":
        os.setpgrp()
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A pool's process does not notice by itself that its parent was killed, and would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(run: Run, store: Store, machines: Machines, threads: int) -> Record:
    """In the process. Ctrl-C and SIGTERM count while a run is done; between two there is nothing to stop."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, _terminate)
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return work(run, store, machines, threads)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(*_: object) -> None:
    raise Terminated("terminated")


def _devices(device: str, jobs: int) -> list[str]:
    """A device for each process: several CUDA cards in turn."""
    cards = cuda_cards(device)
    return [f"cuda:{i % cards}" if cards else device for i in range(jobs)]
