"""One service for all tests of its routes: decoding processes take seconds to start."""

import io
import time

import numpy as np
import pytest
from PIL import Image

import perlclip
from perlclip.serve.guard import Limits, running
from perlclip.serve.routes import make_app
from perlclip.serve.service import Service, ServiceConfig
from tests.serve.adapters import random_adapter

SERVED = ("plain", "rising", "steps", "zero-shot", "ridge", "mma")


def png(seed: int | None = 0, size: tuple[int, int] = (40, 36), kind: str = "PNG") -> bytes:
    """An image file, of noise or without a seed black."""
    shape = (size[1], size[0], 3)
    pixels = np.zeros(shape, np.uint8)
    if seed is not None:
        pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def shelf_folder(tmp_path_factory, backbone):
    folder = tmp_path_factory.mktemp("shelf")
    for n, kind in enumerate(SERVED):
        perlclip.save_adapter(random_adapter(backbone, kind, n), folder / kind)
    return folder


@pytest.fixture(scope="session")
def service(shelf_folder, backbone):
    config = ServiceConfig(max_rows=64, max_images=8, max_pixels=1_000_000, decode_seconds=5.0, batch_size=16)
    service = Service(shelf_folder, backbone, config)
    with running(make_app(service), Limits(port=0, max_body=4 * 2**20)) as address:
        while not service.batcher.ready:
            time.sleep(0.01)
        yield service, address


@pytest.fixture(scope="session")
def classifiers(shelf_folder, backbone):
    """Each adapter alone."""
    return {
        kind: perlclip.Classifier.from_pretrained(shelf_folder / kind, backbone=backbone, compile="off")
        for kind in SERVED
    }
