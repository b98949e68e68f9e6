"""How fast JPEG photographs are decoded and cropped on one core, exactly or at a smaller scale, and what that changes.

    python -m benchmarks.decoding --images DATA/dtd/test --backbone openai/clip-vit-base-patch16 --count 300

Large photographs are made of those that are there: mosaics of `--grid` times as many of one class, which have all the
detail of a photograph and still show the class, and single ones scaled up, which have little. Printed: images a second
of decoding and cropping on one core by size, the share of answers (PERL, K = 4) that stay the same as with exact
decoding, and how far embeddings move.
"""

import argparse
import io
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import perlclip
from benchmarks.common import RESULTS, Table
from perlclip.batch.decoders import crop_of
from perlclip.batch.work import DECODE
from perlclip.data.images import NamedBytes, read_image

KINDS = ("as they are", "scaled up", "mosaics")


def photographs(folder: Path, count: int, grid: int, kind: str) -> Iterator[bytes]:
    """JPEG files: as they are, scaled up, or mosaics of one class."""
    classes = {path.name: sorted(path.glob("*.jpg")) for path in sorted(folder.iterdir()) if path.is_dir()}
    every = [path for paths in zip(*classes.values(), strict=False) for path in paths][:count]
    rng = np.random.default_rng(1)
    for path in every:
        if kind == "as they are":
            yield path.read_bytes()
            continue
        image = read_image(path)
        w, h = image.size
        if kind == "scaled up":
            yield jpeg(image.resize((grid * w, grid * h), Image.Resampling.BICUBIC))
            continue
        whole = Image.new("RGB", (grid * w, grid * h))
        for i, part in enumerate(rng.choice(classes[path.parent.name], grid * grid)):
            whole.paste(read_image(part).resize((w, h)), (i % grid * w, i // grid * h))
        yield jpeg(whole)


def jpeg(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=90)
    return buffer.getvalue()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--backbone", default="openai/clip-vit-base-patch16")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--grid", type=int, default=4)
    parser.add_argument("--speed-only", action="store_true", help="decode and crop, ask nobody")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--out", type=Path, default=RESULTS / "decoding.csv")
    args = parser.parse_args()
    backbone = perlclip.load_backbone(args.backbone, device=args.device, dtype=args.dtype)
    names = sorted(path.name for path in args.images.iterdir() if path.is_dir())
    classifier = perlclip.Classifier(perlclip.create_method("perl", backbone), names)
    preprocess, rows = backbone.preprocess, Table(args.out)
    for what in args.kinds:
        files = list(photographs(args.images, args.count, args.grid, what))
        size = sum(map(len, files)) / len(files) / 1000
        shape = read_image(files[0]).size
        exact: list = []
        for word, least in DECODE.items():
            began = time.process_time()
            crops = [crop_of(NamedBytes(file, what), preprocess, least * preprocess.size) for file in files]
            rate = len(files) / (time.process_time() - began)
            row = {
                "photographs": what, "count": len(files), "first": f"{shape[0]}x{shape[1]}", "kB": size, "decode": word,
                "images_per_second_and_core": rate,
            }  # fmt: skip
            if args.speed_only:
                rows.add(row)
                continue
            answers, views = [], []
            for i in range(0, len(crops), args.batch_size):
                pixels = preprocess.pixels(
                    torch.from_numpy(np.stack(crops[i : i + args.batch_size])).to(backbone.device)
                )
                ((found, v_BE),) = classifier.predict_batches([(pixels, {})], embeddings=True)
                answers += [answer.label for answer in found]
                views.append(v_BE.float().cpu())
            v_BE = torch.cat(views)
            exact = exact or [answers, v_BE]
            same = 100 * sum(a == b for a, b in zip(answers, exact[0], strict=True)) / len(files)
            cosine = (v_BE * exact[1]).sum(-1)
            row |= {"same_answers_percent": same, "cosine_mean": float(cosine.mean())}
            rows.add(row | {"cosine_least": float(cosine.min())})


if __name__ == "__main__":
    main()
