"""What `backbone.accel.processor` brings on this machine's CPU: the same work with it and as torch has it, in turn.

    python -m benchmarks.processor [--seconds 10]      writes benchmarks/results/processor-cpu….csv

PERL with K = 4 on a random ViT-B/16 and on the embedded backbone: inference, and a training step of four images.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

import perlclip
from benchmarks.common import RESULTS, Clock, Table, build, gradients, machine
from perlclip.backbone import Backbone
from perlclip.backbone.accel import fused, processor

WORDS = ("dog", "cat", "bird", "horse", "sheep", "cow", "bear", "zebra", "fish", "frog")


@contextmanager
def as_torch() -> Iterator[None]:
    """Without any of it."""
    with patch.object(processor, "has_onednn", lambda: False), patch.object(fused, "attended", lambda *_: None):
        yield


def without(work: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with as_torch():
            return work()

    return run


def works(backbone: Backbone, side: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured."""
    method = perlclip.create_method("perl", backbone, seed=1)
    state = method.class_state([f"a photo of a {word}." for word in WORDS])
    pixels, labels = torch.randn(8, 3, side, side), torch.arange(4)

    @torch.inference_mode()
    def infer() -> object:
        return method.logits(pixels, state)

    yield "inference, 8 images", infer
    parameters = list(method.parameters())
    yield (
        "training step, 4 images, 10 classes",
        lambda: gradients(lambda: method.loss(pixels[:4], labels, state), parameters),
    )


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    clock = Clock("cpu", options.seconds)
    version = "".join(torch.__version__.split("+")[0].split(".")[:2])
    table = Table(RESULTS / f"processor-{machine('cpu')}-pt{version}.csv")
    for name, dtype, backbone, side in (
        ("ViT-B/16", "float32", build("cpu", torch.float32, WORDS)[1], 224),
        ("ViT-B/16", "bfloat16", build("cpu", torch.bfloat16, WORDS)[1], 224),
        ("tiny", "float32", perlclip.load_backbone("tiny", device="cpu"), 64),
    ):
        for what, work in works(backbone, side):
            found = clock({"torch": without(work), "ours": work})
            before, after = found["torch"]["ms"], found["ours"]["ms"]
            table.add(
                {"backbone": name, "dtype": dtype, "work": what, "torch_ms": before, "ms": after, "x": before / after}
            )


if __name__ == "__main__":
    main()
