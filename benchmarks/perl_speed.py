"""Speed and memory of PERL at ViT-B/16 size: plain form, `CLIPModel` zero-shot and ours, in one run.

    python -m benchmarks.perl_speed                       # this machine, float32 on the CPU or bfloat16 on CUDA
    python -m benchmarks.perl_speed --classes 10 100      # fewer cases

Random weights, prompts of 8 to 13 tokens, K = 4, J = 7, eager mode. "plain" is tests/plain.py: `transformers`' own
layers, 77 positions, every row of every block, nothing kept from one call to the next. The CSV goes to
benchmarks/results/, its name states the conditions. Times are medians in milliseconds with the quartile range; "kept"
is what autograd holds for the backward pass; "peak" the CUDA allocator's.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import CLIPModel

from benchmarks.common import (
    RESULTS,
    Clock,
    build,
    file_name,
    frozen_storages,
    gradients,
    kept_for_backward,
    machine,
    write_csv,
)
from perlclip.methods.base import create_method
from tests.plain import PlainPerl, padded


def prompts(count: int) -> list[str]:
    """Distinct prompts of 8 to 13 tokens, SOS and EOS included (one token a letter)."""
    return [f"{'photos'[: 1 + i % 6]} {i // 26:04x}{chr(97 + i % 26)}" for i in range(count)]


def image_cases(clip: CLIPModel, plain: PlainPerl, ours, batch: int) -> dict[str, Callable[[], object]]:
    pixels = torch.randn(batch, 3, 224, 224, device=ours.backbone.device, dtype=ours.backbone.dtype)
    rows = torch.zeros(batch, dtype=torch.long, device=pixels.device)
    return {
        "clip": lambda: clip.get_image_features(pixel_values=pixels),
        "plain": lambda: plain.project("vision", plain.states("vision", pixels, rows)[-1]),
        "ours": lambda: ours.encode_image(pixels),
    }


def text_cases(clip: CLIPModel, plain: PlainPerl, ours, classes: int) -> dict[str, Callable[[], object]]:
    names = prompts(classes)
    ids, eos = (tensor.to(ours.backbone.device) for tensor in padded(ours.backbone, names))
    return {
        "clip": lambda: clip.get_text_features(input_ids=ids),
        "plain": lambda: plain.project("text", plain.states("text", ids, eos)[-1]),
        "ours": lambda: ours.encode_text(ours.class_state(names)),
    }


def step_cases(plain: PlainPerl, ours, classes: int) -> dict[str, Callable[[], torch.Tensor]]:
    backbone, names = ours.backbone, prompts(classes)
    ids, eos = (tensor.to(backbone.device) for tensor in padded(backbone, names))
    pixels = torch.randn(4, 3, 224, 224, device=backbone.device, dtype=backbone.dtype)
    labels = torch.arange(4, device=backbone.device)
    state = ours.class_state(names)
    return {
        "plain": lambda: plain.loss(pixels, labels, ids, eos),
        "ours": lambda: ours.loss(pixels, labels, state),
    }


def too_large(variant: str, classes: int, device: str) -> bool:
    """What the plain form is spared on a CPU: minutes a run, and some 50 GiB for the backward pass."""
    return variant == "plain" and device == "cpu" and classes > 150


def measure(device: str, dtype: torch.dtype, batches: list[int], classes: list[int], seconds: float) -> list[dict]:
    clip, backbone = build(device, dtype)
    ours = create_method("perl", backbone)
    config = ours.config
    plain = PlainPerl(clip, ours.projectors, config.steps, config.depth, config.anchor)
    clock, rows = Clock(device, seconds), []
    frozen = frozen_storages(clip, backbone)

    def record(work: str, size: int, readings: dict[str, dict[str, float]]) -> None:
        for variant, reading in readings.items():
            rows.append({"work": work, "size": size, "variant": variant} | reading)
            print(
                f"{work:14} {size:5} {variant:6} " + "  ".join(f"{k} {v:.4g}" for k, v in reading.items()), flush=True
            )

    with torch.no_grad():
        for batch in batches:
            record("image", batch, clock(image_cases(clip, plain, ours, batch)))
        for count in classes:
            if not too_large("plain", count, device):
                record("text", count, clock(text_cases(clip, plain, ours, count)))
    for count in classes:
        losses = {
            name: loss for name, loss in step_cases(plain, ours, count).items() if not too_large(name, count, device)
        }
        kept = {name: kept_for_backward(loss, frozen) for name, loss in losses.items()}
        steps = {name: partial(gradients, loss, list(ours.parameters())) for name, loss in losses.items()}
        readings = clock(steps)
        record("training step", count, {name: readings[name] | {"kept_MiB": kept[name]} for name in readings})
    return rows


def add_ratios(rows: list[dict]) -> None:
    """Each row beside the plain form and `CLIPModel` of the same work."""
    times = {(row["work"], row["size"], row["variant"]): row["ms"] for row in rows}
    for row in rows:
        for other in ("plain", "clip"):
            reference = times.get((row["work"], row["size"], other))
            row[f"time_over_{other}"] = f"{row['ms'] / reference:.3f}" if reference else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 256] if cuda else [4])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 500, 1000] if cuda else [10, 100, 500])
    parser.add_argument("--seconds", type=float, default=3.0 if cuda else 10.0, help="per measurement")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", RESULTS)))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    rows = measure(options.device, dtype, options.batches, options.classes, options.seconds)
    add_ratios(rows)
    path = options.out / file_name("perl-speed", machine(options.device), dtype)
    write_csv(path, rows)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
