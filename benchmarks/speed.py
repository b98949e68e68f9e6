"""Speed and memory of PERL at ViT-B/16 size, beside the plain form and `CLIPModel`, in one run on one device.

    python -m benchmarks.speed                 # bfloat16 on CUDA; on a CPU float32, with bfloat16 beside it
    python -m benchmarks.speed --parts image   # image, text, step, growth, adapt, toybox: some of it, in its own file
    python -m benchmarks.speed --parts families  # images, texts and steps of each family

Random weights, prompts of 8 to 13 tokens, K = 4, J = 7. The variants of a case run in turn, times are medians with the
quartile range, waiting for the device included; "peak" is the CUDA allocator's, above what was there before.

clip            the family's own model, zero-shot: `CLIPModel` (with exact GELU for OpenCLIP), `SiglipModel`
plain           `perlclip.reference`: `transformers`' own layers, 77 positions, every row of every block, nothing kept
ours            as the library runs it
ours, bfloat16  on a CPU: the same in half precision, beside the others in float32
ours, int8      on a CPU: the large products of the image tower in 8 bits; on CUDA: ours, float8, a recorded graph
ours, compiled  the same as a recorded CUDA graph: what `compile="auto"` comes to on CUDA
ours, again     text and training steps: as a training runs it, with the frozen part of the class texts made before

A case is refused if ours is further from the float32 plain form than twice the plain form in the same format is.
Written to benchmarks/results/, the conditions in the name: a CSV, the growth curves as PNG, and what was checked.
"""

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Clock,
    Reading,
    Work,
    build,
    file_name,
    frozen_storages,
    kept_for_backward,
    machine,
    remember,
    write_csv,
)
from benchmarks.speed_figure import draw_growth
from perlclip.backbone import TextGraphs
from perlclip.backbone.accel.cuda_graphs import Recorded
from perlclip.backbone.accel.eight import FLOAT8, INT8
from perlclip.methods import Method, create_method
from perlclip.methods.base import ClassState
from perlclip.reference import plain_form

COLUMNS = (
    "work", "size", "variant", "ms", "quartile_range_ms", "runs", "peak_MiB", "kept_MiB", "time_over_plain",
    "time_over_clip", "floor_ms", "note",
)  # fmt: skip
PARTS = ("image", "text", "step", "growth", "adapt", "toybox", "families")
# Those whose towers differ, each at B/16 and 224 pixels. MetaCLIP 2 has CLIP's towers, NaFlex SigLIP's.
FAMILIES = ("clip", "openclip", "siglip")
STEPS, DEPTH, BATCH = 4, 7, 4  # K and J of all cases, images of a training step
CLASS_SIZES, BATCH_SIZES = (10, 30, 100, 300, 1000, 3000, 10000), (1, 4, 16, 64, 256, 1024, 4096)
STEP_SIZES = tuple(range(9))


def prompts(count: int) -> list[str]:
    """Distinct prompts of 8 to 13 tokens, SOS and EOS included (one token a letter)."""
    return [f"{'photos'[: 1 + i % 6]} {i // 26:04x}{chr(97 + i % 26)}" for i in range(count)]


class Forms:
    """The same random CLIP as `CLIPModel`, as the plain form and as ours, in one number format."""

    def __init__(self, device: str, dtype: torch.dtype, steps: int = STEPS, family: str = "clip") -> None:
        self.device, self.dtype, self.family = device, dtype, family
        self.clip, backbone = build(device, dtype, family=family)
        self.ours: Method = create_method("perl", backbone, steps=steps)
        self.plain = plain_form("perl")(self.clip, backbone.tokenizer, self.ours)
        self.plain.tokenise = remember(self.plain.tokenise)  # the tokenizer is not timed

    def pixels(self, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, 3, 224, 224, generator=generator).to(self.device, self.dtype)

    def plain_text(self, count: int) -> Tensor:
        return self.plain.text(prompts(count), "{}")


class Bench:
    """All cases on one device, and the rows that come of them."""

    def __init__(self, device: str, seconds: float, family: str = "clip") -> None:
        self.device, self.cuda = device, device == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.take(family)
        self.clock = Clock(device, seconds)
        self.rows: list[dict] = []
        self.checks: list[str] = []
        self.rate, self.bandwidth = ceilings(device, self.dtype)
        self.say(f"matrix product {self.rate / 1e12:.3g} TFLOP/s, copy {self.bandwidth / 1e9:.4g} GB/s")

    def take(self, family: str) -> None:
        """Measure this family from now on."""
        self.forms = Forms(self.device, self.dtype, family=family)
        self.half = self.forms if self.cuda else Forms(self.device, torch.bfloat16, family=family)
        self.eight = eight_bits(self.forms, family)

    def say(self, line: str) -> None:
        self.checks.append(line)
        print(line, flush=True)

    def record(self, work: str, size: int, readings: dict[str, Reading], floor: float = 0.0, note: str = "") -> None:
        for variant, reading in readings.items():
            row = {"work": work, "size": size, "variant": variant, **reading, "note": note}
            for other in ("plain", "clip"):
                if other in readings:
                    row[f"time_over_{other}"] = f"{reading['ms'] / readings[other]['ms']:.3f}"
            row["floor_ms"] = 1e3 * floor / self.rate if floor else ""
            self.rows.append(row)
            print(f"{work:14} {size:5} {variant:15} {row['ms']:10.3f} ms  {row.get('time_over_plain', '')}", flush=True)

    # ---- the cases ----

    @torch.no_grad()
    def image(self, batches: Iterable[int]) -> None:
        self.check_closeness()
        for batch in batches:
            self.record("image", batch, self.clock(self.image_cases(batch)), image_operations(self.forms.ours, batch))

    def image_cases(self, batch: int) -> dict[str, Work]:
        pixels, half = self.forms.pixels(batch), self.half.pixels(batch)
        cases: dict[str, Work] = {
            "clip": lambda: self.forms.clip.get_image_features(pixel_values=pixels),
            "plain": lambda: self.forms.plain.image(pixels),
            "ours": lambda: self.forms.ours.encode_image(pixels),
        }
        if self.cuda:
            return cases | {
                "ours, compiled": recorded(self.forms.ours.encode_image, pixels),
                "ours, float8": recorded(self.eight.encode_image, pixels),
            }
        return cases | {
            "ours, bfloat16": lambda: self.half.ours.encode_image(half),
            "ours, int8": lambda: self.eight.encode_image(pixels),
        }

    @torch.no_grad()
    def text(self, sizes: Iterable[int]) -> None:
        for count in sizes:
            state = self.forms.ours.class_state(prompts(count))
            self.record("text", count, self.clock(self.text_cases(count, state)), text_operations(state))

    def text_cases(self, count: int, state: ClassState) -> dict[str, Work]:
        (ids, _), ours = self.forms.plain.tokenise(prompts(count)), self.forms.ours
        tokens = ours.backbone.tokenize(state.classes.prompts())
        replayed = replace(ours.prepare_tokens(state.classes, tokens), replay=self.cuda)
        cases: dict[str, Work] = {
            "clip": lambda: self.forms.clip.get_text_features(input_ids=ids),
            "plain": lambda: self.forms.plain_text(count),
            "ours": lambda: ours.encode_text(ours.prepare_tokens(state.classes, tokens)),
            "ours, again": recorded(lambda: ours.encode_text(state)),
        }
        if self.cuda and TextGraphs.takes(tokens):
            cases["ours, compiled"] = lambda: ours.encode_text_steps(replayed)
        return cases

    def step(self, sizes: Iterable[int]) -> None:
        frozen = frozen_storages(self.forms.clip, self.forms.ours.backbone)
        for count in sizes:
            losses = step_losses(self.forms, count)
            if not self.cuda and count > 150:  # minutes a run, and some 50 GiB for the backward pass
                del losses["plain"]
            kept = {name: kept_for_backward(loss, frozen) for name, loss in losses.items()}
            cases: dict[str, Work] = {name: self.gradients(loss) for name, loss in losses.items()}
            if self.cuda:
                cases["ours, compiled"] = recorded(self.gradients(losses["ours"]))
                kept["ours, compiled"] = kept["ours"]
            readings = self.clock(cases)
            if self.cuda:  # a graph's memory is not the allocator's: what recording took
                readings["ours, compiled"]["peak_MiB"] = recording_peak(self.gradients(losses["ours"]))
            self.record("training step", count, {n: r | {"kept_MiB": kept[n]} for n, r in readings.items()})
            del cases

    def gradients(self, loss: Callable[[], Tensor]) -> Work:
        parameters = list(self.forms.ours.parameters())
        return lambda: torch.autograd.grad(loss(), parameters)

    def families(self, names: Iterable[str], batches: Iterable[int], classes: Iterable[int]) -> None:
        """K = 4 of each family against its plain form and its own model."""
        usual = self.forms, self.half, self.eight
        for family in names:
            self.say(family)
            if family != self.forms.family:
                self.take(family)
            began = len(self.rows)
            self.image(batches)
            self.text(classes)
            self.step(classes)
            for row in self.rows[began:]:
                row["note"] = family
        self.forms, self.half, self.eight = usual

    def growth(self, most: int) -> None:
        """Ours against classes, images and steps, and whether it grows as it should."""
        forms, curves = self.forms, {}
        sizes = [size for size in CLASS_SIZES if size <= most]
        curves["classes"] = [
            (n, self.one(f"classes, {n}", self.gradients(step_losses(forms, n)["ours"]))) for n in sizes
        ]
        with torch.no_grad():
            batches = [size for size in BATCH_SIZES if size <= most]
            images = {n: forms.pixels(n) for n in batches}
            curves["batch"] = [
                (n, self.one(f"batch, {n}", lambda n=n: forms.ours.encode_image(images[n]))) for n in batches
            ]
            pixels = forms.pixels(256 if self.cuda else 4)
            curves["steps"] = []
            for steps in STEP_SIZES:
                ours = create_method("perl", forms.ours.backbone, steps=steps)
                curves["steps"].append(
                    (steps, self.one(f"steps, {steps}", lambda ours=ours: ours.encode_image(pixels)))
                )
        for axis, curve in curves.items():
            for size, reading in curve:
                self.record(f"growth: {axis}", size, {"ours": reading})
            self.say(growth_check(axis, curve))
        self.curves = curves

    def one(self, name: str, work: Work) -> Reading:
        work = recorded(work) if self.cuda else work
        reading = self.clock({name: work})[name]
        if self.cuda:
            reading["peak_MiB"] = recording_peak(work.work)
        return reading

    def adapt(self) -> None:
        """`fit` from images to a trained adapter: wall-clock time, loading of the backbone not included."""
        import perlclip
        from perlclip.backbone import Preprocess
        from perlclip.data.sets import ImageSet

        views = Preprocess(processor=None, size=224, mean=(0.5,) * 3, std=(0.5,) * 3)  # only random ones are made
        object.__setattr__(self.forms.ours.backbone, "preprocess", views)
        for title, classes, shots, side, names in (
            ("EuroSAT-sized", 5, 16, 64, ("fast", "extended")),
            ("ImageNet-sized", 500, 16, 224, ("fast",)),
        ):
            rng = np.random.default_rng(0)
            images = [rng.integers(0, 256, (side, side, 3), np.uint8) for _ in range(classes * shots)]
            labels = [i % classes for i in range(len(images))]
            train = ImageSet(images=images, labels=labels, class_names=tuple(prompts(classes)))
            for name in names:
                ours = create_method("perl", self.forms.ours.backbone)
                began = time.perf_counter()
                result = perlclip.fit(
                    ours, train, recipe=name, thresholds=False, lens="plain", head=False, progress=False
                )
                if self.cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - began
                note = f"{title}, {name}: {result.steps} steps, {result.compile_seconds:.2f} s of it recording"
                self.record("adapt", len(train), {"ours": {"ms": 1e3 * seconds, "runs": 1}}, note=note)
                self.say(f"{note}: {seconds:.1f} s")

    def toybox(self, share: int = 4) -> None:
        """How many answers a rougher format changes, on all drawn sets, with a projector trained on the source."""
        import perlclip
        from perlclip.data.toybox import load_toybox, toybox_names

        names = toybox_names()
        ours = create_method("perl", perlclip.load_backbone("tiny"))
        source = load_toybox(names[0]).train
        perlclip.fit(
            ours, source.select(range(0, len(source), 4)), recipe="extended", lens="plain", head=False, progress=False
        )
        rougher = {}
        for dtype in ("bfloat16", "int8"):
            rougher[dtype] = create_method("perl", perlclip.load_backbone("tiny", dtype=dtype))
            rougher[dtype].load_state_dict(ours.state_dict())
        same, right, total = dict.fromkeys(rougher, 0), dict.fromkeys((*rougher, "float32"), 0), 0
        for name in names:
            test = load_toybox(name).test
            test = test.select(range(0, len(test), share))
            labels_B = torch.as_tensor(test.labels)
            wanted_B = perlclip.evaluate(ours, test, progress=False).predictions_KB[-1]
            right["float32"] += int((wanted_B == labels_B).sum())
            for dtype, lowered in rougher.items():
                found_B = perlclip.evaluate(lowered, test, progress=False).predictions_KB[-1]
                same[dtype] += int((found_B == wanted_B).sum())
                right[dtype] += int((found_B == labels_B).sum())
            total += len(test)
        for dtype, count in same.items():
            now, before = (100 * right[each] / total for each in (dtype, "float32"))
            self.say(
                f"{dtype} gives float32's answer on {100 * count / total:.2f} % of {total} images of {len(names)} "
                f"sets; {now:.2f} % are right instead of {before:.2f}"
            )

    @torch.no_grad()
    def check_closeness(self) -> None:
        """Ours in half precision is as close to float32 as the plain form is."""
        rough = self.half
        exact = Forms(self.device, torch.float32, family=rough.family) if self.cuda else self.forms
        images, texts = (8, 64) if self.cuda else (2, 8)
        pixels = exact.pixels(images)
        wanted = torch.cat([exact.plain.image(pixels), exact.plain_text(texts)])
        few = pixels.to(rough.dtype)
        state = rough.ours.class_state(prompts(texts))
        found = {
            "plain": [rough.plain.image(few), rough.plain_text(texts)],
            "ours": [rough.ours.encode_image(few), rough.ours.encode_text(state)],
        }
        if self.cuda:
            found["ours, compiled"] = [
                Recorded(lambda p: [rough.ours.encode_image(p)], [few])(few)[0].clone(),
                Recorded(lambda: [rough.ours.encode_text(state)], [])()[0].clone(),
            ]
        off = {name: (torch.cat(parts) - wanted).norm(dim=-1).max().item() for name, parts in found.items()}
        self.say(f"largest distance to float32, {rough.dtype}: " + ", ".join(f"{n} {d:.2e}" for n, d in off.items()))
        if max(off.values()) > 2 * off["plain"]:
            raise SystemExit("ours is further from float32 than twice the plain form")
        same = self.forms.ours.encode_image(pixels.to(self.dtype)) - self.forms.plain.image(pixels.to(self.dtype))
        self.say(f"largest difference of a number, ours to plain in {self.dtype}: {same.abs().max().item():.1e}")


def eight_bits(forms: Forms, family: str) -> Method:
    """Ours with the large products of the image tower in 8 bits."""
    _, backbone = build(forms.device, FLOAT8 if forms.device == "cuda" else INT8, family=family)
    ours = create_method("perl", backbone, steps=forms.ours.config.steps)
    ours.load_state_dict(forms.ours.state_dict())
    return ours


def recorded(work: Callable[..., object], *inputs: Tensor) -> Work:
    """The work as a CUDA graph to be replayed; as it is, elsewhere."""
    if not torch.cuda.is_available():
        return lambda: work(*inputs)

    def outputs(*given: Tensor) -> list[Tensor]:
        out = work(*given)
        return [out] if isinstance(out, Tensor) else list(out)

    graph = Recorded(outputs, inputs)
    replay: Work = lambda: graph(*inputs)  # noqa: E731
    replay.work = work  # type: ignore[attr-defined]
    return replay


def recording_peak(work: Work) -> float:
    """MiB that a recorded run of the work needs above what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    recorded(work)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def step_losses(forms: Forms, count: int) -> dict[str, Callable[[], Tensor]]:
    pixels, labels = forms.pixels(BATCH), torch.arange(BATCH, device=forms.device)
    names = prompts(count)
    state = forms.ours.class_state(names)
    return {
        "plain": lambda: forms.plain.loss(pixels, labels, names, "{}"),
        "ours": lambda: forms.ours.loss(pixels, labels, state),
    }


# ---- what it must cost at least ----


def ceilings(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Operations a second of a large matrix product, and bytes a second of a large copy, read and written."""
    n = 8192 if device == "cuda" else 2048
    a, b = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype)
    source = torch.randn(2**28 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    readings = Clock(device, 1.0)({"product": lambda: a @ b, "copy": lambda: target.copy_(source)})
    return 2 * n**3 / readings["product"]["ms"] * 1e3, 2 * source.nbytes / readings["copy"]["ms"] * 1e3


def block_operations(rows: int, length: int, width: int, *, frozen: int = 0) -> float:
    """Of a block at `rows` rows in sequences of one length; `frozen` rows have their Q, K and V already."""
    return 2.0 * (12 * rows - 3 * frozen) * width**2 + 4.0 * rows * length * width


def image_operations(ours: Method, batch: int) -> float:
    """Patches, J base blocks, and K + 1 passes of all but the last block, which is next to nothing at one row."""
    vision = ours.backbone.vision
    n, width = vision.patches + vision.starts, vision.width
    upper = vision.full - DEPTH
    total = 2.0 * batch * n * width * 3 * 16**2 + DEPTH * block_operations(batch * n, n, width)
    for k in range(ours.config.steps + 1):
        kept = batch * n if k else 0
        total += block_operations(batch * (n + k), n + k, width, frozen=kept)
        total += (upper - 1) * block_operations(batch * (n + k), n + k, width)
    return total


def text_operations(state: ClassState) -> float:
    """The refinement alone, which is what a training step repeats."""
    total = 0.0
    for refinement, _ in state.frozen.groups:
        (C, n, width), tower = refinement.x_BND.shape, refinement.tower
        upper = tower.full - DEPTH
        for k in range(1, STEPS + 1):
            total += block_operations(C * (n + k), n + k, width, frozen=C * n)
            total += (upper - 1) * block_operations(C * (n + k), n + k, width)
    return total


def growth_check(axis: str, curve: list[tuple[int, Reading]]) -> str:
    """At most linear in each: a slope of at most 1.1 where it is steepest, in the upper half, for time and memory."""
    found = []
    for what in ("ms", "peak_MiB"):
        points = [(size, reading[what]) for size, reading in curve if what in reading]
        if not points:
            continue
        if axis == "steps":  # a + b K: each step costs the same, but for a row more
            values = np.array([value for _, value in points])
            line = np.polyval(np.polyfit(range(len(values)), values, 1), range(len(values)))
            off = float(np.abs(values - line).max() / values.max())
            found.append(f"{what} within {100 * off:.1f} % of a line{'' if off < 0.1 else ' (NOT as expected)'}")
            continue
        upper = points[len(points) // 2 - 1 :]
        slopes = [math.log(b / a) / math.log(m / n) for (n, a), (m, b) in itertools.pairwise(upper)]
        steepest = max(slopes, default=0.0)
        found.append(f"{what} slope {steepest:.2f}{'' if steepest < 1.1 else ' (NOT as expected)'}")
    return f"growth with {axis}: " + ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    cuda = torch.cuda.is_available()
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=[p for p in PARTS if p not in ("families", "toybox" if cuda else "adapt")],
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="of the part of that name")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64, 256] if cuda else [1, 8])
    parser.add_argument("--classes", type=int, nargs="*", default=[10, 100, 500, 1000] if cuda else [10, 100])
    parser.add_argument("--most", type=int, default=10000 if cuda else 30, help="largest size of the growth curves")
    parser.add_argument("--seconds", type=float, default=2.0 if cuda else 10.0, help="per measurement")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", RESULTS)))
    options = parser.parse_args()
    alone = options.parts == ["families"]
    bench = Bench("cuda" if cuda else "cpu", options.seconds, options.families[0] if alone else "clip")
    whole = set(options.parts) == set(parser.get_default("parts"))
    title = "speed" if whole else "-".join(options.parts)
    name = file_name(title, machine(bench.device), bench.dtype).removesuffix(".csv").replace("-eager", "")
    try:
        for part in options.parts:
            sizes = {"image": [options.batches], "text": [options.classes], "step": [options.classes]}
            sizes["families"] = [options.families, options.batches, options.classes]
            getattr(bench, part)(*sizes.get(part, [options.most] if part == "growth" else []))
    finally:
        write_csv(options.out / f"{name}.csv", bench.rows, COLUMNS)
        (options.out / f"{name}.txt").write_text("\n".join(bench.checks) + "\n")
        if hasattr(bench, "curves"):
            (options.out / f"{name}-growth.png").write_bytes(draw_growth(bench.curves))
    print(f"written to {options.out / name}.csv")


if __name__ == "__main__":
    main()
