"""Wrong labels found, and labels saved (docs/labels.md).

    python -m benchmarks.features CACHE [--real FOLDER]               frozen embeddings, once: all sets, or photographs
    python -m benchmarks.labels wrong --cache CACHE --out DIR         labels changed at random: how many are found
    python -m benchmarks.labels next --cache CACHE --out DIR          a simulated annotator: suggestions against chance
    python -m benchmarks.labels strays --cache CACHE --out DIR        images of one set among those of another
    python -m benchmarks.labels copies                                pictures stored again, scaled, cropped, mirrored

All but `copies` is in closed form and takes minutes on one core. The rule of `wrong` was chosen on the training images
of `TUNED`, of Tiny ImageNet on the first half of its classes, with seeds from 11 on; the other sets were not looked at.
"""

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from PIL import Image, ImageEnhance
from safetensors.torch import load_file
from torch import Tensor

import perlclip
from benchmarks.features import PHOTOGRAPHS
from benchmarks.features import stored as features
from perlclip.data.images import read_image
from perlclip.data.sets import ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.labels.duplicates import duplicate_groups
from perlclip.labels.looking import look
from perlclip.labels.outliers import outliers, strangeness
from perlclip.labels.suggestions import UNSURE, learned, most_worth
from perlclip.labels.wrong import SUSPECT, Doubts, doubts
from perlclip.viz.drawing import draw
from perlclip.viz.style import GREY, VERMILION

TUNED = ("toybox", "noisy_shapes", "cluttered_toys", "turned_shapes", "closeup_textures")
DRAWN = {"train": 32, "test": 16}  # images of each class
SIZES = (20, 40, 60, 80, 120, 160, 200, 240, 320, 400)
SEEDS = 6
SHARE = 0.8  # of the pool that a seed sees


def stored(cache: Path, part: str) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, embeddings, zero-shot logits and labels of every set, of drawn sets some images of each class."""
    for name, found in features(cache, part).items():
        texts, labels_N = load_file(cache / f"{name}-texts.safetensors"), found["labels_N"]
        most = len(labels_N) if name in PHOTOGRAPHS else DRAWN[part]
        places = torch.cat([(labels_N == c).nonzero()[:most, 0] for c in range(len(texts["t_CE"]))]).sort().values
        v_NE = found["v_NE"][places]
        yield name, v_NE, texts["scale"] * v_NE @ texts["t_CE"].T, labels_N[places]


def changed(labels_N: Tensor, texts_NC: Tensor, share: float, near: bool, seed: int) -> Tensor:
    """A share of the labels replaced: by any other, or by what the texts would say next, as a tired person does."""
    rng, labels_N, C = Random(f"noise {seed}"), labels_N.clone(), texts_NC.shape[1]
    next_N = texts_NC.scatter(1, labels_N[:, None], -torch.inf).argmax(1)
    for i in rng.sample(range(len(labels_N)), round(share * len(labels_N))):
        others = [c for c in range(C) if c != int(labels_N[i])]
        labels_N[i] = next_N[i] if near else rng.choice(others)
    return labels_N


def confident_learning(found: Doubts, labels_N: Tensor) -> Tensor:
    """The rule of `cleanlab`: another class is as probable as it is on average for the images that have its label."""
    C = found.p_NC.shape[1]
    usual_C = torch.stack(
        [found.p_NC[labels_N == c, c].mean() if (labels_N == c).any() else torch.tensor(2.0) for c in range(C)]
    )
    sure_NC = torch.where(found.p_NC >= usual_C, found.p_NC, -1.0)
    best_N = sure_NC.max(1)
    return (best_N.values > 0) & (best_N.indices != labels_N)


def wrong(cache: Path, out: Path) -> None:
    rows = []
    for name, v_NE, texts_NC, labels_N in stored(cache, "train"):
        zero_shot = 100 * (texts_NC.argmax(1) == labels_N).double().mean().item()
        for kind, share in (("none", 0.0), ("any", 0.02), ("any", 0.1), ("any", 0.2), ("near", 0.1)):
            for seed in range(1, 2 if kind == "none" else 4):
                given_N = changed(labels_N, texts_NC, share, kind == "near", seed)
                bad_N, found = given_N != labels_N, doubts(v_NE, texts_NC, given_N)
                rules = {"perlclip": found.wrong_N > SUSPECT, "confident learning": confident_learning(found, given_N)}
                for rule, flagged_N in rules.items():
                    hits_N = flagged_N & bad_N
                    right = (found.likely_N == labels_N)[hits_N].double().mean().item() if hits_N.any() else 0.0
                    rows.append({
                        "set": name, "tuned": name in TUNED, "images": len(labels_N),
                        "zero_shot": round(zero_shot, 1),
                        "changed_to": kind, "share": share, "seed": seed, "rule": rule, "flagged": int(flagged_N.sum()),
                        "recall": round(int(hits_N.sum()) / max(1, int(bad_N.sum())), 3),
                        "precision": round(int(hits_N.sum()) / max(1, int(flagged_N.sum())), 3),
                        "likely_right": round(right, 3), "estimated": round(found.share, 4),
                    })  # fmt: skip
        here = [row for row in rows if row["set"] == name and row["share"] == 0.1]
        for rule in ("perlclip", "confident learning"):
            for kind in ("any", "near"):
                some = [row for row in here if row["rule"] == rule and row["changed_to"] == kind]
                said = {
                    key: round(float(np.mean([row[key] for row in some])), 2)
                    for key in ("recall", "precision", "likely_right")
                }
                print(f"{name:24s} zero-shot {zero_shot:.0f} %  {rule:18s} {kind:4s} {said}", flush=True)
    write(out / "wrong-labels.csv", rows)


def annotate(pool: Sequence[Tensor], test: Sequence[Tensor], guided: bool, seed: int) -> Iterator[tuple[int, float]]:
    """Accuracy on test images as labels are given, to suggestions or at random."""
    rng = Random(f"pool {seed}")
    kept = sorted(rng.sample(range(len(pool[0])), int(SHARE * len(pool[0]))))
    v_NE, texts_NC, labels_N = (each[kept] for each in pool)
    known: list[int] = []
    logits_NC = UNSURE * texts_NC
    for size in (size for size in SIZES if size <= len(kept) // 2):
        free = [i for i in range(len(kept)) if i not in set(known)]
        count = size - len(known)
        if guided:
            taken = most_worth(v_NE[free], logits_NC[free].softmax(-1), count, v_NE[known], labels_N[known])
            known += [free[i] for i, _ in taken]
        else:
            known += rng.sample(free, count)
        ridge, choice = learned(v_NE[known], texts_NC[known], labels_N[known])
        weight_CE, bias_C = ridge.solution(choice.strength)
        logits_NC, answers_NC = (
            choice.text * texts + choice.scale * (v.double() @ weight_CE.T + bias_C).float()
            for v, texts in ((v_NE, texts_NC), test[:2])
        )
        yield size, 100 * (answers_NC.argmax(1) == test[2]).double().mean().item()


def next_(cache: Path, out: Path) -> None:
    tests = {name: rest for name, *rest in stored(cache, "test")}
    rows, curves = [], {}
    for name, *pool in stored(cache, "train"):
        if name not in tests:
            continue
        for guided in (False, True):
            runs = [dict(annotate(pool, tests[name], guided, seed)) for seed in range(SEEDS)]
            how = "suggested" if guided else "random"
            rows += [
                {"set": name, "how": how, "seed": seed, "labels": size, "accuracy": round(accuracy, 2)}
                for seed, run in enumerate(runs) for size, accuracy in run.items()
            ]  # fmt: skip
            curves[name, how] = (list(runs[0]), np.array([list(run.values()) for run in runs]))
        sizes, random = curves[name, "random"]
        needed = labels_needed(sizes, random.mean(0), curves[name, "suggested"][1].mean(0))
        print(f"{name:24s} {random.mean(0).round(1)} → {curves[name, 'suggested'][1].mean(0).round(1)}", flush=True)
        print(f"{'':24s} share of the labels needed {needed.round(2)}, mean {needed[1:].mean():.2f}", flush=True)
    write(out / "curves.csv", rows)
    draw_curves(rows, out)


def draw_curves(rows: Sequence[dict], out: Path) -> None:
    """Mean and standard deviation over the seeds."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        found = curves.setdefault(row["set"], {}).setdefault(row["how"], {})
        found.setdefault(int(row["labels"]), []).append(float(row["accuracy"]))

    def paint(figure) -> None:
        axes = list(figure.subplots(2, -(-len(curves) // 2), squeeze=False).flat)
        for axis, (name, both) in zip(axes, curves.items(), strict=False):
            for how, colour in (("random", GREY), ("suggested", VERMILION)):
                sizes, accuracy = list(both[how]), np.array(list(both[how].values()))
                mean, spread = accuracy.mean(1), accuracy.std(1)
                axis.plot(sizes, mean, color=colour, marker="o", markersize=3, label=how)
                axis.fill_between(sizes, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0)
            axis.set(title=name, xlabel="labels", ylabel="accuracy %")
        for axis in axes[len(curves) :]:
            axis.set_visible(False)
        figure.axes[0].legend()

    picture = draw("curves", "", (3 * -(-len(curves) // 2), 5.6), paint)
    (out / "curves.png").write_bytes(picture.png)


def labels_needed(sizes: Sequence[int], random: np.ndarray, guided: np.ndarray) -> np.ndarray:
    """From the third size on: of the labels that chance needs for its accuracy, the share that suggestions need."""
    random, guided = np.maximum.accumulate(random), np.maximum.accumulate(guided)
    needed = np.interp(random, guided + 1e-9 * np.arange(len(guided)), sizes)
    return (needed / np.array(sizes))[2:]


def strays(cache: Path, out: Path) -> None:
    """One image in twenty is of another set and has any label: how well they are told apart, and how many are named."""
    rows, sets = [], {name: (v_NE, labels_N) for name, v_NE, _, labels_N in stored(cache, "train")}
    for name, (own_NE, own_N) in sets.items():
        texts = load_file(cache / f"{name}-texts.safetensors")
        for other, (foreign_NE, _) in sets.items():
            if other == name or (other in PHOTOGRAPHS) != (name in PHOTOGRAPHS):
                continue
            rng, count, C = Random(f"strays {name} {other}"), max(1, len(own_NE) // 20), len(texts["t_CE"])
            v_NE = torch.cat([own_NE, foreign_NE[rng.sample(range(len(foreign_NE)), count)]])
            labels_N = torch.cat([own_N, torch.tensor([rng.randrange(C) for _ in range(count)])])
            cosine_NC = v_NE @ texts["t_CE"].T
            found = doubts(v_NE, texts["scale"] * cosine_NC, labels_N)
            strange_N = strangeness(found.vouched_N, cosine_NC.max(1).values)
            rank_N = strange_N.argsort().argsort().double()
            apart = (rank_N[-count:].sum().item() - count * (count - 1) / 2) / (count * len(own_NE))
            named = outliers(strange_N)
            hits = sum(i >= len(own_NE) for i in named)
            rows.append({
                "set": name, "strays_of": other, "strays": count, "auroc": round(apart, 3), "named": len(named),
                "of_these_strays": hits,
            })  # fmt: skip
            print(rows[-1], flush=True)
    write(out / "strays.csv", rows)


def copies() -> None:
    method = perlclip.create_method("zero-shot", perlclip.load_backbone("tiny"))
    for name in ("cluttered_toys", "noisy_shapes", "faint_toys"):
        train = load_toybox(name).train
        originals = [read_image(train.images[i]) for i in range(0, len(train), 4)]
        for kind, change in CHANGES.items():
            images = [*originals, *map(change, originals[::4])]
            set_ = ImageSet(images=images, labels=[0] * len(images), class_names=("any",))
            seen = look(method, set_, progress=False)
            groups = duplicate_groups(seen.frozen_NE, seen.small_N3SS)
            pairs = {(i, j) for group in groups for i in group for j in group if i < j}
            wanted = {(4 * k, len(originals) + k) for k in range(len(originals[::4]))}
            print(
                f"{name:16s} {kind:10s} found {len(pairs & wanted) / len(wanted):.2f}, not meant {len(pairs - wanted)}",
                flush=True,
            )


def _jpeg(image: Image.Image, quality: int = 50) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=quality)
    return Image.open(buffer).convert("RGB")


CHANGES = {
    "jpeg": _jpeg,
    "half": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": lambda image: image.crop(
        (image.width // 20, image.height // 20, image.width * 19 // 20, image.height * 19 // 20)
    ),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.2),
}


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wrong", "next", "strays", "copies"))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/labels"))
    options = parser.parse_args()
    if options.what == "copies":
        copies()
    elif options.cache is None:
        parser.error("--cache is needed")
    else:
        {"wrong": wrong, "next": next_, "strays": strays}[options.what](options.cache, options.out)
