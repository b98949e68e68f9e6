"""The same runs on a Ray cluster (extra `ray`): each run a task, the store on a path that all machines share.

A run whose worker dies is retried by Ray, from its last checkpoint, on whichever machine has room. `perlclip` must be
installed on all of them, with the data sets under the same path.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from perlclip.bench.machines import STOP_SECONDS, Machines, Outcomes, Unit, settle, work
from perlclip.bench.store import Record, Run, Store
from perlclip.errors import PerlclipError, first_line

RETRIES = 3  # of a run whose worker died
OBJECT_STORE = 100 * 2**20  # bytes; only runs and their records pass through it


def execute(todo: Sequence[Unit], store: Store, machines: Machines) -> Outcomes:
    """Runs as Ray tasks; the next one of a unit is submitted when the last is done."""
    store = Store(store.folder.resolve())
    with cluster(machines.address, machines.jobs) as ray:
        machines = _there(machines, ray)
        options = {"num_cpus": 1, "num_gpus": machines.gpus_per_run, "max_retries": RETRIES}
        task = ray.remote(work).options(**options)
        threads = 1 if machines.address else max(1, torch.get_num_threads() // machines.jobs)
        flying: dict[Any, tuple[Run, Unit]] = {}  # by Ray's reference to the result

        def submit(unit: Unit) -> None:
            run = unit.popleft()
            flying[task.remote(run, store, machines, threads)] = run, unit

        try:
            for unit in todo:
                submit(unit)
            while flying:
                (reference,), _ = ray.wait(list(flying), num_returns=1)
                run, unit = flying[reference]
                record = _record(ray, reference, run, store, machines)
                del flying[reference]
                if unit:
                    submit(unit)
                yield run, record
        finally:
            for reference in flying:  # Ctrl-C: tasks that run finish their step and write their checkpoint
                ray.cancel(reference, force=False)
            if flying:
                ray.wait(list(flying), num_returns=len(flying), timeout=STOP_SECONDS)


def _record(ray: Any, reference: Any, run: Run, store: Store, machines: Machines) -> Record:
    """What the task brought, or a failed record if its workers kept dying or could not even begin."""
    try:
        record: Record = ray.get(reference)
        return record
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
    except ray.exceptions.RayError as error:
        cause = PerlclipError(f"its workers died, {RETRIES + 1} times: {first_line(error)}")
    return settle(run, store, machines, cause)


@contextmanager
def cluster(address: str, jobs: int, object_store: int = OBJECT_STORE) -> Iterator[Any]:
    """The cluster at the address, or a quiet one on this machine for as long as it is needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise PerlclipError("the ray executor needs Ray: pip install 'perlclip[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    _require_answer(address)
    own: dict[str, Any] = {"num_cpus": jobs, "object_store_memory": object_store, "include_dashboard": False}
    try:
        ray.init(
            address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else own)
        )
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at {address} takes us (with RAY_AUTH_MODE=token?)" if address else "starts here"
        raise PerlclipError(f"no Ray cluster {where}: {first_line(error)}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if separator and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise PerlclipError(f"no Ray cluster answers at {address}: {error.strerror or error}") from error


def _there(machines: Machines, ray: Any) -> Machines:
    """What holds in every worker: absolute paths, and the device that Ray has given to the task."""
    cards = ray.cluster_resources().get("GPU", 0)
    gpus = machines.gpus_per_run
    if gpus is None:
        gpus = 1.0 if cards and machines.device != "cpu" else 0.0
    if gpus and not cards:
        raise PerlclipError("the Ray cluster has no GPU: leave out --gpus-per-run")
    device = "cuda" if gpus else "cpu" if machines.device == "auto" else machines.device
    data = machines.data.resolve() if machines.data else None
    plugins, suites = (tuple(map(_absolute, names)) for names in (machines.plugins, machines.suites))
    return replace(machines, device=device, data=data, plugins=plugins, suites=suites, gpus_per_run=gpus)


def _absolute(name: str) -> str:
    return str(Path(name).resolve()) if Path(name).is_file() else name
