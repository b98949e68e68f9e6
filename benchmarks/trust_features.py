"""Frozen image embeddings of a part of each set of photographs, for `benchmarks.trust`: minutes on two CPU cores.

    python -m benchmarks.trust_features FOLDER OUT      FOLDER as in `benchmarks.photographs`

Of each class SHOTS training images, VAL others of the training split to choose on, and TEST test images.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import perlclip
from benchmarks.photographs import photographs
from perlclip.data.loading import fixed_views
from perlclip.data.sets import ImageSet

# shots, validation images and test images of each class
SIZES = {"eurosat": (16, 12, 12), "dtd": (16, 4, 5), "tinyimagenet": (8, 2, 3)}


def parts(folder: Path, name: str) -> dict[str, ImageSet]:
    """The images that are looked at."""
    shots, val, test = SIZES[name]
    data, rng = photographs(folder, name), random.Random(1)
    drawn = [rng.sample(places, min(shots + val, len(places))) for places in data.train.by_class().values()]
    return {
        "test": data.test.select(i for places in data.test.by_class().values() for i in rng.sample(places, test)),
        "train": data.train.select(i for places in drawn for i in places[:shots]).base(),
        "val": data.train.select(i for places in drawn for i in places[shots:]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    backbone = perlclip.load_backbone(str(options.folder / "clip"), device="cpu", dtype="bfloat16")
    for name in SIZES:
        for part, images in parts(options.folder, name).items():
            path, began = options.out / f"{name}-{part}.safetensors", time.perf_counter()
            if path.exists():
                continue
            with torch.inference_mode():
                views = fixed_views(images, backbone.preprocess, 16, backbone.device)
                found = torch.cat([backbone.encode_image(pixels).float() for pixels, _ in views])
            save_file({"v_NE": found, "labels_N": torch.tensor([int(label) for label in images.labels])}, path)
            print(f"{name} {part}: {len(images)} images, {time.perf_counter() - began:.0f} s", flush=True)
