"""The ONNX file of a backbone against torch on this machine's CPU, in one run: speed, parity, and what int8 changes.

    OMP_NUM_THREADS=1 python -m benchmarks.onnx_speed --backbone openai/clip-vit-base-patch16 --images DATA/dtd/test

Three random PERL adapters (K = 4), or those of `--adapters`, go through one file, mixed in every batch. Printed: images
a second at batch 1 and 8 of torch in float32 and bfloat16, of ONNX in float32 and int8, each in turn; the largest
difference of logits; and on `--count` photographs the share of answers of each that are torch's in float32. `onnx int8,
tool` is what onnxruntime's own `quantize_dynamic` makes of the file. `--reference cuda` has torch's answers to the
photographs from a GPU; differences of logits are still taken on the CPU, of the first 40, which are all that the file
in float32 is asked. Rows are written as they come; `--keep FOLDER` also keeps all logits there, so that a run that was
ended goes on. `--only bfloat16 products` leaves out the rest.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import perlclip
from benchmarks.common import RESULTS, Clock, Table
from perlclip.data.images import read_image
from perlclip.export.adapter_arrays import adapter_arrays
from perlclip.export.onnx_graph import export_backbone
from perlclip.files import MIB

TOOL = "onnx int8, tool"
Run = Callable[[torch.Tensor], np.ndarray]


def saved_adapters(backbone: perlclip.Backbone, names: list[str], out: Path) -> list[Path]:
    """Projectors that change what is seen, a little: as large as trained ones."""
    made = []
    for seed in (1, 2, 3):
        method = perlclip.create_method("perl", backbone, seed=seed, init="torch", readout="rising")
        made.append(out / str(seed))
        perlclip.save_adapter(method, made[-1], class_names=names, template="a photo of a {}.")
    return made


def load_all(folders: list[Path], backbone: perlclip.Backbone) -> list[perlclip.Adapter]:
    return [perlclip.load_adapter(folder, backbone=backbone) for folder in folders]


class Onnx:
    """A file with three adapters."""

    def __init__(self, path: Path, arrays: list[dict[str, np.ndarray]], threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.feed = {i.name: np.stack([a[i.name] for a in arrays]) for i in self.session.get_inputs()[2:]}

    def __call__(self, pixels: torch.Tensor) -> np.ndarray:
        which = np.arange(len(pixels)) % len(self.feed["classes"])
        logits, _ = self.session.run(None, {**self.feed, "pixels": pixels.numpy(), "which": which})
        return logits


class Torch:
    """The same by the library: the adapters one after the other, each for its own images."""

    def __init__(self, loaded: list[perlclip.Adapter]) -> None:
        self.methods = [adapter.method for adapter in loaded]
        prompts = perlclip.ImageSet(
            images=[], labels=[], class_names=loaded[0].class_names, template=loaded[0].template
        ).prompts
        self.states = [method.class_state(prompts) for method in self.methods]

    @torch.no_grad()
    def __call__(self, pixels: torch.Tensor) -> np.ndarray:
        made: list = [None] * len(pixels)
        n = len(self.methods)
        for i, (method, state) in enumerate(zip(self.methods, self.states, strict=True)):
            if len(pixels[i::n]):
                logits_KBC = method.step_logits(pixels[i::n].to(method.backbone.device), state)
                made[i::n] = logits_KBC.transpose(0, 1).float().cpu().numpy()
        return np.stack(made)

    @torch.no_grad()
    def alone(self, pixels: torch.Tensor) -> None:
        """One adapter for the whole batch: what is timed."""
        self.methods[0].step_logits(pixels, self.states[0])


def answers(logits_BKC: np.ndarray) -> np.ndarray:
    """The rising readout's."""
    p = torch.from_numpy(logits_BKC).double().softmax(-1).numpy()
    return (p * np.arange(1, p.shape[1] + 1)[None, :, None]).sum(1).argmax(-1)


def by_the_tool(plain: Path, out: Path) -> None:
    """Int8 as onnxruntime's own tool makes it: all rows of a batch share one scale."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    options = dict(op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8)
    quantize_dynamic(plain, out, extra_options={"MatMulConstBOnly": True}, **options)


def kept(path: Path, run: Run, batches: list[torch.Tensor]) -> np.ndarray:
    """Logits of all batches; those of an earlier run are read, and all are saved every now and then."""
    made = list(np.load(path)) if path.exists() else []
    for i, batch in enumerate(batches, 1):
        if len(made) < sum(map(len, batches[:i])):
            made.extend(run(batch))
            if i % 5 == 0 or i == len(batches):
                np.save(path.with_suffix(".new.npy"), np.stack(made))
                path.with_suffix(".new.npy").rename(path)
                print(f"{path.stem}: {len(made)} photographs", flush=True)
    return np.stack(made)[: sum(map(len, batches))]


def compared(
    views: list[torch.Tensor], plain: Torch, there: Torch, ours: dict[str, Run], folder: Path
) -> Iterator[dict]:
    """Answers of every file beside torch's, and logits of the first images."""
    batches = [torch.stack(views[i : i + 8]) for i in range(0, len(views), 8)]
    wanted = kept(folder / "torch.npy", there, batches)
    few = wanted[:40] if there is plain else np.concatenate([plain(batch) for batch in batches[:5]])
    for what, run in ours.items():
        logits = kept(folder / f"{what}.npy", run, batches[:5] if what == "onnx float32" else batches)
        same = answers(logits) == answers(wanted[: len(logits)])
        row = {"what": what, "photographs": len(logits), "same_answers_percent": 100 * float(same.mean())}
        row["largest_difference_of_logits"] = f"{np.abs(logits[: len(few)] - few).max():.2g}"
        row["mean_difference_of_logits"] = f"{np.abs(logits[: len(few)] - few).mean():.2g}"
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--images", type=Path, help="folders of photographs by class; without it only speed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20, help="for each batch size")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--reference", default="cpu", help="device of torch's answers")
    parser.add_argument("--only", nargs="+", default=[], help="what has one of these words in its name")
    parser.add_argument("--adapters", type=Path, nargs="+", help="trained ones, of one class list")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, default=RESULTS / "onnx-speed.csv")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    folders = sorted(path for path in args.images.iterdir() if path.is_dir()) if args.images else []
    names = [path.name for path in folders] or ["cat", "dog", "bird", "fish", "horse"]
    backbone = perlclip.load_backbone(args.backbone, device="cpu")
    rows = Table(args.out)
    with tempfile.TemporaryDirectory() as folder:
        saved = args.adapters or saved_adapters(backbone, names, Path(folder))
        loaded = load_all(saved, backbone)
        arrays, plain = [adapter_arrays(adapter) for adapter in loaded], Torch(loaded)
        ways = {"onnx int8 products": "products", "onnx float32": None, "onnx int8 weights": "weights", TOOL: None}
        ways = {name: int8 for name, int8 in ways.items() if any(word in name for word in args.only or [""])}
        files = {name: Path(folder) / f"{name}.onnx" for name in ways}
        for name, path in files.items():
            export_backbone(backbone, path, int8=ways[name])
            if name == TOOL:
                by_the_tool(path, path)
        sizes = {name: path.stat().st_size / MIB for name, path in files.items()}
        ours = {name: Onnx(path, arrays, threads) for name, path in files.items()}
        size = backbone.preprocess.size
        if args.batch_sizes:
            also = Torch(load_all(saved, perlclip.load_backbone(args.backbone, device="cpu", dtype="bfloat16")))
        for batch in args.batch_sizes:
            pixels = torch.randn(batch, 3, size, size)
            works = {"torch float32": lambda p=pixels: plain.alone(p), "torch bfloat16": lambda p=pixels: also.alone(p)}
            works |= {name: lambda p=pixels, run=run: run(p) for name, run in ours.items()}
            for name, reading in Clock("cpu", args.seconds)(works).items():
                row = {"what": name, "batch": batch, "threads": threads, "MiB": sizes.get(name, "")}
                rows.add(row | {"images_per_second": 1e3 * batch / reading["ms"]})
        paths = [path for several in zip(*(sorted(f.glob("*.jpg")) for f in folders), strict=False) for path in several]
        views = [backbone.preprocess.test_view(read_image(path)) for path in paths[: args.count]]
        if views:
            there = plain
            if args.reference != "cpu":
                there = Torch(load_all(saved, perlclip.load_backbone(args.backbone, device=args.reference)))
            keep = args.keep or Path(folder)
            keep.mkdir(parents=True, exist_ok=True)
            if "bfloat16" in args.only:
                half = perlclip.load_backbone(args.backbone, device=args.reference, dtype="bfloat16")
                ours = {"torch bfloat16": Torch(load_all(saved, half)), **ours}
            for row in compared(views, plain, there, ours, keep):
                rows.add(row)
    print(f"{args.out}; {os.cpu_count()} processors, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
