"""Small CLIP folders in Hugging Face's format with random weights, and image trees drawn on the spot."""

import json
import signal
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

import perlclip
from perlclip.backbone.accel import cuda_graphs
from perlclip.data.toybox import suite
from tests.common import byte_vocabulary

# Whoever starts the tests in the background has Ctrl-C ignored, and the tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Sizes differ in everything that could be hard-coded: widths, heads, depths, patch, image, context, activation.
SIZES = {
    "small": dict(vision=(48, 4, 12), text=(32, 2, 12), patch=8, image=32, context=77, act="quick_gelu", embed=24),
    "odd": dict(vision=(40, 5, 11), text=(56, 7, 10), patch=7, image=35, context=56, act="gelu", embed=72),
}


def tower_config(width: int, heads: int, depth: int, act: str) -> dict:
    return dict(
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_hidden_layers=depth,
        hidden_act=act,
    )


def build_clip(folder: Path, *, vision, text, patch, image, context, act, embed, seed=0) -> Path:
    """A CLIP folder as `save_pretrained` writes it, with random weights large enough to matter."""
    vocabulary = byte_vocabulary()
    bos, eos = vocabulary["<|startoftext|>"], vocabulary["<|endoftext|>"]
    ids = dict(bos_token_id=bos, eos_token_id=eos, pad_token_id=eos)
    config = CLIPConfig(
        text_config=tower_config(*text, act) | dict(vocab_size=len(vocabulary), max_position_embeddings=context, **ids),
        vision_config=tower_config(*vision, act) | dict(patch_size=patch, image_size=image),
        projection_dim=embed,
        **ids,
    )
    torch.manual_seed(seed)
    model = CLIPModel(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name != "logit_scale":
                p.copy_(torch.randn_like(p) * (0.5 if p.ndim == 1 else 1.5 * p.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": image}, crop_size={"height": image, "width": image}).save_pretrained(
        folder
    )
    return folder


# Begun first, so that at the end no worker waits for another's long test; the rest stays in its order.
LONG = ("test_accuracy.py", "test_ray.py", "test_runs.py", "test_heads.py", "test_docs.py", "test_api.py")


def pytest_collection_modifyitems(items) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.fixture(autouse=True, scope="session")
def drawn_once():
    """A set of the toybox takes a second to draw and many tests ask for the same few: each process draws them once."""
    draw = suite._draw

    @lru_cache(maxsize=18)  # six sets
    def drawn(task, per_class, *rest):
        return draw(task, suite._classes(task), per_class, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "_draw", lambda task, classes, *rest: drawn(task, *rest))
        yield


@pytest.fixture(scope="session")
def clip_folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("clips")
    return {name: build_clip(root / name, **size) for name, size in SIZES.items()}


@pytest.fixture(scope="session")
def clip_folder(clip_folders) -> Path:
    return clip_folders["small"]


@pytest.fixture(scope="session")
def backbone(clip_folder) -> perlclip.Backbone:
    return perlclip.load_backbone(str(clip_folder), device="cpu")


@pytest.fixture(scope="session", params=list(SIZES))
def any_backbone(request, clip_folders) -> perlclip.Backbone:
    return perlclip.load_backbone(str(clip_folders[request.param]), device="cpu")


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory):
    """The folder of a row of `tests.families.SIZES`, built when it is first asked for."""
    from tests.families import build

    root = tmp_path_factory.mktemp("families")
    return cache(lambda name: build(root / name, name))


@pytest.fixture(scope="session")
def family_backbone(family_folder):
    """The backbone of a row, loaded once."""
    return cache(lambda name: perlclip.load_backbone(str(family_folder(name)), device="cpu"))


@pytest.fixture(scope="session", params=[*SIZES, "siglip"])
def every_backbone(request, clip_folders, family_backbone) -> perlclip.Backbone:
    """CLIPs, and one of each family whose towers are others: the rows of the methods' contract."""
    if request.param in clip_folders:
        return perlclip.load_backbone(str(clip_folders[request.param]), device="cpu")
    return family_backbone(request.param)


@pytest.fixture(scope="session")
def tiny() -> perlclip.Backbone:
    return perlclip.load_backbone("tiny", device="cpu")


COLOURS = {"red": (200, 30, 30), "green_grass": (30, 180, 40), "blue": (30, 40, 200)}


def draw_tree(root: Path, classes=COLOURS, images=8, size=40) -> Path:
    """`root/<class>/<n>.png`: noisy patches of one colour a class."""
    rng = np.random.default_rng(0)
    for name, colour in classes.items():
        (root / name).mkdir(parents=True)
        for n in range(images):
            pixels = np.clip(np.array(colour) + rng.normal(0, 25, (size, size + 6, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{n}.png")
    return root


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    return draw_tree(tmp_path_factory.mktemp("data") / "colours")


@pytest.fixture
def write_json():
    def write(path: Path, value) -> Path:
        path.write_text(json.dumps(value))
        return path

    return write


class Tape:
    """In the place of a CUDA graph: runs the work, and counts."""

    made, played = 0, 0

    def __init__(self, work, inputs, pool=None) -> None:
        self.outputs, self.pool = [each.clone() for each in work(*inputs)], pool
        Tape.made += 1
        self.work = work

    def __call__(self, *inputs):
        """As a graph does: into the same tensors every time."""
        Tape.played += 1
        for mine, made in zip(self.outputs, self.work(*(each.clone() for each in inputs)), strict=True):
            mine.copy_(made)
        return self.outputs


@pytest.fixture
def tape(monkeypatch):
    monkeypatch.setattr(Tape, "made", 0)
    monkeypatch.setattr(Tape, "played", 0)
    monkeypatch.setattr(cuda_graphs, "Recorded", Tape)
    return Tape
