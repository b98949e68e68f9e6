"""The same job on a real Ray Data on this machine, one of whose actors is killed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from perlclip.batch.job import predict_all
from perlclip.batch.shards import answers
from tests.batch.test_job import adapter, done, images, job, same  # noqa: F401 (fixtures)

ray = pytest.importorskip("ray")


def kill_one(name: bytes, killed: list[int], over: threading.Event) -> None:
    """Workers have what they do as their title: the first one that is seen is killed."""
    while not over.is_set() and not killed:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                title = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::") and name in title:
                os.kill(int(process.name), signal.SIGKILL)
                killed.append(int(process.name))
                break
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="workers are found by their title")
def test_a_job_on_ray_has_the_same_rows_also_when_an_actor_is_killed(adapter, images, done, tmp_path):  # noqa: F811
    killed, over = [], threading.Event()
    killer = threading.Thread(target=kill_one, args=(b"_Answer", killed, over))
    killer.start()
    try:
        found = predict_all(job(adapter, images, tmp_path / "out", executor="ray", workers=2, embeddings=True))
    finally:
        over.set()
        killer.join()
    assert killed and not ray.is_initialized()
    assert (found.images, found.errors, found.added) == (13, 1, 13)
    assert same(list(answers(tmp_path / "out")), done)
