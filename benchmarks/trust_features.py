"""Frozen image embeddings of a part of each set, for `benchmarks.trust`: minutes on a CPU.

    python -m benchmarks.trust_features OUT [--real FOLDER]      FOLDER as in `benchmarks.photographs`

Of each class of photographs SHOTS training images, VAL others of the training split to choose on, and TEST test images;
of the toybox 16 shots, its validation images and every second test image.
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
from perlclip.data.toybox import load_toybox
from perlclip.trust.rejection import known_words

TOYS = ("noisy_shapes", "cluttered_toys", "turned_shapes", "gray_toys", "closeup_textures", "tiny_toys")
# shots, validation images and test images of each class
SIZES = {"eurosat": (16, 12, 12), "dtd": (16, 4, 5), "tinyimagenet": (8, 2, 3)}


def drawn_parts(name: str) -> dict[str, ImageSet]:
    data = load_toybox(name)
    train = data.train.few_shot(16, random.Random(1)).base()
    return {"train": train, "val": data.val, "test": data.test.select(range(0, len(data.test), 2))}


def photographed_parts(folder: Path, name: str) -> dict[str, ImageSet]:
    shots, val, test = SIZES[name]
    data, rng = photographs(folder, name), random.Random(1)
    drawn = [rng.sample(places, min(shots + val, len(places))) for places in data.train.by_class().values()]
    return {
        "test": data.test.select(i for places in data.test.by_class().values() for i in rng.sample(places, test)),
        "train": data.train.select(i for places in drawn for i in places[:shots]).base(),
        "val": data.train.select(i for places in drawn for i in places[shots:]),
    }


def embed(out: Path, name: str, parts: dict[str, ImageSet], backbone: perlclip.Backbone) -> None:
    """NAME-PART.safetensors of each part, and NAME-texts with the classes and the words that the backbone knows."""
    for part, images in parts.items():
        path, began = out / f"{name}-{part}.safetensors", time.perf_counter()
        if path.exists():
            continue
        with torch.inference_mode():
            views = fixed_views(images, backbone.preprocess, 16, backbone.device)
            v_NE = torch.cat([backbone.encode_image(pixels).float() for pixels, _ in views])
        save_file({"v_NE": v_NE, "labels_N": torch.tensor([int(label) for label in images.labels])}, path)
        print(f"{name} {part}: {len(images)} images, {time.perf_counter() - began:.0f} s", flush=True)
    path = out / f"{name}-texts.safetensors"
    if not path.exists():
        classes, words = parts["val"].classes, known_words(backbone)
        with torch.inference_mode():
            t_CE = backbone.encode_text(classes.prompts()).float()
            t_WE = backbone.encode_text([classes.template.format(word) for word in words]).float()
        save_file({"t_CE": t_CE, "t_WE": t_WE, "scale": torch.tensor(backbone.logit_scale)}, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.real:
        clip = perlclip.load_backbone(str(options.real / "clip"), device="cpu", dtype="bfloat16")
        for name in SIZES:
            embed(options.out, name, photographed_parts(options.real, name), clip)
    else:
        tiny = perlclip.load_backbone("tiny", device="cpu")
        for name in TOYS:
            embed(options.out, name, drawn_parts(name), tiny)
