"""Frozen embeddings of every image of the drawn sets, or of photographs, once: for `benchmarks.trust` and `.labels`.

    python -m benchmarks.features OUT [--real FOLDER] [--sets NAME …] [--depths 7 …]      FOLDER as for `.photographs`
    python -m benchmarks.features OUT --lenses …         the same of train and val through every lens, in folders
    python -m benchmarks.features OUT --lenses --shift grain …       of images that were changed first, as NAME-grain

NAME-PART.safetensors has the embeddings and labels of a part, and what the image tower says after so many blocks (its
middle, if not told otherwise); NAME-texts those of the classes and of the words that the
backbone knows. Drawn sets take some ten seconds of a core each, photographs a tenth of a second per image of a core.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from torch import Tensor

import perlclip
from benchmarks.photographs import photographs
from perlclip.backbone import LENSES, PLAIN
from perlclip.data.images import read_image
from perlclip.data.loading import fixed_views
from perlclip.data.sets import DataSet, ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.trust.rejection import known_words

TOYS = (
    "toybox", "noisy_shapes", "cluttered_toys", "turned_shapes", "gray_toys", "closeup_textures", "tiny_toys",
    "faint_toys", "covered_toys",
)  # fmt: skip
PHOTOGRAPHS = ("eurosat", "dtd", "tinyimagenet")


def grain(image: Image.Image, other: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Noise of every pixel and colour, as of a sensor in the dark."""
    x_HW3 = np.asarray(image, np.float32)
    return Image.fromarray((x_HW3 + rng.normal(0, 45, x_HW3.shape)).clip(0, 255).astype(np.uint8))


def negative(image: Image.Image, other: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Dark for bright."""
    return ImageOps.invert(image)


def framed(image: Image.Image, other: Image.Image, rng: np.random.Generator) -> Image.Image:
    """In the middle of another picture, which takes four tenths of the whole."""
    whole = other.resize([round(1.3 * side) for side in image.size])
    whole.paste(image, [(outer - inner) // 2 for outer, inner in zip(whole.size, image.size, strict=True)])
    return whole


SHIFTS = {"grain": grain, "negative": negative, "framed": framed}


def shifted(data: DataSet, name: str) -> DataSet:
    """Training and validation images changed, each in its own way by its place."""

    def part(images: ImageSet) -> ImageSet:
        read, rng = [read_image(image) for image in images.images], np.random.default_rng(1)
        others = rng.permutation(len(read))
        made = [SHIFTS[name](image, read[int(k)], rng) for image, k in zip(read, others, strict=True)]
        return replace(images, images=made)

    return replace(data, train=part(data.train), val=part(data.val))


@torch.inference_mode()
def embed(
    out: Path, name: str, data: DataSet, backbone: perlclip.Backbone, depths: list[int], parts: Sequence[str],
    lens: str = PLAIN,
) -> None:  # fmt: skip
    """What is not there yet."""
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        images, path, began = getattr(data, part), out / f"{name}-{part}.safetensors", time.perf_counter()
        if path.exists() or not len(images):
            continue
        found: dict[str, list[Tensor]] = defaultdict(list)
        for pixels, _ in fixed_views(images, backbone.preprocess, 64, backbone.device):
            frozen = backbone.frozen(pixels, lens)
            for depth in depths:
                found[f"m{depth}_NF"].append(frozen.middle(depth).half().cpu())
            found["v_NE"].append(backbone.encode_image(frozen).float().cpu())
        labels_N = torch.tensor([int(label) for label in images.labels])
        save_file({"labels_N": labels_N, **{key: torch.cat(parts) for key, parts in found.items()}}, path)
        print(f"{name} {part}: {len(images)} images, {time.perf_counter() - began:.0f} s", flush=True)
    path = out / f"{name}-texts.safetensors"
    if not path.exists():
        classes, words = data.train.classes, known_words(backbone)
        t_CE, t_WE = (
            backbone.encode_text(prompts).float().cpu()
            for prompts in (classes.prompts(), [classes.template.format(word) for word in words])
        )
        texts = {"t_CE": t_CE, "t_WE": t_WE, "scale": torch.tensor(backbone.logit_scale)}
        save_file(texts, path, {"words": json.dumps(words), "classes": json.dumps(classes.names)})


def stored(folder: Path, part: str) -> dict[str, dict[str, Tensor]]:
    """Embeddings and labels of every set that has this part."""
    found = {name: folder / f"{name}-{part}.safetensors" for name in (*TOYS, *PHOTOGRAPHS)}
    return {name: load_file(path) for name, path in found.items() if path.exists()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--lenses", action="store_true")
    parser.add_argument("--shift", choices=SHIFTS)
    parser.add_argument("--depths", type=int, nargs="*", help="in rising order")
    options = parser.parse_args()
    clip = str(options.real / "clip") if options.real else "tiny"
    model = perlclip.load_backbone(clip, dtype="bfloat16" if options.real else "float32")
    blocks = options.depths or [model.vision.middle]
    for each in options.sets or (PHOTOGRAPHS if options.real else TOYS):
        images = photographs(options.real, each) if options.real else load_toybox(each)
        if options.shift:
            each, images = f"{each}-{options.shift}", shifted(images, options.shift)
        if not options.lenses:
            embed(options.out, each, images, model, blocks, ("train", "val", "test"))
        for kind in (PLAIN, *LENSES) if options.lenses else ():
            embed(options.out / kind, each, images, model, blocks, ("train", "val"), kind)
