"""Can shots say what will happen to classes that are not trained on? PERL trained without some of its classes.

    python -m benchmarks.hold_out train DIR [--real FOLDER] --sets NAME … [--seeds 1 2] [--set vision_depth=10]
    python -m benchmarks.hold_out measure DIR

`train` draws 16 shots of the base classes and trains PERL by its recipe: on all of them, as `fit`'s rehearsal does on
three quarters of each class, and on three quarters of half of the classes, twice. What each says about the shots, and
about images of base and novel classes that are neither shots nor test images, is saved step by step. `measure` chooses
by the shots and looks at those images: the share of the adapted answer, and the offset between trained and new classes.

Shapes: K steps, N images, C all classes of the set, E embedding width.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import perlclip
from benchmarks.photographs import photographs
from benchmarks.strong import split
from perlclip.backbone import Backbone
from perlclip.data.loading import fixed_views
from perlclip.data.sets import ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.methods.perl import Perl
from perlclip.methods.registry import find_recipe

MOST = 400  # images of a part to measure on


def some(images: ImageSet, most: int = MOST) -> ImageSet:
    """So many of them, spread over all."""
    return images.select(sorted({k * len(images) // most for k in range(most)})) if len(images) > most else images


def left_out(shots: ImageSet, seed: int) -> dict[str, tuple[list[int], list[int]]]:
    """Of each rehearsal its name, the places that it is trained on, and the classes."""
    rng = Random(f"rehearsal {seed}")
    places = {label: rng.sample(where, len(where)) for label, where in shots.by_class().items()}
    kept = {label: where[len(where) // 4 :] for label, where in places.items()}
    order = rng.sample(sorted(places), len(places))
    halves = [sorted(order[::2]), sorted(order[1::2])]
    return {
        "shots": (sorted(i for where in kept.values() for i in where), sorted(places)),
        **{
            f"half {h}": (sorted(i for label in half for i in kept[label]), half) for h, half in enumerate(halves)
        },
    }  # fmt: skip


def of_classes(images: ImageSet, classes: Sequence[int]) -> ImageSet:
    """Those of some classes alone, which are counted anew."""
    chosen = images.select(i for i, label in enumerate(images.labels) if label in set(classes))
    new = {label: i for i, label in enumerate(classes)}
    return replace(chosen, labels=[new[label] for label in chosen.labels],
                   class_names=tuple(images.class_names[c] for c in classes))  # fmt: skip


@torch.no_grad()
def look(method: Perl, images: ImageSet, class_names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Cosines of every step with all classes, (K+1, N, C), and the frozen embeddings."""
    state = method.class_state(replace(images, class_names=tuple(class_names), images=[], labels=[]).classes)
    t_KCE, found, frozen = method.class_embedding_steps(state), [], []
    for pixels, _ in fixed_views(images, method.backbone.preprocess, 64, method.backbone.device):
        v_KBE = method.encode_image_steps(pixels)
        found.append((v_KBE.float() @ t_KCE.float().mT).half().cpu())
        frozen.append(v_KBE[0].half().cpu())
    return torch.cat(found, 1), torch.cat(frozen)


def train(backbone: Backbone, data: Any, seed: int, shots: int, settings: dict[str, Any]) -> dict[str, Tensor]:
    """All of it for one draw."""
    parts = split(data, shots, seed)
    images = {"shots": parts["train"], "base": some(parts["base"]), "novel": some(parts["novel"])}
    recipe, wanted = find_recipe("perl", "strong", backbone.name)
    every = list(range(len(parts["train"].class_names)))
    trainings = {"full": (list(range(len(parts["train"]))), every, 1.0)}
    for name, (places, classes) in left_out(parts["train"], seed).items():
        trainings[name] = places, classes, 0.5  # as long as a rehearsal
    out: dict[str, Tensor] = {"scale": torch.tensor(backbone.logit_scale)}
    for part, found in images.items():
        shift = len(parts["base"].class_names) if part == "novel" else 0
        out[f"{part}.labels"] = torch.tensor([int(label) + shift for label in found.labels])
    for name, (places, classes, share) in trainings.items():
        began = time.perf_counter()
        method = perlclip.create_method("perl", backbone, seed=seed, **(wanted | settings))
        assert isinstance(method, Perl)
        mine = of_classes(parts["train"].select(places), classes)
        shorter = replace(recipe, epochs=max(1, int(recipe.epochs * share)))
        perlclip.fit(method, mine, recipe=shorter, seed=seed, thresholds=False, head=False, progress=False)
        out[f"{name}.places"], out[f"{name}.classes"] = torch.tensor(places), torch.tensor(classes)
        for part, found in images.items():
            if part == "shots" or name == "full":
                out[f"{name}.{part}"], out[f"{part}.v_NE"] = look(method, found, data.class_names)
        print(f"{data.name} seed {seed} {name}: {time.perf_counter() - began:.0f} s", flush=True)
    return out


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "measure"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--sets", nargs="+", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], help="another setting of PERL's, as vision_depth=10")
    options = parser.parse_args()
    settings = {key: int(value) for key, value in (each.split("=") for each in options.set)}
    options.folder.mkdir(parents=True, exist_ok=True)
    dtype = "bfloat16" if options.real else "float32"
    backbone = perlclip.load_backbone(str(options.real / "clip") if options.real else "tiny", dtype=dtype)
    for name in options.sets:
        data = photographs(options.real, name) if options.real else load_toybox(name)
        for seed in options.seeds:
            path = options.folder / f"{name}-{options.shots}-{seed}.safetensors"
            if not path.exists():
                found = train(backbone, data, seed, options.shots, settings)
                save_file({key: value.contiguous() for key, value in found.items()}, path)


if __name__ == "__main__":
    main()
