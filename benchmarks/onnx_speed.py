"""The ONNX file of a backbone against torch on this machine's CPU, in one run: speed, parity, and what int8 changes.

    OMP_NUM_THREADS=1 python -m benchmarks.onnx_speed --backbone openai/clip-vit-base-patch16 --images DATA/dtd/test

Three random PERL adapters (K = 4) go through one file, mixed in every batch. Printed: images a second at batch 1 and 8
of torch in float32 and bfloat16, of ONNX in float32 and int8, each in turn; the largest difference of logits; and on
`--count` photographs the share of answers of each that are torch's in float32. `onnx int8, tool` is what
onnxruntime's own `quantize_dynamic` makes of the file. `--reference cuda` has torch's answers to the photographs from a
GPU; differences of logits are still taken on the CPU, of the first 40, which are all that the file in float32 is asked.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic

import perlclip
from benchmarks.common import RESULTS, Clock, write_csv
from perlclip.data.images import read_image
from perlclip.export.adapter_arrays import adapter_arrays
from perlclip.export.onnx_graph import export_backbone
from perlclip.files import MIB


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
        which = np.arange(len(pixels)) % 3
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
        for i, (method, state) in enumerate(zip(self.methods, self.states, strict=True)):
            if len(pixels[i::3]):
                logits_KBC = method.step_logits(pixels[i::3].to(method.backbone.device), state)
                made[i::3] = logits_KBC.transpose(0, 1).float().cpu().numpy()
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
    options = dict(op_types_to_quantize=["MatMul"], per_channel=True, weight_type=QuantType.QInt8)
    quantize_dynamic(plain, out, extra_options={"MatMulConstBOnly": True}, **options)


def compared(views: list[torch.Tensor], plain: Torch, there: Torch, ours: dict[str, Onnx]) -> list[dict]:
    """Answers of every file beside torch's, and logits of the first images."""
    batches = [torch.stack(views[i : i + 8]) for i in range(0, len(views), 8)]
    wanted = np.concatenate([there(batch) for batch in batches])
    few = wanted[:40] if there is plain else np.concatenate([plain(batch) for batch in batches[:5]])
    rows = []
    for what, run in ours.items():
        logits = np.concatenate([run(batch) for batch in (batches if "int8" in what else batches[:5])])
        same = answers(logits) == answers(wanted[: len(logits)])
        row = {"what": what, "photographs": len(logits), "same_answers_percent": 100 * float(same.mean())}
        row["largest_difference_of_logits"] = f"{np.abs(logits[: len(few)] - few).max():.2g}"
        row["mean_difference_of_logits"] = f"{np.abs(logits[: len(few)] - few).mean():.2g}"
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--images", type=Path, help="folders of photographs by class; without it only speed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20, help="for each batch size")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--reference", default="cpu", help="device of torch's answers")
    parser.add_argument("--out", type=Path, default=RESULTS / "onnx-speed.csv")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    folders = sorted(path for path in args.images.iterdir() if path.is_dir()) if args.images else []
    names = [path.name for path in folders] or ["cat", "dog", "bird", "fish", "horse"]
    backbone = perlclip.load_backbone(args.backbone, device="cpu")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        saved = saved_adapters(backbone, names, Path(folder))
        loaded = load_all(saved, backbone)
        arrays, plain = [adapter_arrays(adapter) for adapter in loaded], Torch(loaded)
        also = Torch(load_all(saved, perlclip.load_backbone(args.backbone, device="cpu", dtype="bfloat16")))
        ways = {"onnx float32": None, "onnx int8 weights": "weights", "onnx int8 products": "products"}
        files = {name: Path(folder) / f"{name}.onnx" for name in (*ways, "onnx int8, tool")}
        for name, int8 in ways.items():
            export_backbone(backbone, files[name], int8=int8)
        by_the_tool(files["onnx float32"], files["onnx int8, tool"])
        sizes = {name: path.stat().st_size / MIB for name, path in files.items()}
        ours = {name: Onnx(path, arrays, threads) for name, path in files.items()}
        size = backbone.preprocess.size
        for batch in args.batch_sizes:
            pixels = torch.randn(batch, 3, size, size)
            works = {"torch float32": lambda p=pixels: plain.alone(p), "torch bfloat16": lambda p=pixels: also.alone(p)}
            works |= {name: lambda p=pixels, run=run: run(p) for name, run in ours.items()}
            for name, reading in Clock("cpu", args.seconds)(works).items():
                rows.append(
                    {"what": name, "batch": batch, "threads": threads, "images_per_second": 1e3 * batch / reading["ms"]}
                )
                rows[-1] |= {"MiB": sizes.get(name, "")}
                print(rows[-1], flush=True)
        paths = [path for several in zip(*(sorted(f.glob("*.jpg")) for f in folders), strict=False) for path in several]
        views = [backbone.preprocess.test_view(read_image(path)) for path in paths[: args.count]]
        if views:
            there = plain
            if args.reference != "cpu":
                there = Torch(load_all(saved, perlclip.load_backbone(args.backbone, device=args.reference)))
            rows += compared(views, plain, there, ours)
    write_csv(args.out, rows)
    print(f"{args.out}; {os.cpu_count()} processors, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
