"""The study behind PERL's recipe `strong` (docs/strong.md).

    python -m benchmarks.strong factors --out DIR                  the ten targets of the toybox
    python -m benchmarks.strong factors --out DIR --real FOLDER    photographs: clip/, sets.json and the sets in FOLDER
    python -m benchmarks.strong collect DIR … --out FILE           one table of a round's rows, seeds averaged
    python -m benchmarks.strong show FILE                          means over the sets
    python -m benchmarks.strong check                              a stack of PERLs against `perlclip.fit`

Rounds: `factors` changes one thing at a time, `together` what survived, `depth` moves the thoughts of `strong` in one
tower or both, `center` takes the shots' mean embedding off images before they meet texts, `through` trains so as well,
`few` has stronger anchors for few shots, `steps` counts epochs (`--shots 4`). 16 shots of the base classes are trained
on; accuracy is measured on the base images of the training and validation splits that were not drawn, and on all of
their novel ones; test images only with `--test`. Many PERLs are trained as one batch (stacked.py): a GPU needs minutes,
a CPU days.
"""

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

import perlclip
from benchmarks.photographs import photographs
from benchmarks.stacked import Member, Setting, Stack, state_of
from perlclip.backbone import Backbone
from perlclip.data.sets import DataSet, ImageSet
from perlclip.data.suites import SUITES
from perlclip.data.toybox import load_toybox

WORDS = 24  # that are no class, for the anchor on words
CENTRE = Setting(lr=3e-3, epochs=5, loss_scale=0.25)
TEN = replace(CENTRE, epochs=10)
RANK_2 = replace(TEN, rank=2, affine=False)  # 6,400 parameters on ViT-B/16
EXTENDED = Setting(lr=1e-3, schedule="constant", epochs=5)
THROUGH = replace(TEN, center=0.5)
THROUGH_WITH: dict[str, dict[str, Any]] = {
    "rate 6e-3": {"lr": 6e-3},
    "scale 0.12": {"loss_scale": 0.12},
    "scale 0.5": {"loss_scale": 0.5},
    "anchor 0.5": {"anchor": 0.5},
    "anchor 2": {"anchor": 2.0},
    "20 epochs": {"epochs": 20},
}
ROUNDS: dict[str, dict[str, Setting]] = {
    "factors": {
        "fast": Setting(lr=1e-4, schedule="constant", epochs=1),
        "extended": EXTENDED,
        "extended 3e-3": replace(EXTENDED, lr=3e-3),
        "centre": CENTRE,
        "rate 1e-3": replace(CENTRE, lr=1e-3),
        "rate 6e-3": replace(CENTRE, lr=6e-3),
        "constant": replace(CENTRE, schedule="constant"),
        "epochs 10": TEN,
        "batch 16": replace(CENTRE, batches=4),
        "scale 1": replace(CENTRE, loss_scale=1.0),
        "scale 0.5": replace(CENTRE, loss_scale=0.5),
        "scale 0.12": replace(CENTRE, loss_scale=0.12),
        "anchor 0": replace(CENTRE, anchor=0.0),
        "anchor 4": replace(CENTRE, anchor=4.0),
        "text 1": replace(CENTRE, text_anchor=1.0),
        "words 1": replace(CENTRE, word_anchor=1.0),
        "words 4": replace(CENTRE, word_anchor=4.0),
        "logits 0.3": replace(CENTRE, logit_anchor=0.3),
        "thought 1": replace(CENTRE, thought=1.0),
        "average": replace(CENTRE, average=True),
        "random steps": replace(CENTRE, random_steps=True),
        "crop 0.8": replace(CENTRE, crop=0.8),
        "crop 0.3": replace(CENTRE, crop=0.3),
        "rank 2": replace(CENTRE, rank=2, affine=False),
    },
    "together": {
        "extended": EXTENDED,
        "extended 3e-3": replace(EXTENDED, lr=3e-3),
        "ten epochs": TEN,
        "anchor 2": replace(TEN, anchor=2.0),
        "rank 2": RANK_2,
        "rank 2, 1.5e-3": replace(RANK_2, lr=1.5e-3),
        "rank 2, 1.5e-3, anchor 2": replace(RANK_2, lr=1.5e-3, anchor=2.0),
    },
    "depth": {
        "strong": TEN,
        "vision 10": replace(TEN, vision_depth=10),
        "vision 10, anchor 4": replace(TEN, vision_depth=10, anchor=4.0),
        "both 10": replace(TEN, vision_depth=10, text_depth=10),
        "both 10, anchor 4": replace(TEN, vision_depth=10, text_depth=10, anchor=4.0),
        "vision 9": replace(TEN, vision_depth=9),
        "both 9": replace(TEN, vision_depth=9, text_depth=9),
        "text 10": replace(TEN, text_depth=10),
    },
    "center": {
        "strong": TEN,
        "through 0.75": replace(TEN, center=0.75),
        "anchor 0": replace(TEN, anchor=0.0),
    },
    "through": {
        "through 0": TEN,
        **{f"through {share}": replace(TEN, center=share) for share in (0.25, 0.5, 0.75)},
        **{f"through 0.5, {name}": replace(THROUGH, **changes) for name, changes in THROUGH_WITH.items()},
        "sentences 25": replace(TEN, sentences=25.0),
        "step biases": replace(TEN, affine=False, step_biases=True),  # as many numbers
    },
    "few": {
        **{f"epochs {epochs}": replace(TEN, epochs=epochs) for epochs in (20, 40)},
        **{f"epochs {e}, anchor {a}": replace(TEN, epochs=e, anchor=a) for e in (20, 40) for a in (4, 16)},
        **{f"epochs {e}, through 0.5": replace(THROUGH, epochs=e) for e in (20, 40)},
    },
    "steps": {f"{epochs} epochs": replace(THROUGH, epochs=epochs) for epochs in (5, 10, 20, 40, 80)},
}
CENTERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the shots' mean embedding taken off images before they meet texts
# Of rounds that look at more than 0.
SHARES = {"center": CENTERS, "through": (0.5, 0.75), "few": (0.75,), "steps": (0.75,)}
COLUMNS = ("set", "shots", "setting", "seed", "part", "readout", "accuracy", "images")


def readouts(v_KMBE: Tensor, t_KMCE: Tensor, scale: float) -> dict[str, Tensor]:
    """What orders the classes, for every way to make one answer of K + 1: (M, B, C) each."""
    v, t = v_KMBE.float(), t_KMCE.float()
    logits_KMBC = scale * v @ t.mT
    p_KMBC, rising_K = logits_KMBC.softmax(-1), torch.arange(1.0, len(v) + 1, device=v.device)
    return {
        **{f"step {k}": each for k, each in enumerate(logits_KMBC)},
        "probabilities": p_KMBC.mean(0),
        "probabilities 1-4": p_KMBC[1:].mean(0),
        "probabilities rising": torch.einsum("k,kmbc->mbc", rising_K, p_KMBC),
        "first and last": p_KMBC[0] + p_KMBC[-1],
        "logits": logits_KMBC.mean(0),
        "embeddings": F.normalize(v.mean(0), dim=-1) @ F.normalize(t.mean(0), dim=-1).mT,
    }


def words_for(backbone: Backbone, names: Sequence[str], count: int = WORDS) -> list[str]:
    """Words of the tokenizer that are no part of a class name, drawn at random."""
    taken = {word for name in names for word in name.lower().split()}
    token = backbone.text.embed.token
    assert isinstance(token, Tensor)
    known = sorted(
        word.removesuffix("</w>")
        for word, i in backbone.tokenizer.get_vocab().items()
        if word.endswith("</w>") and word[:-4].isalpha() and len(word) >= 8 and token[i].abs().sum() > 0
    )
    free = [word for word in known if word not in taken]
    return Random(0).sample(free, min(count, len(free)))


def split(data: DataSet, shots: int, seed: int) -> dict[str, ImageSet]:
    """What is trained on, and base and novel images to measure on that are not test images."""
    drawn = data.train.sample(shots, Random(seed))
    others = sorted(set(range(len(data.train))) - set(drawn))
    return {
        "train": data.train.select(drawn).base(),
        "base": _both(data.train.select(others), data.val).base(),
        "novel": _both(data.train, data.val).novel(),
    }


def _both(one: ImageSet, other: ImageSet) -> ImageSet:
    return replace(one, images=[*one.images, *other.images], labels=[*one.labels, *other.labels])


def measure(
    stack: Stack, images: dict[str, ImageSet], workers: int, centers: Sequence[float] = (0.0,)
) -> Iterator[tuple[int, str, str, float, int]]:
    """Member, part, readout, accuracy and number of images; `all base` is base images among all classes."""
    texts = {part: stack.classes_of(images[part]) for part in images}
    every = torch.cat([texts["base"], texts["novel"]], 2)
    for part in images:
        right: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        shift = texts["base"].shape[2] if part.endswith("novel") else 0
        for v_KMBE, labels in stack.look(images[part], 32, workers):
            for share in centers:
                met_KMBE, told = v_KMBE.float() - share * stack.center_ME[:, None], f", center {share:g}" * bool(share)
                for where, t_KMCE, label in ((part, texts[part], labels), (f"all {part}", every, labels + shift)):
                    for name, answers in readouts(met_KMBE, t_KMCE, stack.backbone.logit_scale).items():
                        right[where, name + told].append((answers.argmax(-1) == label).float())
        for (where, name), found in right.items():
            correct_MN = torch.cat(found, 1)
            for i, accuracy in enumerate(correct_MN.mean(1).mul(100).tolist()):
                yield i, where, name, accuracy, correct_MN.shape[1]


def together(setting: Setting) -> tuple[int, ...]:
    """What members of one stack have in common."""
    return setting.epochs, setting.vision_depth, setting.text_depth


def study(options: argparse.Namespace) -> None:
    """Train and measure a round on every set: one file of rows, and the parameters of every member."""
    backbone = perlclip.load_backbone(str(options.real / "clip") if options.real else "tiny", dtype=options.dtype)
    names = options.sets or (["eurosat", "dtd", "tinyimagenet"] if options.real else SUITES["toybox"].targets)
    settings = {name: s for name, s in ROUNDS[options.round].items() if not options.only or name in options.only}
    if options.crop:
        settings = {n: s if n.startswith("extended") else replace(s, crop=options.crop) for n, s in settings.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        data = photographs(options.real, name) if options.real else load_toybox(name)
        shots, began = options.shots, time.monotonic()
        parts = {seed: split(data, shots, seed) for seed in options.seeds}
        rows: list[list[object]] = []
        for kind in dict.fromkeys(together(setting) for setting in settings.values()):
            mine = [(key, seed) for key in settings if together(settings[key]) == kind for seed in options.seeds]
            members = [Member(settings[key], seed) for key, seed in mine]
            train = {seed: parts[seed]["train"] for seed in options.seeds}
            stack = Stack(backbone, members, train, words_for(backbone, data.class_names))
            stack.train(options.workers)
            for seed in options.seeds:
                few = [i for i, member in enumerate(members) if member.seed == seed]
                images = {where: part for where, part in parts[seed].items() if where != "train"}
                if options.test:
                    images |= {"test base": data.test.base(), "test novel": data.test.novel()}
                shares = SHARES.get(options.round, (0.0,))
                for i, where, readout, accuracy, count in measure(stack.some(few), images, options.workers, shares):
                    rows.append([name, shots, mine[few[i]][0], seed, where, readout, f"{accuracy:.3f}", count])
            for i, (key, seed) in enumerate(mine):
                file_name = f"{name}-{shots}-{key}-{seed}.safetensors".replace(" ", "_").replace(",", "")
                save_file({n: t.contiguous() for n, t in state_of(stack, i).items()}, options.out / file_name)
            with (options.out / f"{name}-{shots}.csv").open("w", newline="") as file:
                csv.writer(file).writerows([COLUMNS, *rows])
        print(f"{name}: {len(settings) * len(options.seeds)} members, {time.monotonic() - began:.0f} s", flush=True)


def collect(folders: Sequence[Path], out: Path, readouts: Sequence[str] = ()) -> None:
    """One table of all rows, or those of some readouts, the mean of seeds in each."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    key = ("set", "shots", "setting", "part", "readout")
    for path in (path for folder in folders for path in sorted(folder.glob("*.csv"))):
        with path.open() as file:
            for row in csv.DictReader(file):
                if not readouts or row["readout"] in readouts:
                    found[tuple(row[column] for column in key)].append(float(row["accuracy"]))
    rows = [[*words, len(values), f"{fmean(values):.2f}"] for words, values in found.items()]
    with out.open("w", newline="") as file:
        csv.writer(file).writerows([[*key, "seeds", "accuracy"], *rows])


def harmonic(a: float, b: float) -> float:
    """The harmonic mean of two accuracies."""
    return 2 * a * b / (a + b) if a + b else 0.0


def means(path: Path) -> dict[tuple[str, str, str], float]:
    """By setting, readout and part, the mean over the sets that have all settings."""
    found: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            found[row["setting"], row["readout"], row["part"]][row["set"]] = float(row["accuracy"])
    return {key: fmean(values.values()) for key, values in found.items()}


def show(path: Path) -> None:
    """Base, novel, HM and the generalised HM (all classes at once) of every setting and readout."""
    found = means(path)
    for setting, readout in dict.fromkeys((setting, readout) for setting, readout, _ in found):
        base, novel, among, between = (
            found[setting, readout, part] for part in ("base", "novel", "all base", "all novel")
        )
        numbers = (base, novel, harmonic(base, novel), harmonic(among, between))
        print(f"{setting:26} {readout:20}" + "".join(f"{number:7.2f}" for number in numbers))


def check() -> None:
    """A stack of two against `perlclip.fit`, on the CPU: the largest difference of a parameter."""
    backbone = perlclip.load_backbone("tiny", device="cpu")
    shots = load_toybox("tiny_toys").train.few_shot(2, Random(1)).base()
    setting = replace(CENTRE, epochs=2)
    other = replace(setting, batches=2, lr=1e-3, schedule="constant", average=True, center=0.5)
    stack = Stack(backbone, [Member(setting, 1), Member(other, 1)], {1: shots}, [])
    stack.train()
    for i, member in enumerate(stack.members):
        config = {"loss_scale": member.setting.loss_scale, "center": 0.75, "loss_center": member.setting.center}
        method = perlclip.create_method("perl", backbone, seed=1, **config)
        recipe = replace(member.setting.recipe, batch_size=4 * member.setting.batches, crop_scale=(0.5, 1.0))
        perlclip.fit(method, shots, recipe=recipe, seed=1, thresholds=False, lens="plain", head=False, progress=False)
        mine = state_of(stack, i)
        print(member.setting, max((p - mine[n]).abs().max().item() for n, p in method.named_parameters()))


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*ROUNDS, "collect", "show", "check"])
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--only", nargs="+", help="settings of the round")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--shots", type=int, default=16)
    parser.add_argument("--readouts", nargs="+", help="that `collect` keeps")
    parser.add_argument("--crop", type=float, default=0.0, help="of all settings but `extended`'s")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--test", action="store_true", help="look at test images, too")
    options = parser.parse_args()
    options.round = options.what
    if options.what in ROUNDS:
        study(options)
    elif options.what == "collect":
        collect(options.paths, options.out, options.readouts)
    elif options.what == "show":
        show(options.paths[0])
    else:
        check()


if __name__ == "__main__":
    main()
