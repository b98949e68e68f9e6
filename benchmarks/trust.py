"""Are probabilities right, outsiders noticed, sets as good as they say? Zero-shot CLIP, ridge regression, PERL.

    python -m benchmarks.features FEATURES [--real FOLDER]                       frozen embeddings, once
    python -m benchmarks.trust perl FEATURES [--real FOLDER] --sets NAME …       trains PERL, of drawn sets minutes each
    python -m benchmarks.trust measure FEATURES --split val                      to choose by
    python -m benchmarks.trust measure FEATURES --out docs/results/trust         the test images: tables and a figure
    python -m benchmarks.trust new STORE [--real FOLDER] --out FILE              a benchmark's adapters, on new classes
    python -m benchmarks.trust cost [--real FOLDER]                              what it adds to a prediction

All of it is made of what `fit` sees: 16 shots of the base classes, each left out in turn, or held out of PERL's
rehearsal, drawn anew for each seed. Numbers are means over seeds, with their standard deviation. Far outsiders are the
images of the suite's other sets, near ones those of the set's novel classes. Photographs have no validation images:
those of the training split that are no shots take their place.
"""

import argparse
import csv
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import perlclip
from benchmarks.features import PHOTOGRAPHS
from benchmarks.new_classes import adapters
from benchmarks.photographs import photographs
from perlclip.data.sets import ImageSet
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.heads.regression import Ridge
from perlclip.methods.base import Method
from perlclip.text.classes import spelling
from perlclip.training import choose_head
from perlclip.training.shots import Seen, look_at
from perlclip.trust import conformal
from perlclip.trust.calibration import carried_temperature, fit_temperature
from perlclip.trust.conformal import KINDS, LabelSets
from perlclip.trust.record import Trust
from perlclip.trust.rejection import FarWords, class_means, text_score
from perlclip.trust.reliability import BINS, reliability
from perlclip.viz.drawing import Drawing, draw
from perlclip.viz.style import BLUE, GREY, VERMILION

TOYS = ("noisy_shapes", "cluttered_toys", "turned_shapes", "gray_toys", "closeup_textures", "tiny_toys")
SHOTS, COVERAGE, RATE = 16, 0.9, 0.05
OUTSIDE = 600  # images of other sets, at most


@dataclass(frozen=True, kw_only=True)
class Said:
    """What is answered to images: with the head, by the texts alone, by zero-shot CLIP."""

    labels_N: Tensor
    logits_NC: Tensor
    texts_NC: Tensor
    zero_NC: Tensor
    v_NE: Tensor


Answer = Callable[[Tensor, Tensor], Tensor]


def as_zero_shot(v_NE: Tensor, zero_NC: Tensor) -> Tensor:
    return zero_NC


@dataclass(frozen=True, kw_only=True)
class Case:
    """A method on a set: answers to shots held out, to fresh images of both halves, and, among base classes, to others.

    `trust` is what the library makes of the shots held out, `far` the words that it rejects by.
    """

    suite: str
    name: str
    method: str
    seed: int
    held: Said
    base: Said
    novel: Said
    outside: dict[str, Said]
    t_CE: Tensor  # frozen texts of all classes
    trust: Trust
    far: FarWords | None
    rehearsed: Said | None = None  # the base images, answered by what was trained in the rehearsal


def drawn(labels_N: Tensor, seed: int) -> list[int]:
    """Places of the shots of the base classes."""
    rng, classes = random.Random(seed), range(-(-(int(labels_N.max()) + 1) // 2))
    places = [(labels_N == c).nonzero()[:, 0].tolist() for c in classes]
    return sorted(i for some in places for i in rng.sample(some, min(SHOTS, len(some))))


def split_places(folder: Path, name: str, split: str, shots: list[int]) -> tuple[str, list[int]]:
    """A part's name, and the places in it that `split` stands for."""
    part = "train" if split == "val" and name in PHOTOGRAPHS else split
    count = len(load_file(folder / f"{name}-{part}.safetensors")["labels_N"])
    kept = sorted(set(range(count)) - set(shots)) if part == "train" else list(range(count))
    return part, kept if name in PHOTOGRAPHS else kept[:: 2 if part == "test" else 1]


def others(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """Sets of the same suite and places among their test images: far outsiders."""
    suite = PHOTOGRAPHS if name in PHOTOGRAPHS else TOYS
    found = {other: folder / f"{other}-test.safetensors" for other in suite if other != name}
    sizes = {other: len(load_file(path)["labels_N"]) for other, path in found.items() if path.exists()}
    most = OUTSIDE // max(1, len(sizes))
    return [(other, [k * size // most for k in range(most)] if size > most else list(range(size)))
            for other, size in sizes.items()]  # fmt: skip


def far_words(folder: Path, name: str) -> FarWords | None:
    """As `FarWords.of` has them for the base classes, from embeddings."""
    path = folder / f"{name}-texts.safetensors"
    texts = load_file(path)
    with safe_open(path, "pt") as file:
        words, names = (json.loads(file.metadata()[key]) for key in ("words", "classes"))
    half = -(-len(names) // 2)
    named = {word for each in names[:half] for word in spelling(each).split()}
    kept = [i for i, word in enumerate(words) if not set(word.split()) & named]
    if name not in PHOTOGRAPHS:
        return None
    return FarWords.chosen([words[i] for i in kept], texts["t_WE"][kept], texts["t_CE"][:half], texts["scale"].item())


def frozen_cases(folder: Path, name: str, split: str, seed: int) -> Iterator[Case]:
    """Zero-shot CLIP and ridge regression, from embeddings."""
    train, texts = (load_file(folder / f"{name}-{part}.safetensors") for part in ("train", "texts"))
    t_CE, scale = texts["t_CE"], texts["scale"].item()
    half, places = -(-len(t_CE) // 2), drawn(train["labels_N"], seed)
    part, kept = split_places(folder, name, split, places)
    fresh = {key: value[kept] for key, value in load_file(folder / f"{name}-{part}.safetensors").items()}
    labels_N, far = fresh["labels_N"], far_words(folder, name)

    def said(v_NE: Tensor, labels_N: Tensor, t_CE: Tensor, head: Answer = as_zero_shot) -> Said:
        zero_NC = scale * v_NE @ t_CE.T
        logits_NC = head(v_NE, zero_NC)
        return Said(labels_N=labels_N, logits_NC=logits_NC, texts_NC=zero_NC, zero_NC=zero_NC, v_NE=v_NE)

    def case(method: str, held: Said, head: Answer = as_zero_shot) -> Case:
        base, novel = (fresh["v_NE"][where] for where in (labels_N < half, labels_N >= half))
        strangers = [load_file(folder / f"{other}-test.safetensors")["v_NE"][i] for other, i in others(folder, name)]
        outside = {"near": novel} | ({"far": torch.cat(strangers)} if strangers else {})
        return Case(
            suite="photographs" if name in PHOTOGRAPHS else "toybox", name=name, method=method, seed=seed, held=held,
            base=said(base, labels_N[labels_N < half], t_CE[:half], head),
            novel=said(novel, labels_N[labels_N >= half] - half, t_CE[half:]),
            outside={kind: said(v_NE, torch.zeros(0), t_CE[:half], head) for kind, v_NE in outside.items()},
            t_CE=t_CE, far=far,
            trust=Trust.of(
                "each left out", held.logits_NC, held.texts_NC, held.labels_N, held.v_NE, far, means_CE, near_N
            ),
        )  # fmt: skip

    zero = said(train["v_NE"][places], train["labels_N"][places], t_CE[:half])
    means_CE, near_N = class_means(zero.v_NE, zero.labels_N, half)
    yield case("zero-shot", zero)
    ridge = Ridge.of(zero.v_NE, zero.labels_N, half)
    held = choose_head.Said(
        labels_N=zero.labels_N, zero_NC=zero.zero_NC, adapted_NC=zero.zero_NC,
        scores_LNC=ridge.left_out(Ridge.STRENGTHS, torch.arange(len(zero.labels_N))),
    )  # fmt: skip
    choice = choose_head.choose(held, (1.0,), "each left out")
    weight_CE, bias_C = (each.float() for each in ridge.solution(choice.strength))
    logits_NC, _ = held.answers(choice)
    left_out = Said(**vars(zero) | {"logits_NC": logits_NC.float()})
    yield case("ridge", left_out, lambda v, zero: choice.text * zero + choice.scale * (v @ weight_CE.T + bias_C))


def perl_case(folder: Path, path: Path, split: str) -> Case:
    """From what `perl` has saved."""
    name, _, seed = path.stem.split("-")
    found, t_CE = load_file(path), load_file(folder / f"{name}-texts.safetensors")["t_CE"]

    def said(part: str) -> Said:
        return Said(**{key: found[f"{part}.{key}"] for key in Said.__dataclass_fields__})

    held, far = said("held"), far_words(folder, name)
    return Case(
        suite="photographs" if name in PHOTOGRAPHS else "toybox", name=name, method="perl", seed=int(seed), held=held,
        base=said(f"base-{split}"), novel=said(f"novel-{split}"), t_CE=t_CE, far=far,
        rehearsed=said(f"rehearsed-{split}"),
        outside={"near": said(f"near-{split}"), "far": said("far")},
        trust=Trust.of(
            "rehearsal", held.logits_NC, held.texts_NC, held.labels_N, held.v_NE, far,
            found["means_CE"], found["near_N"],
        ),
    )  # fmt: skip


def train_perl(folder: Path, name: str, seed: int, real: Path | None) -> None:
    """PERL as `fit` makes it; what it says about held-out shots is caught on the way."""
    out = folder / f"{name}-perl-{seed}.safetensors"
    if out.exists():
        return

    def load(name: str) -> Any:
        return photographs(real, name) if real else load_toybox(name)

    clip = str(real / "clip") if real else "tiny"
    backbone, data, began = (
        perlclip.load_backbone(clip, dtype="bfloat16" if real else "float32"),
        load(name),
        time.perf_counter(),
    )
    method = perlclip.create_method("perl", backbone, seed=seed)
    places = drawn(torch.tensor([int(label) for label in data.train.labels]), seed)
    kept: dict[str, Any] = {}
    chosen = choose_head.choose

    def choose(held: choose_head.HeldOut, *rest: Any, **how: Any) -> choose_head.Choice:
        kept["held"], kept["choice"] = held, chosen(held, *rest, **how)
        return kept["choice"]

    def look(fresh: Method, *rest: Any) -> Seen:
        kept["rehearsed"] = fresh
        return look_at(fresh, *rest)

    choose_head.choose, choose_head.look_at = choose, look
    fitted = perlclip.fit(
        method, data.train.select(places).base(), seed=seed, thresholds=False, lens="plain", progress=False
    )
    choose_head.choose, choose_head.look_at = chosen, look_at
    held, choice = kept["held"], kept["choice"]
    logits_NC, texts_NC = held.answers(choice)
    save = {"labels_N": held.labels_N, "logits_NC": logits_NC, "texts_NC": texts_NC, "zero_NC": held.zero_NC}
    found = {f"held.{key}": value for key, value in {**save, "v_NE": held.v0_NE}.items()}
    found |= {"near_N": held.near_N, "means_CE": held.means_CE}

    def ask(what: str, images: ImageSet, classes: ImageSet, novel: bool = False, method: Method = method) -> None:
        """Images among these classes, whether or not they are of one."""
        state = method.class_state(classes.classes, novel=novel)
        seen = look_at(method, images, state)
        device, answers = backbone.device, []
        for head in (fitted.head, fitted.head and fitted.head.texts_alone()):
            with torch.no_grad():
                answering = Answering(method, state, head)
                more_NC = None if seen.middle_NF is None else answering.from_middle(seen.middle_NF.to(device))
                found_KNC = answering.finish(seen.adapted_NC[None].to(device), seen.v_KNE.to(device), more_NC)
            answers.append(found_KNC[-1].cpu())
        logits_NC, texts_NC = answers
        save = {"labels_N": seen.labels_N, "logits_NC": logits_NC, "texts_NC": texts_NC, "zero_NC": seen.zero_NC}
        found.update({f"{what}.{key}": value for key, value in {**save, "v_NE": seen.v0_NE}.items()})

    base = data.train.base()
    for split in ("val", "test"):
        part, some = split_places(folder, name, split, places)
        images = getattr(data, part).select(some)
        ask(f"base-{split}", images.base(), base)
        ask(f"rehearsed-{split}", images.base(), base, method=kept["rehearsed"])
        ask(f"novel-{split}", images.novel(), images.novel(), novel=True)
        ask(f"near-{split}", images.novel(), base)
    strangers = [image for other, some in others(folder, name) for image in load(other).test.select(some).images]
    ask("far", ImageSet(images=strangers, labels=[0] * len(strangers), class_names=("any",)), base)
    save_file({key: value.float().contiguous() if value.is_floating_point() else value.contiguous()
               for key, value in found.items()}, out)  # fmt: skip
    print(f"{name} {seed}: {time.perf_counter() - began:.0f} s; {fitted.choice and fitted.choice.sentence}", flush=True)


@torch.no_grad()
def ask_new(store: Path, real: Path | None, out: Path) -> None:
    """Test images of new classes among themselves, as PERL's adapters with heads answer them, and zero-shot CLIP."""
    clip, rows = str(real / "clip") if real else "tiny", []
    backbone = perlclip.load_backbone(clip, dtype="bfloat16" if real else "float32")
    for run, adapter in adapters(store, backbone):
        name, method = run["dataset"], adapter.method
        images = (photographs(real, name) if real else load_toybox(name)).test.novel()
        state = method.class_state(images.classes, novel=True)
        seen, answering = look_at(method, images, state), Answering(method, state, adapter.head)
        logits_KNC, v_KNE = (each.to(backbone.device) for each in (seen.adapted_NC[None], seen.v_KNE))
        found = {"as answered": answering.finish(logits_KNC, v_KNE)[-1].cpu(), "zero-shot CLIP": seen.zero_NC}
        for rule, logits_NC in found.items():
            measured = reliability(logits_NC.double().softmax(-1), seen.labels_N).numbers()
            right = 100 * (logits_NC.argmax(-1) == seen.labels_N).double().mean().item()
            rows.append({"set": name, "rule": rule, "accuracy": right, **measured})
            print(name, run["seed"], rule, *(f"{k} {rows[-1][k]:.3f}" for k in NUMBERS), flush=True)
    if not rows:
        raise SystemExit("there is no adapter with a head by PERL's recipe strong here")
    write(over(rows, ("set", "rule"), NUMBERS), out)


def log_loss_temperature(logits_NC: Tensor, labels_N: Tensor) -> float:
    """The usual way."""
    grid = torch.logspace(-1.3, 1.3, 161).tolist()
    return min(grid, key=lambda t: F.cross_entropy(logits_NC / t, labels_N).item())


def calibrated(case: Case) -> Iterator[dict[str, Any]]:
    """A row for each half and rule."""
    held, half = case.held, case.held.logits_NC.shape[1]
    own, texts = (fit_temperature(logits, held.labels_N) for logits in (held.logits_NC, held.texts_NC))
    trained_CE, new_CE = case.t_CE[:half], case.t_CE[half:]
    among = (trained_CE @ trained_CE.T - 2 * torch.eye(half)).amax(-1).mean().item()
    away = (new_CE @ trained_CE.T).amax(-1).mean().item()
    nearness = min(1.0, (1 - among) / max(1 - away, 1e-6))
    temperatures = {
        "base": {"none": 1.0, "confidence": own, "log-loss": log_loss_temperature(held.logits_NC, held.labels_N)},
        "novel": {
            "none": 1.0, "confidence": texts, "log-loss": log_loss_temperature(held.texts_NC, held.labels_N),
            "distance": texts**nearness, "zero-shot's": fit_temperature(held.zero_NC, held.labels_N),
            "half way": texts**0.5, "halves": carried_temperature(held.texts_NC, held.labels_N),
        },
    }  # fmt: skip
    halves = [("base", case.base), ("novel", case.novel)]
    for part, said in halves[:1] if case.method == "perl" else halves:  # whose new classes `new` asks about
        rows = {"zero-shot CLIP": (said.zero_NC, 1.0)}
        rows |= {rule: (said.logits_NC, t) for rule, t in temperatures[part].items()}
        for rule, (logits_NC, t) in rows.items():
            measured = reliability((logits_NC / t).softmax(-1), said.labels_N)
            right = (logits_NC.argmax(-1) == said.labels_N).double().mean().item()
            yield {"half": part, "rule": rule, "temperature": t, "accuracy": 100 * right, **measured.numbers()}


def covered(case: Case) -> Iterator[dict[str, Any]]:
    """Coverage and size of sets of labels among the base classes."""
    t = case.trust.calibration.temperature
    held_NC, p_BC = (said.logits_NC.double().div(t).softmax(-1) for said in (case.held, case.base))
    sets = LabelSets.of(held_NC, case.held.labels_N)
    labels_N1 = case.base.labels_N[:, None]
    right = (p_BC.argmax(-1) == case.base.labels_N).double().mean().item()
    for kind in KINDS:
        within_BC = sets.of_images(p_BC, kind, COVERAGE)
        hit = within_BC.gather(1, labels_N1).double().mean().item()
        shifted = None
        if case.rehearsed:  # many images, so that the draw of those held out plays no part
            many = LabelSets.of(case.rehearsed.logits_NC.double().div(t).softmax(-1), case.base.labels_N)
            shifted = 100 * many.of_images(p_BC, kind, COVERAGE).gather(1, labels_N1).double().mean().item()
        yield {
            "kind": kind, "held out": len(case.held.labels_N), "images": len(p_BC), "classes": p_BC.shape[1],
            "accuracy": 100 * right, "coverage": 100 * hit, "size": within_BC.sum(1).double().mean().item(),
            "coverage by the rehearsal": shifted,
        }  # fmt: skip


def rejected(case: Case) -> Iterator[dict[str, Any]]:
    """AUROC, false positives at 95 %, and the shares that are rejected at the default rate."""
    t, classes = case.trust.calibration.temperature, range(case.held.logits_NC.shape[1])
    found = case.trust.rejection

    def texts(said: Said) -> Tensor:
        return text_score((said.logits_NC / t).softmax(-1), case.far, said.v_NE)

    kinds: dict[str, Callable[[Said], Tensor]] = {
        found.first: texts,
        "shots": lambda said: (said.v_NE @ found.means_of(classes, said.v_NE).T).amax(-1),
        "both": lambda said: found.score(texts(said), said.v_NE, classes),
    }
    if case.far:
        kinds["probability"] = lambda said: (said.logits_NC / t).softmax(-1).amax(-1)
    for kind, scores in kinds.items():
        inside_B, threshold = scores(case.base), found.threshold(RATE, alone=kind == found.first)
        for outsiders, said in case.outside.items():
            outside_B = scores(said)
            row = {
                "score": kind, "outsiders": outsiders, "images": len(inside_B), "strangers": len(outside_B),
                "auroc": auroc(inside_B, outside_B),
                "fpr95": (outside_B >= inside_B.quantile(0.05)).double().mean().item(),
                "rejected": 100 * (inside_B < threshold).double().mean().item(),
                "outsiders rejected": 100 * (outside_B < threshold).double().mean().item(),
            }  # fmt: skip
            yield row if kind in ("both", found.first) else row | {"rejected": None, "outsiders rejected": None}


def auroc(inside_B: Tensor, outside_B: Tensor) -> float:
    """How often an image of a class scores higher than an outsider."""
    return (
        (inside_B[:, None] > outside_B).double().mean() + 0.5 * (inside_B[:, None] == outside_B).double().mean()
    ).item()


NUMBERS = ("accuracy", "ece", "ece_equal_mass", "brier", "nll")
TABLES: dict[str, tuple[Callable[[Case], Iterator[dict[str, Any]]], tuple[str, ...], tuple[str, ...]]] = {
    "calibration": (
        calibrated, ("half", "rule"), (*NUMBERS, "temperature")
    ),
    "sets": (covered, ("kind",), ("held out", "accuracy", "coverage", "size", "coverage by the rehearsal")),
    "rejection": (rejected, ("score", "outsiders"), ("auroc", "fpr95", "rejected", "outsiders rejected")),
}  # fmt: skip


def over(rows: list[dict[str, Any]], by: tuple[str, ...], of: tuple[str, ...]) -> list[dict[str, Any]]:
    """Means of rows that are alike in some columns, with the standard deviation of the first and how many there are."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    return [
        dict(zip(by, key, strict=True)) | {"runs": len(some)}
        | {k: some[0][k] if some[0][k] is None else statistics.mean(row[k] for row in some) for k in of}
        | {f"{k} sd": statistics.pstdev(row[k] for row in some) for k in of if k in ("ece", "coverage", "auroc")}
        for key, some in groups.items()
    ]  # fmt: skip


def write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


def cases(folder: Path, split: str, seeds: int, sets: list[str]) -> Iterator[Case]:
    for name in sets:
        if not all((folder / f"{name}-{part}.safetensors").exists() for part in ("train", "test", "texts")):
            print(f"there are no features of {name}")
            continue
        for seed in range(1, seeds + 1):
            yield from frozen_cases(folder, name, split, seed)
        for path in sorted(folder.glob(f"{name}-perl-*.safetensors")):
            yield perl_case(folder, path, split)


def measure(folder: Path, split: str, out: Path | None, seeds: int, sets: list[str]) -> None:
    found = list(cases(folder, split, seeds, sets))
    for table, (rows_of, keys, numbers) in TABLES.items():
        whose = [{"suite": case.suite, "set": case.name, "method": case.method} for case in found]
        rows = [who | row for who, case in zip(whose, found, strict=True) for row in rows_of(case)]
        by_set = over(rows, ("suite", "set", "method", *keys), numbers)
        for row in sorted(over(by_set, ("suite", "method", *keys), numbers), key=str):
            print(table, *(f"{k} {v:.3f}" if isinstance(v, float) else v for k, v in row.items()))
        if out:
            out.mkdir(parents=True, exist_ok=True)
            write(by_set, out / f"{table}.csv")
    if split == "val":
        for penalty in (0.0, 0.02, 0.05, 0.1, 0.2):
            for free in (1, 2, 5):
                conformal.PENALTY, conformal.FREE = penalty, free
                sizes = [row for case in found for row in covered(case) if row["kind"] == "raps"]
                mean = (statistics.mean(row[key] for row in sizes) for key in ("coverage", "size"))
                print(f"raps: penalty {penalty}, free {free}:", *(f"{number:.3f}" for number in mean))
    if out:
        for path, content in draw_reliability(found).files(out).items():
            path.write_bytes(content)


def draw_reliability(found: list[Case]) -> Drawing:
    """Confidence against accuracy of all images of a suite together, before and after."""
    kinds = sorted({(case.suite, case.method) for case in found})

    def paint(figure: Figure) -> None:
        axes = figure.subplots(2, len(kinds), sharex=True, sharey=True, squeeze=False)
        for column, kind in enumerate(kinds):
            some = [case for case in found if (case.suite, case.method) == kind]
            for row, half in enumerate(("base", "novel")):
                axis = axes[row, column]
                axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
                for after, colour in ((False, VERMILION), (True, BLUE)):
                    top, right = zip(*(sureness(case, half, after) for case in some), strict=True)
                    bins = binned(torch.cat(top), torch.cat(right))
                    axis.plot(*zip(*bins, strict=True), color=colour, marker="o", markersize=3.5,
                              label="as answered" if after else "without calibration")  # fmt: skip
                axis.set(title=f"{kind[1]}, {kind[0]}, {half}", xlim=(0, 1), ylim=(0, 1))
        axes[0, 0].legend(loc="upper left")
        for axis in axes[1]:
            axis.set_xlabel("confidence")
        for axis in axes[:, 0]:
            axis.set_ylabel("share that is right")

    return draw("reliability", "Confidence against accuracy.", (2.7 * len(kinds), 5.4), paint)


def sureness(case: Case, half: str, after: bool) -> tuple[Tensor, Tensor]:
    """The best class's probability of each image, and whether it is right."""
    said = getattr(case, half)
    t = case.trust.calibration.of(novel=half == "novel", head=True) if after else 1.0
    top_B, answer_B = (said.logits_NC / t).softmax(-1).max(-1)
    return top_B, (answer_B == said.labels_N).float()


def binned(top_B: Tensor, right_B: Tensor, fewest: int = 10) -> list[tuple[float, float]]:
    """Mean confidence and accuracy of each bin with enough images."""
    bins_B = (top_B * BINS).long().clamp(max=BINS - 1)
    inside = [bins_B == k for k in range(BINS) if int((bins_B == k).sum()) >= fewest]
    return [(top_B[where].mean().item(), right_B[where].mean().item()) for where in inside]


ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "calibrated": {},
    "reject": {"reject": True},
    "coverage": {"coverage": COVERAGE},
    "reject and coverage": {"reject": True, "coverage": COVERAGE},
}


def cost(real: Path | None, rounds: int) -> None:
    """CPU time of whole predictions of PERL, from file to answer: each kind in turn, so that noise falls on all."""
    if real:
        backbone, data = perlclip.load_backbone(str(real / "clip"), device="cpu"), photographs(real, "eurosat")
    else:
        backbone, data = perlclip.load_backbone("tiny", device="cpu"), load_toybox("noisy_shapes")
    method = perlclip.create_method("perl", backbone)
    shots = data.train.few_shot(4, random.Random(1)).base()
    classifier = perlclip.Classifier(method, shots.class_names, shots.template)
    classifier.calibrate(shots, progress=False)  # what is known does not matter here, only that it is
    untouched = perlclip.Classifier(method, shots.class_names, shots.template)
    images = 4 if real else 32
    some = list(data.test.images[:images])
    times: dict[str, list[float]] = {name: [] for name in ASKED}
    for turn in range(rounds + 1):
        for name, options in ASKED.items():
            began = time.process_time()
            (untouched if name == "plain" else classifier).predict(some, **options)
            if turn:  # the first one makes what is made once
                times[name].append(1000 * (time.process_time() - began) / images)
    for name, each in times.items():
        ratio = statistics.median(mine / plain for mine, plain in zip(each, times["plain"], strict=True))
        least = min(each) / min(times["plain"])
        print(f"{name}: {statistics.median(each):.2f} ms per image, x{ratio:.4f} (of the least, x{least:.4f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("perl", "measure", "new", "cost"))
    parser.add_argument("features", type=Path, nargs="?", help="or of `new` a store")
    parser.add_argument("--sets", nargs="*", default=[*TOYS, *PHOTOGRAPHS])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3], help="of `perl`; `measure` takes how many")
    parser.add_argument("--split", choices=("val", "test"), default="test")
    parser.add_argument("--real", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "cost":
        cost(options.real, options.rounds)
    elif options.what == "perl":
        for number in options.seeds:
            for each in options.sets:
                train_perl(options.features, each, number, options.real)
    elif options.what == "new":
        if not (options.features and options.out):
            parser.error("`new` needs a store and --out FILE")
        ask_new(options.features, options.real, options.out)
    else:
        measure(options.features, options.split, options.out, max(options.seeds), options.sets)
