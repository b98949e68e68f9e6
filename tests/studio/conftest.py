"""A studio in this process, on drawn images with a small random backbone."""

import json
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from perlclip.serve.guard import Limits, running
from perlclip.studio.interface import studio_app
from perlclip.studio.project import Project
from perlclip.studio.worker import Worker

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 40, 200)}


def draw(folder: Path, count: int = 20) -> Path:
    """`folder/<n>-<colour>.png`, noisy patches: their names say what is right."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for n in range(count):
        name, colour = list(COLOURS.items())[n % len(COLOURS)]
        pixels = np.clip(np.array(colour) + rng.normal(0, 25, (32, 40, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{n:02}-{name}.png")
    return folder


def ask(address: str, path: str, body: object = None, **headers: str) -> tuple[int, object]:
    """Status and what came: parsed, if it is JSON."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = Request(f"{address}{path}", data, {"content-type": "application/json", **headers})
    try:
        with urlopen(request, timeout=60) as answer:
            status, kind, content = answer.status, answer.headers["content-type"], answer.read()
    except HTTPError as error:
        status, kind, content = error.code, error.headers["content-type"], error.read()
    return status, json.loads(content) if kind == "application/json" else content


@pytest.fixture
def studio(backbone):
    @contextmanager
    def start(folder: Path, port: int = 0, **options):
        with Project(folder) as project:
            worker = Worker(project, backbone, **{"recipe": "fast", **options})
            worker.start()
            try:
                with running(studio_app(worker), Limits(port=port, seconds=120)) as address:
                    yield address, worker
            finally:
                worker.stop()

    return start
