"""Are probabilities right, outsiders noticed, sets as good as they say? Zero-shot CLIP, ridge regression, PERL.

    python -m benchmarks.trust_features FEATURES [--real FOLDER]     frozen embeddings, once
    python -m benchmarks.trust perl FEATURES --sets noisy_shapes     trains PERL on a toybox set, some minutes each
    python -m benchmarks.trust measure FEATURES --split val          to choose by
    python -m benchmarks.trust measure FEATURES --out docs/results/trust     the test images: tables and a figure
    python -m benchmarks.trust cost                                  what it adds to a prediction

All of it is made of what `fit` sees: 16 shots (Tiny ImageNet 8) of the base classes, each left out in turn, or held out
of PERL's rehearsal. Far outsiders are the images of the suite's other sets, near ones those of the set's novel classes.
"""

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import perlclip
from benchmarks.trust_features import SIZES, TOYS
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.heads.regression import Ridge
from perlclip.training import choose_head
from perlclip.training.shots import look_at
from perlclip.trust import conformal
from perlclip.trust.calibration import carried_temperature, fit_temperature
from perlclip.trust.conformal import KINDS, LabelSets
from perlclip.trust.rejection import NEAR, FarWords, Rejection, class_means, known_words, text_score
from perlclip.trust.reliability import BINS, reliability
from perlclip.viz.drawing import Drawing, draw
from perlclip.viz.style import BLUE, GREY, VERMILION

COVERAGE, RATE = 0.9, 0.05


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
    """A method on a set: answers to shots held out, and to fresh images of both halves."""

    suite: str
    name: str
    method: str
    held: Said
    base: Said
    novel: Said
    t_CE: Tensor  # frozen texts of all classes
    head: Answer = as_zero_shot  # the answer among base classes to any embedding


def frozen_cases(folder: Path, name: str, split: str) -> Iterator[Case]:
    """Zero-shot CLIP and ridge regression, from embeddings."""
    shots, fresh, texts = (load_file(folder / f"{name}-{part}.safetensors") for part in ("train", split, "texts"))
    t_CE, scale = texts["t_CE"], texts["scale"].item()
    half, labels_N = -(-len(t_CE) // 2), fresh["labels_N"]
    suite = "photographs" if name in SIZES else "toybox"

    def said(v_NE: Tensor, labels_N: Tensor, t_CE: Tensor, head: Answer = as_zero_shot) -> Said:
        zero_NC = scale * v_NE @ t_CE.T
        logits_NC = head(v_NE, zero_NC)
        return Said(labels_N=labels_N, logits_NC=logits_NC, texts_NC=zero_NC, zero_NC=zero_NC, v_NE=v_NE)

    def case(method: str, held: Said, head: Answer = as_zero_shot) -> Case:
        base, novel = (fresh["v_NE"][where] for where in (labels_N < half, labels_N >= half))
        return Case(
            suite=suite, name=name, method=method, held=held, t_CE=t_CE, head=head,
            base=said(base, labels_N[labels_N < half], t_CE[:half], head),
            novel=said(novel, labels_N[labels_N >= half] - half, t_CE[half:]),
        )  # fmt: skip

    zero = said(shots["v_NE"], shots["labels_N"], t_CE[:half])
    yield case("zero-shot", zero)
    ridge = Ridge.of(zero.v_NE, zero.labels_N, half)
    means_CE, near_N = class_means(zero.v_NE, zero.labels_N, half)
    held = choose_head.HeldOut(
        labels_N=zero.labels_N, zero_NC=zero.zero_NC, adapted_NC=zero.zero_NC, v0_NE=zero.v_NE,
        near_N=near_N, means_CE=means_CE,
        scores_LNC=ridge.left_out(choose_head.STRENGTHS, torch.arange(len(zero.labels_N))),
    )  # fmt: skip
    choice = choose_head.choose(held, (1.0,), "each left out")
    weight_CE, bias_C = (each.float() for each in ridge.solution(choice.strength))
    logits_NC, _ = held.answers(choice)
    left_out = Said(**vars(zero) | {"logits_NC": logits_NC.float()})
    yield case("ridge", left_out, lambda v, zero: choice.text * zero + choice.scale * (v @ weight_CE.T + bias_C))


def perl_case(folder: Path, name: str, split: str) -> Case:
    """From what `perl` has saved."""
    found, t_CE = (
        load_file(folder / f"{name}-perl.safetensors"),
        load_file(folder / f"{name}-texts.safetensors")["t_CE"],
    )
    parts = {
        part: Said(**{key: found[f"{part}.{key}"] for key in Said.__dataclass_fields__})
        for part in ("held", f"base-{split}", f"novel-{split}")
    }
    held, base, novel = parts.values()
    return Case(suite="toybox", name=name, method="perl", held=held, base=base, novel=novel, t_CE=t_CE)


def train_perl(folder: Path, name: str, seed: int = 1) -> None:
    """PERL as `fit` makes it; what it says about held-out shots is caught on the way."""
    backbone, data = perlclip.load_backbone("tiny", device="cpu"), load_toybox(name)
    method = perlclip.create_method("perl", backbone, seed=seed)
    train = data.train.few_shot(16, random.Random(seed)).base()
    kept: dict[str, Any] = {}
    chosen = choose_head.choose

    def choose(held: choose_head.HeldOut, *rest: Any) -> choose_head.Choice:
        kept["held"], kept["choice"] = held, chosen(held, *rest)
        return kept["choice"]

    choose_head.choose = choose
    fitted = perlclip.fit(method, train, seed=seed, thresholds=False)
    choose_head.choose = chosen
    held, choice = kept["held"], kept["choice"]
    logits_NC, texts_NC = held.answers(choice)
    save = {"labels_N": held.labels_N, "logits_NC": logits_NC, "texts_NC": texts_NC, "zero_NC": held.zero_NC}
    out = {f"held.{key}": value for key, value in {**save, "v_NE": held.v0_NE}.items()}
    for part, images in (("val", data.val), ("test", data.test.select(range(0, len(data.test), 2)))):
        for half, some in (("base", images.base()), ("novel", images.novel())):
            state = method.class_state(some.classes, novel=half == "novel")
            seen = look_at(method, some, state)
            with torch.no_grad():
                logits_NC = Answering(method, state, fitted.head).finish(seen.adapted_NC[None], seen.v_KNE)[-1]
            texts_NC = choice.share * seen.adapted_NC + (1 - choice.share) * seen.zero_NC
            save = {"labels_N": seen.labels_N, "logits_NC": logits_NC, "texts_NC": texts_NC, "zero_NC": seen.zero_NC}
            out |= {f"{half}-{part}.{key}": value for key, value in {**save, "v_NE": seen.v0_NE}.items()}
    save_file({key: value.float().contiguous() if value.is_floating_point() else value for key, value in out.items()},
              folder / f"{name}-perl.safetensors")  # fmt: skip
    print(name, fitted.choice and fitted.choice.sentence)


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
    for part, said in (("base", case.base), ("novel", case.novel)):
        rows = {"zero-shot CLIP": (said.zero_NC, 1.0)}
        rows |= {rule: (said.logits_NC, t) for rule, t in temperatures[part].items()}
        for rule, (logits_NC, t) in rows.items():
            measured = reliability((logits_NC / t).softmax(-1), said.labels_N)
            right = (logits_NC.argmax(-1) == said.labels_N).double().mean().item()
            yield {"half": part, "rule": rule, "temperature": t, "accuracy": 100 * right, **measured.numbers()}


def covered(case: Case) -> Iterator[dict[str, Any]]:
    """Coverage and size of sets of labels among the base classes."""
    t = fit_temperature(case.held.logits_NC, case.held.labels_N)
    held_NC, p_BC = (said.logits_NC.double().div(t).softmax(-1) for said in (case.held, case.base))
    sets = LabelSets.of(held_NC, case.held.labels_N)
    right = (p_BC.argmax(-1) == case.base.labels_N).double().mean().item()
    for kind in KINDS:
        within_BC = sets.of_images(p_BC, kind, COVERAGE)
        hit = within_BC.gather(1, case.base.labels_N[:, None]).double().mean().item()
        yield {
            "kind": kind, "held out": len(case.held.labels_N), "images": len(p_BC), "accuracy": 100 * right,
            "coverage": 100 * hit, "size": within_BC.sum(1).double().mean().item(), "classes": p_BC.shape[1],
        }  # fmt: skip


def far_words(folder: Path, case: Case, words: list[str], near: float = NEAR) -> FarWords | None:
    """As `FarWords.of`, from embeddings."""
    if case.suite == "toybox":
        return None
    texts, half = load_file(folder / f"{case.name}-texts.safetensors"), case.held.logits_NC.shape[1]
    return FarWords.chosen(words, texts["t_WE"], texts["t_CE"][:half], texts["scale"].item(), near)


def rejected(folder: Path, case: Case, others: dict[str, Said], words: list[str]) -> Iterator[dict[str, Any]]:
    """AUROC, false positives at 95 %, and the shares that are rejected at the default rate."""
    t, classes = fit_temperature(case.held.logits_NC, case.held.labels_N), range(case.held.logits_NC.shape[1])
    far = far_words(folder, case, words)

    def texts(said: Said) -> Tensor:
        return text_score((said.logits_NC / t).softmax(-1), far, said.v_NE)

    means_CE, near_N = class_means(case.held.v_NE, case.held.labels_N, len(classes))
    found = Rejection.of("words" if far else "probability", texts(case.held), near_N, means_CE)
    kinds: dict[str, Callable[[Said], Tensor]] = {
        found.first: texts,
        "shots": lambda said: (said.v_NE @ means_CE.T).amax(-1),
        "both": lambda said: found.score(texts(said), said.v_NE, classes),
    }
    if far:
        kinds["probability"] = lambda said: (said.logits_NC / t).softmax(-1).amax(-1)
    for kind, scores in kinds.items():
        inside_B, threshold = scores(case.base), found.threshold(RATE, alone=kind == found.first)
        for outsiders, said in others.items():
            outside_B = scores(said)
            row = {
                "score": kind, "outsiders": outsiders, "auroc": auroc(inside_B, outside_B),
                "fpr95": (outside_B >= inside_B.quantile(0.05)).double().mean().item(),
                "rejected": 100 * (inside_B < threshold).double().mean().item(),
                "outsiders rejected": 100 * (outside_B < threshold).double().mean().item(),
            }  # fmt: skip
            yield row if kind in ("both", found.first) else row | {"rejected": 0.0, "outsiders rejected": 0.0}


def auroc(inside_B: Tensor, outside_B: Tensor) -> float:
    """How often an image of a class scores higher than an outsider."""
    return (
        (inside_B[:, None] > outside_B).double().mean() + 0.5 * (inside_B[:, None] == outside_B).double().mean()
    ).item()


def outsiders(folder: Path, case: Case, split: str) -> dict[str, Said]:
    """Images of the other sets, and of the novel classes, answered among the base classes as if they were of one."""
    t_CE = case.t_CE[: case.held.logits_NC.shape[1]]
    found = {"near": case.novel.v_NE}
    for name in SIZES if case.suite == "photographs" else TOYS:
        path = folder / f"{name}-{split}.safetensors"
        if name != case.name and path.exists():
            found[name] = load_file(path)["v_NE"]
    scale = load_file(folder / f"{case.name}-texts.safetensors")["scale"].item()
    said = {}
    for name, v_NE in found.items():
        zero_NC = scale * v_NE @ t_CE.T
        said[name] = Said(
            labels_N=torch.zeros(len(v_NE), dtype=torch.long), logits_NC=case.head(v_NE, zero_NC),
            texts_NC=zero_NC, zero_NC=zero_NC, v_NE=v_NE,
        )  # fmt: skip
    return said


def write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})


def means(rows: list[dict[str, Any]], by: tuple[str, ...], of: tuple[str, ...]) -> None:
    """On the screen: averages over the sets."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in by), []).append(row)
    for key, some in sorted(groups.items()):
        print(*key, *(f"{name} {statistics.mean(row[name] for row in some):.3f}" for name in of), f"({len(some)})")


def cases(folder: Path, split: str) -> Iterator[Case]:
    for name in (*TOYS, *SIZES):
        if all((folder / f"{name}-{part}.safetensors").exists() for part in ("train", split, "texts")):
            yield from frozen_cases(folder, name, split)
        if (folder / f"{name}-perl.safetensors").exists():
            yield perl_case(folder, name, split)


def measure(folder: Path, split: str, out: Path | None, clip: str) -> None:
    found = list(cases(folder, split))
    words = known_words(perlclip.load_backbone(clip, device="cpu")) if clip else []
    tables: dict[str, list[dict[str, Any]]] = {"calibration": [], "sets": [], "rejection": []}
    for case in found:
        whose = {"suite": case.suite, "set": case.name, "method": case.method}
        tables["calibration"] += [whose | row for row in calibrated(case)]
        tables["sets"] += [whose | row for row in covered(case)]
        if case.method != "perl" and (case.suite == "toybox" or words):
            others = outsiders(folder, case, split)
            tables["rejection"] += [whose | row for row in rejected(folder, case, others, words)]
    for row in tables["rejection"]:
        row["distance"] = "near" if row["outsiders"] == "near" else "far"
    means(
        tables["calibration"],
        ("suite", "method", "half", "rule"),
        ("accuracy", "ece", "ece_equal_mass", "brier", "nll"),
    )
    means(tables["sets"], ("suite", "method", "kind"), ("held out", "accuracy", "coverage", "size"))
    means(
        tables["rejection"],
        ("suite", "method", "score", "distance"),
        ("auroc", "fpr95", "rejected", "outsiders rejected"),
    )
    if split == "val":
        for penalty in (0.0, 0.02, 0.05, 0.1, 0.2):
            for free in (1, 2, 5):
                conformal.PENALTY, conformal.FREE = penalty, free
                sizes = [row for case in found for row in covered(case) if row["kind"] == "raps"]
                numbers = (statistics.mean(row[key] for row in sizes) for key in ("coverage", "size"))
                print(f"raps: penalty {penalty}, free {free}:", *(f"{number:.3f}" for number in numbers))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for name, rows in tables.items():
            write(rows, out / f"{name}.csv")
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
    said, held = getattr(case, half), case.held
    t = 1.0
    if after:
        t = fit_temperature(held.logits_NC, held.labels_N)
        t = carried_temperature(held.texts_NC, held.labels_N) if half == "novel" else t
    top_B, answer_B = (said.logits_NC / t).softmax(-1).max(-1)
    return top_B, (answer_B == said.labels_N).float()


def binned(top_B: Tensor, right_B: Tensor, fewest: int = 10) -> list[tuple[float, float]]:
    """Mean confidence and accuracy of each bin with enough images."""
    bins_B = (top_B * BINS).long().clamp(max=BINS - 1)
    inside = [bins_B == k for k in range(BINS) if int((bins_B == k).sum()) >= fewest]
    return [(top_B[where].mean().item(), right_B[where].mean().item()) for where in inside]


def cost(images: int = 32) -> None:
    """CPU milliseconds per image of all that is added to a prediction, and of one on the embedded backbone."""
    print(f"added, tiny, 24 classes: {added(images, 24, 128, 0):.3f} ms per image")
    print(f"added, ViT-B/16's width, 100 classes, 1600 words: {added(images, 100, 512, 1600):.3f} ms per image")
    data, method = load_toybox("noisy_shapes"), perlclip.create_method("perl", perlclip.load_backbone("tiny"))
    classifier, some = perlclip.Classifier(method, data.test.class_names), list(data.test.images[:images])
    whole = milliseconds(lambda: classifier.predict(some), 5) / images
    print(f"a prediction of PERL on tiny: {whole:.1f} ms per image")


def added(images: int, classes: int, width: int, words: int) -> float:
    """Temperature, scores and sets of random answers."""
    v_BE, p_BC = F.normalize(torch.randn(images, width), dim=-1), torch.randn(images, classes).softmax(-1)
    t_WE, t_CE = (F.normalize(torch.randn(count, width), dim=-1) for count in (words, classes))
    far, labels_B = FarWords(("",) * words, t_WE, t_CE, 100.0) if words else None, torch.arange(images) % classes
    means_CE, near_B = class_means(v_BE, labels_B, classes)
    rejection = Rejection.of("words", text_score(p_BC, far, v_BE), near_B, means_CE)
    sets = LabelSets.of(p_BC, labels_B)

    def work() -> None:
        q_BC = (p_BC / 1.3).softmax(-1)
        (rejection.score(text_score(q_BC, far, v_BE), v_BE, range(classes)) < 0).tolist()
        sets.of_images(q_BC, "lac", COVERAGE).tolist()
        q_BC.argsort(dim=-1, descending=True, stable=True).tolist()

    return milliseconds(work, 30) / images


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median CPU time."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(1000 * (time.process_time() - began))
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("perl", "measure", "cost"))
    parser.add_argument("features", type=Path, nargs="?")
    parser.add_argument("--sets", nargs="*", default=["noisy_shapes"])
    parser.add_argument("--split", default="test")
    parser.add_argument("--clip", default="", help="folder of the photographs' CLIP, for its tokenizer")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "cost":
        cost()
    elif options.what == "perl":
        for each in options.sets:
            train_perl(options.features, each)
    else:
        measure(options.features, options.split, options.out, options.clip)
