"""Can shots say what will happen to classes that are not trained on? PERL trained without some of its classes.

    python -m benchmarks.hold_out train DIR [--real FOLDER] --sets NAME … [--seeds 1 2] [--set vision_depth=10]
    python -m benchmarks.hold_out measure DIR

`train` draws 16 shots of the base classes and trains PERL by its recipe: on all of them, as `fit`'s rehearsal does on
three quarters of each class, and on three quarters of half of the classes, twice. What each says about the shots, and
about images of base and novel classes that are neither shots nor test images, is saved step by step. `measure` chooses
by the shots and looks at those images: the share of the adapted answer for lists of new classes, and the offset between
trained and new classes for lists that have both.

Shapes: K steps, N images, C classes of a list, O offsets.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import perlclip
from benchmarks.photographs import photographs
from benchmarks.strong import harmonic, split
from perlclip.backbone import Backbone
from perlclip.data.loading import fixed_views
from perlclip.data.sets import DataSet, ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.heads.regression import Ridge
from perlclip.methods.perl import Perl
from perlclip.methods.registry import find_recipe
from perlclip.training.choose_head import SHARES, TEXTS, Said, choose

OFFSETS = torch.arange(-24, 25) / 4
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


def train(backbone: Backbone, data: DataSet, seed: int, shots: int, settings: dict[str, Any]) -> dict[str, Tensor]:
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


# ---- what could be chosen by them ----


class Case:
    """What `train` has saved of one draw; classes are numbered in the set's order, base before novel."""

    def __init__(self, path: Path) -> None:
        self.name, self.found = path.stem, load_file(path)
        self.labels_N, self.scale = self.found["shots.labels"], self.found["scale"].item()
        self.base = self.found["full.classes"].tolist()
        self.all = list(range(self.found["full.shots"].shape[-1]))
        self.novel = self.all[len(self.base) :]

    def texts(self, key: str, classes: Sequence[int], share: float) -> Tensor:
        """The mixture of the adapted answer, readout rising, and zero-shot's, for a list of classes, (N, C)."""
        logits_KNC = self.scale * self.found[key].float()[:, :, list(classes)]
        weight_K = torch.arange(1.0, len(logits_KNC) + 1)
        logp_KNC = logits_KNC.log_softmax(-1) + (weight_K / weight_K.sum()).log()[:, None, None]
        return share * logp_KNC.logsumexp(0) + (1 - share) * logits_KNC[0]

    def share(self) -> float:
        """As `fit` chooses it, on the shots held out of the rehearsal."""
        seen = set(self.found["shots.places"].tolist())
        held = [i for i in range(len(self.labels_N)) if i not in seen]
        zero, adapted = (self.texts("shots.shots", self.base, share)[held] for share in (0.0, 1.0))
        nothing = torch.zeros(len(Ridge.STRENGTHS), *zero.shape)
        said = Said(labels_N=self.labels_N[held], zero_NC=zero, adapted_NC=adapted, scores_LNC=nothing)
        return choose(said, SHARES, "rehearsal").share

    def halves(self) -> Iterator[tuple[str, list[int], list[int], list[int], list[int]]]:
        """Of both rehearsals without half of the classes: trained and new classes, and shots of both to ask about."""
        for key in ("half 0", "half 1"):
            trained, seen = self.found[f"{key}.classes"].tolist(), set(self.found[f"{key}.places"].tolist())
            held = [i for i, c in enumerate(self.labels_N.tolist()) if c in trained and i not in seen]
            strange = [i for i, c in enumerate(self.labels_N.tolist()) if c not in trained]
            yield f"{key}.shots", trained, [c for c in self.base if c not in trained], held, strange

    def share_for_new(self) -> float:
        """The share that makes the classes left out most likely among themselves, each at its best temperature."""
        likely: dict[float, float] = {}
        for share in SHARES:
            by_text = torch.zeros(len(TEXTS))
            for key, _, new, _, strange in self.halves():
                place_N = torch.tensor([new.index(int(self.labels_N[i])) for i in strange])[:, None]
                texts_NC = self.texts(key, new, share)[strange]
                by_text += torch.stack([(w * texts_NC).log_softmax(-1).gather(1, place_N).sum() for w in TEXTS])
            likely[share] = by_text.max().item()
        return max(likely, key=lambda share: likely[share])

    def offset(self, share: float) -> float:
        """Log-odds for the trained classes that make it most likely which of the shots are of new ones."""
        odds: dict[int, list[Tensor]] = {1: [], -1: []}
        for key, trained, new, held, strange in self.halves():
            whole_NC = self.texts(key, self.base, share)
            trained_N, new_N = whole_NC[:, trained].logsumexp(-1), whole_NC[:, new].logsumexp(-1)
            odds[1].append((trained_N - new_N)[held])
            odds[-1].append((trained_N - new_N)[strange])
        likely_O = sum(F.logsigmoid(k * (torch.cat(each)[:, None] + OFFSETS)).mean(0) for k, each in odds.items())
        assert isinstance(likely_O, Tensor)
        return OFFSETS[int(likely_O.argmax())].item()

    def right(self, part: str, classes: Sequence[int], share: float, offset: float = 0.0) -> float:
        """Accuracy on validation images in percent, texts alone."""
        texts_NC = self.texts(f"full.{part}", classes, share)
        texts_NC[:, : len(self.base)] += offset if len(classes) > len(self.base) else 0.0
        return self._percent(part, classes, texts_NC)

    def right_by_zero_shot(self, part: str, share: float) -> float:
        """The same among all classes, where zero-shot CLIP says how probable the trained ones are together."""
        n, (texts_NC, zero_NC) = len(self.base), (self.texts(f"full.{part}", self.all, s) for s in (share, 0.0))
        odds_N, wanted_N = (x[:, :n].logsumexp(-1) - x[:, n:].logsumexp(-1) for x in (texts_NC, zero_NC))
        texts_NC[:, :n] += (wanted_N - odds_N)[:, None]
        return self._percent(part, self.all, texts_NC)

    def _percent(self, part: str, classes: Sequence[int], texts_NC: Tensor) -> float:
        asked_N = torch.tensor(classes)[texts_NC.argmax(-1)]
        return 100 * (asked_N == self.found[f"{part}.labels"]).float().mean().item()


def measure(folder: Path) -> None:
    """A row for each draw, then their mean: zero-shot, what `fit` does now, and what the halves would have it do."""
    rows: list[dict[str, float]] = []
    for path in sorted(folder.glob("*.safetensors")):
        case = Case(path)
        share = case.share()
        new, offset = case.share_for_new(), case.offset(share)
        row = {"share": share, "for new": new, "offset": offset}
        row |= {f"novel {s}": case.right("novel", case.novel, v) for s, v in (("0", 0.0), ("now", share), ("new", new))}
        for name, with_share, by in (("0", 0.0, 0.0), ("now", share, 0.0), ("offset", share, offset)):
            both = [case.right(part, case.all, with_share, by) for part in ("base", "novel")]
            row |= {f"all {name} {part}": value for part, value in zip(("base", "novel"), both, strict=True)}
        row |= {f"all by zero-shot {part}": case.right_by_zero_shot(part, share) for part in ("base", "novel")}
        rows.append(row)
        print(f"{case.name:24}" + "  ".join(f"{key} {value:.2f}" for key, value in row.items()), flush=True)
    mean = {key: fmean(row[key] for row in rows) for key in rows[0]}
    print(f"{'mean':24}" + "  ".join(f"{key} {value:.2f}" for key, value in mean.items()))
    for name in ("0", "now", "offset", "by zero-shot"):
        print(f"HM among all, {name}: {harmonic(mean[f'all {name} base'], mean[f'all {name} novel']):.2f}")


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
    if options.what == "measure":
        measure(options.folder)
        return
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
