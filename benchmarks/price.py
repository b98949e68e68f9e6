"""What thinking costs beside one look of `CLIPModel`, with trained adapters and the images they were trained for.

    python -m benchmarks.photographs REAL SUITE
    python -m benchmarks.price SUITE/photographs.toml                   # a CUDA card, or the CPU
    python -m benchmarks.price toybox --batch 256 --sets noisy_shapes faint_toys

For each set an adapter is fitted to 16 shots of all its classes, as `perlclip fit` does it (`strong`, with a head and
with thresholds), and asked for its test images: all four steps, and as many as each image needs; in float32, bfloat16
and the 8 bits of the device (float8 on CUDA, int8 on a CPU). Pixels are on the device already;
times are of a batch, all forms in turn, waiting for the device included. `same` is how often the answer is that of all
four steps in the same format, `like` that of all four in the format it was trained in: bfloat16 on CUDA, float32 on
CPUs.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import CLIPModel

import perlclip
from benchmarks.common import RESULTS, Clock, machine, write_csv
from perlclip.backbone.clip import TINY
from perlclip.data.loading import fixed_views
from perlclip.data.suites import suite as suite_named
from perlclip.inference.classifier import Classifier

FORMATS = {"cuda": ("bfloat16", "float8", "float32"), "cpu": ("float32", "bfloat16", "int8")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("suite")
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=0, help="images at a time; 256 on CUDA, 8 on a CPU")
    parser.add_argument("--count", type=int, default=2048, help="test images of a set at most")
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing, a set and batch size")
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--recipe", default="strong")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compiled", action="store_true", help="also torch.compile of CLIPModel, with autotuning")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    batch = given.batch or (256 if given.device == "cuda" else 8)
    suite = suite_named(given.suite)
    rows: list[dict] = []
    for name in given.sets or suite.targets:
        rows += one_set(suite, name, given, batch)
    version = "".join(torch.__version__.split("+")[0].split(".")[:2])
    path = given.out / f"price-{suite.name}-{machine(given.device)}-pt{version}.csv"
    write_csv(path, rows)
    print(path)


def one_set(suite, name: str, given: argparse.Namespace, batch: int) -> list[dict]:
    formats, device = FORMATS[given.device], given.device
    data = suite.load(name, None)
    base = perlclip.load_backbone(suite.backbone, device=device, dtype=formats[0])
    train = perlclip.train_val(data.train, shots=given.shots, seed=given.seed)[0]
    began = time.perf_counter()
    ours = perlclip.create_method("perl", base, recipe=given.recipe)
    fitted = perlclip.fit(ours, train, recipe=given.recipe, seed=given.seed, lens="plain", progress=False)
    print(f"{name}: {len(train)} shots, fitted in {time.perf_counter() - began:.1f} s", flush=True)
    every = max(1, len(data.test) // given.count)
    test = data.test.select(range(0, len(data.test), every))
    views, labels = zip(*fixed_views(test, base.preprocess, batch, torch.device(device), 0), strict=True)
    labels_N = torch.cat([torch.as_tensor(part) for part in labels]).cpu()
    with tempfile.TemporaryDirectory() as folder:
        perlclip.save_adapter(fitted, folder)
        asked = {
            kind: Classifier.from_pretrained(folder, backbone=perlclip.load_backbone(suite.backbone, device, kind))
            for kind in formats
        }
    clip = CLIPModel.from_pretrained(TINY if suite.backbone == "tiny" else suite.backbone).to(device).eval()
    rows, whole = [], {}
    for kind, classifier in asked.items():
        for steps in (None, "adaptive"):
            found = [ask(classifier, pixels, steps) for pixels in views]
            answers_N, steps_N = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
            whole.setdefault(kind, answers_N)
            rows.append(
                {"set": name, "format": kind, "steps": steps or "all", "images": len(answers_N),
                 "accuracy": percent(answers_N == labels_N), "mean_steps": steps_N.double().mean().item(),
                 "same": percent(answers_N == whole[kind]), "like": percent(answers_N == whole[formats[0]])}
            )  # fmt: skip
    rows += [
        {"set": name, "format": "CLIPModel", "steps": form} for form in ("as it is", "compiled")[: 1 + given.compiled]
    ]
    for size in (batch, 1):
        times = timed(asked, clip, views[0][:size], given)
        for row in rows:
            ms = times[row["format"], row["steps"]]["ms"]
            row |= {f"ms_{size}": ms, f"over_clip_{size}": f"{ms / times['CLIPModel', 'as it is']['ms']:.3f}"}
    for row in rows:
        print(row, flush=True)
    return rows


@torch.no_grad()
def ask(classifier: Classifier, pixels: Tensor, steps: str | None) -> tuple[Tensor, Tensor]:
    """Answers and steps taken."""
    answering = classifier.answering
    if steps is None:
        answers_B = answering.logits(pixels).argmax(-1)
        return answers_B, torch.full_like(answers_B, classifier.method.image_steps)
    plan = classifier.plan(steps, None, None)
    assert plan is not None
    answer = answering.answer(plan, pixels)
    return answer.logits_BC.argmax(-1), answer.steps_B


@torch.no_grad()
def timed(asked: dict[str, Classifier], clip: CLIPModel, pixels: Tensor, given: argparse.Namespace) -> dict:
    """Medians of all forms in turn."""
    half = torch.bfloat16 if given.device == "cuda" else torch.float32
    few, clip = pixels.to(half), clip.to(half)

    def whole(classifier: Classifier, steps: str | None) -> Callable[[], object]:
        wanted = classifier.judge.wanted()
        return lambda: classifier.answer(pixels, wanted, classifier.plan(steps, None, None))

    forms = {("CLIPModel", "as it is"): lambda: clip.get_image_features(pixel_values=few)}
    if given.compiled:
        compiled = torch.compile(clip.get_image_features, mode="max-autotune-no-cudagraphs")
        forms["CLIPModel", "compiled"] = lambda: compiled(pixel_values=few)
    for kind, classifier in asked.items():
        for steps in (None, "adaptive"):
            forms[kind, steps or "all"] = whole(classifier, steps)
    clock = Clock(given.device, given.seconds)
    for work in forms.values():  # until all stages of every size have been recorded
        for _ in range(4):
            work()
    return clock(forms)


def percent(right: Tensor) -> float:
    return 100 * right.double().mean().item()


if __name__ == "__main__":
    main()
