"""The ONNX file of a backbone against torch on this machine's CPU, in one run: speed, parity, and what int8 changes.

    OMP_NUM_THREADS=1 python -m benchmarks.onnx_speed --backbone openai/clip-vit-base-patch16 --images DATA/dtd/test

Three random PERL adapters (K = 4) go through one file, mixed in every batch. Printed: images a second at batch 1 and 8
of torch in float32 and bfloat16, of ONNX in float32 and int8, each in turn; the largest difference of logits; and on
`--count` photographs the share of answers of each that are torch's in float32.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch

import perlclip
from benchmarks.common import RESULTS, Clock, write_csv
from perlclip.data.images import read_image
from perlclip.export.adapter_arrays import adapter_arrays
from perlclip.export.onnx_graph import export_backbone
from perlclip.files import MIB


def adapters(backbone: perlclip.Backbone, names: list[str]) -> list[perlclip.Adapter]:
    """Projectors that change what is seen, a little: as large as trained ones."""
    made = []
    for seed in (1, 2, 3):
        method = perlclip.create_method("perl", backbone, seed=seed, init="torch", readout="rising")
        folder = Path(tempfile.mkdtemp()) / "adapter"
        perlclip.save_adapter(method, folder, class_names=names, template="a photo of a {}.")
        made.append(perlclip.load_adapter(folder, backbone=backbone))
    return made


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
                logits_KBC = method.step_logits(pixels[i::3], state)
                made[i::3] = logits_KBC.transpose(0, 1).float().numpy()
        return np.stack(made)

    @torch.no_grad()
    def alone(self, pixels: torch.Tensor) -> None:
        """One adapter for the whole batch: what is timed."""
        self.methods[0].step_logits(pixels, self.states[0])


def answers(logits_BKC: np.ndarray) -> np.ndarray:
    """The rising readout's."""
    p = torch.from_numpy(logits_BKC).double().softmax(-1).numpy()
    return (p * np.arange(1, p.shape[1] + 1)[None, :, None]).sum(1).argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--images", type=Path, help="folders of photographs by class; without it only speed")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20, help="for each batch size")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path, default=RESULTS / "onnx-speed.csv")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    folders = sorted(path for path in args.images.iterdir() if path.is_dir()) if args.images else []
    names = [path.name for path in folders] or ["cat", "dog", "bird", "fish", "horse"]
    backbone = perlclip.load_backbone(args.backbone, device="cpu")
    loaded = adapters(backbone, names)
    arrays = [adapter_arrays(adapter) for adapter in loaded]
    half = perlclip.load_backbone(args.backbone, device="cpu", dtype="bfloat16")
    plain = Torch(loaded)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        files = {"onnx float32": Path(folder) / "a.onnx", "onnx int8": Path(folder) / "b.onnx"}
        for name, path in files.items():
            export_backbone(backbone, path, int8="int8" in name)
        sizes = {name: path.stat().st_size / MIB for name, path in files.items()}
        ours = {name: Onnx(path, arrays, threads) for name, path in files.items()}
        also = Torch(adapters(half, names))
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
        found: dict[str, list] = {}
        for i in range(0, min(args.count, len(paths)), 8):
            views = torch.stack([backbone.preprocess.test_view(read_image(path)) for path in paths[i : i + 8]])
            for name, run in {"torch float32": plain, **ours}.items():
                found.setdefault(name, []).append(run(views))
    for name, several in found.items():
        logits, wanted = np.concatenate(several), np.concatenate(found["torch float32"])
        row = {
            "what": name, "photographs": len(logits),
            "largest_difference_of_logits": f"{np.abs(logits - wanted).max():.2g}",
            "same_answers_percent": 100 * float((answers(logits) == answers(wanted)).mean()),
        }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    write_csv(args.out, rows)
    print(f"{args.out}; {os.cpu_count()} processors, onnxruntime {onnxruntime.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
