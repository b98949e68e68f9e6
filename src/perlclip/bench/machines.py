"""Where runs are done, and what every executor needs: the life of a run in a process of its own."""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from perlclip.bench.run import Lookup, Workspace, attempt
from perlclip.bench.store import Record, Run, Store, failed_record
from perlclip.data.suites import suite
from perlclip.inference.cache import LIMIT
from perlclip.methods.registry import load_plugin

STOP_SECONDS = 10.0  # what a process gets to finish its step and write its checkpoint

Unit = deque[Run]  # runs that share a training, to be done one after the other
Outcomes = Generator[tuple[Run, Record], None, None]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Where runs are done, which is no part of what they are."""

    executor: str = "local"  # a module of perlclip.bench.executors
    jobs: int = 1  # runs at a time
    device: str = "auto"
    data: Path | None = None  # folder of the data sets, for suites that are on disk
    workers: int = 0  # processes that decode images, for each run
    cache_bytes: int = LIMIT  # of each process, for what tests of the same images have in common
    plugins: tuple[str, ...] = ()  # modules or .py files with methods, loaded first in every process
    suites: tuple[str, ...] = ()  # files of suites, likewise
    address: str = ""  # of a Ray cluster; a small one is started without
    gpus_per_run: float | None = None  # on Ray; if not given, one where the cluster has any

    def load(self) -> None:
        """Make methods and suites from outside the package known in this process."""
        for name in self.plugins:
            load_plugin(name)
        for name in self.suites:
            suite(name)

    def workspace(self) -> Workspace:
        """What the runs of one process share."""
        return Workspace(self.device, self.data, self.workers, self.cache_bytes)

    def lookup(self, store: Store) -> Lookup:
        """For a process that does no runs itself."""
        return Lookup(store, replace(self, device="cpu").workspace())


def cuda_cards(device: str) -> int:
    """How many CUDA cards runs can be spread over."""
    return torch.cuda.device_count() if device in ("auto", "cuda") else 0


def work(run: Run, store: Store, machines: Machines, threads: int) -> Record:
    """Do a run in a process of its own, which keeps its workspace for the next. After a retry it may be complete."""
    torch.set_num_threads(threads)
    lookup = _prepared(store, machines)
    return lookup.find(run) or attempt(run, store, lookup.workspace)


@lru_cache(maxsize=1)
def _prepared(store: Store, machines: Machines) -> Lookup:
    machines.load()
    return Lookup(store, machines.workspace())


def settle(run: Run, store: Store, machines: Machines, cause: BaseException) -> Record:
    """The record of a run that brought none: complete, if its process died after the last write, or else failed."""
    record = machines.lookup(store).find(run)
    if record is None:
        record = failed_record(run, cause)
        store.write(run, record)
    return record
