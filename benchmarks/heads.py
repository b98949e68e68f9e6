"""Zero-shot, ridge, and PERL without and with its head, from one `fit` each, on test images (docs/strong.md).

    python -m benchmarks.heads --out FILE --jobs 2                     the ten targets of the toybox, 16 shots, 3 seeds
    python -m benchmarks.heads --out FILE --shots 1 2 4 8 16 --all     all classes trained on: accuracy by shots
    python -m benchmarks.heads --out FILE --real FOLDER                photographs, as in benchmarks/strong.py
    python -m benchmarks.heads --show FILE …                           means over sets and seeds

Base classes are trained on, unless `--all`. `base` and `novel` are tested among their own classes, `all base` and `all
novel` among all of them: the generalised setting. What is done already is not done again.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import perlclip
from benchmarks.strong import harmonic, photographs
from perlclip.adapters.folder import Adapter
from perlclip.data.loading import fixed_views
from perlclip.data.sets import DataSet, ImageSet, few_shot_split
from perlclip.data.suites import SUITES
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.methods.perl import Perl

COLUMNS = ("set", "shots", "trained", "seed", "row", "part", "accuracy", "numbers", "seconds", "answer")
Job = tuple[str, int, int, bool, Path | None, str]


@torch.inference_mode()
def right(adapter: Adapter, v_KNE: Tensor, images: ImageSet, *, head: bool) -> Tensor:
    """Which images a PERL or zero-shot adapter answers rightly, from their embeddings of every step: (N,)."""
    method, state = adapter.method, adapter.method.class_state(images.classes)
    t_KCE = method.class_embedding_steps(state)
    logits_KNC = (
        method.read_out(v_KNE, t_KCE) if isinstance(method, Perl) else method.similarity(v_KNE[0], t_KCE[0])[None]
    )
    answers_N = Answering(method, state, adapter.head if head else None).finish(logits_KNC, v_KNE)[-1].argmax(-1).cpu()
    return answers_N == torch.as_tensor([int(label) for label in images.labels])


def parts(data: DataSet, whole: bool) -> Iterator[tuple[str, list[int], ImageSet]]:
    """What is tested: positions in the test set, and the same images with the classes to choose from."""
    test, half = data.test, (len(data.class_names) + 1) // 2
    sides = {"base": [i for i, y in enumerate(test.labels) if y < half]}
    sides["novel"] = [i for i, y in enumerate(test.labels) if y >= half]
    if whole:
        yield "all", list(range(len(test))), test
        return
    yield "base", sides["base"], test.base()
    yield "novel", sides["novel"], test.novel()
    for side, places in sides.items():
        yield f"all {side}", places, test.select(places)


def measure(job: Job) -> list[list[object]]:
    """One set, one seed: a row for each way and part."""
    name, shots, seed, whole, real, dtype = job
    backbone = perlclip.load_backbone(str(real / "clip") if real else "tiny", dtype=dtype)
    if backbone.device.type == "cpu":
        torch.set_num_threads(1)
    data = photographs(real, name) if real else load_toybox(name)
    train = few_shot_split(data, shots, seed)[0]
    train = train if whole else train.base()
    rows: list[list[object]] = []
    for method_name, without, with_head in (("ridge", "zero-shot", "ridge"), ("perl", "perl", "perl + head")):
        method = perlclip.create_method(method_name, backbone, seed=seed)
        fitted = perlclip.fit(method, train, seed=seed, thresholds=False, progress=False)
        views = fixed_views(data.test, backbone.preprocess, 64, backbone.device)
        with torch.inference_mode():
            v_KNE = torch.cat([method.encode_image_steps(pixels) for pixels, _ in views], 1)
        learned = fitted.head.numbers if fitted.head else 0
        trained_in, all_in = fitted.seconds, fitted.seconds + fitted.head_seconds
        for row, head in ((without, False), (with_head, True)):
            numbers = method.num_trainable + (learned if head else 0)
            seconds = all_in if head else trained_in if method.num_trainable else 0.0
            said = fitted.choice.answer if head and fitted.choice else ""
            for part, places, images in parts(data, whole):
                accuracy = 100 * right(fitted, v_KNE[:, places], images, head=head).double().mean().item()
                where = "all" if whole else "base"
                rows.append([name, shots, where, seed, row, part, f"{accuracy:.3f}", numbers, f"{seconds:.1f}", said])
    return rows


def show(paths: list[Path]) -> None:
    """Means over sets and seeds, and where a row with a head is below zero-shot on what it was trained on."""
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    each: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        with path.open() as file:
            for row in csv.DictReader(file):
                found[row["shots"], row["row"]][row["part"]].append(float(row["accuracy"]))
                found[row["shots"], row["row"]]["seconds"].append(float(row["seconds"]))
                if row["part"] in ("base", "all"):
                    each[row["shots"], row["set"]][row["row"]].append(float(row["accuracy"]))
    for (shots, row), columns in found.items():
        mean = {part: fmean(values) for part, values in columns.items()}
        if "base" in mean:
            pairs = ((mean["base"], mean["novel"]), (mean["all base"], mean["all novel"]))
            numbers = [n for pair in pairs for n in (*pair, harmonic(*pair))]
        else:
            numbers = [mean["all"]]
        print(f"{shots:>3} {row:14}" + "".join(f"{n:7.2f}" for n in numbers) + f"   {mean['seconds']:6.1f} s")
    losses = {key: fmean(rows["perl + head"]) - fmean(rows["zero-shot"]) for key, rows in each.items()}
    for (shots, name), gain in sorted(losses.items(), key=lambda item: item[1])[:5]:
        print(f"{shots:>3} {name:18} perl + head against zero-shot on the classes trained on: {gain:+.2f}")


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", type=Path, nargs="+")
    parser.add_argument("--real", type=Path)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--shots", type=int, nargs="+", default=[16])
    parser.add_argument("--all", action="store_true", help="train on all classes")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.show:
        return show(options.show)
    names = options.sets or (["eurosat", "dtd", "tinyimagenet"] if options.real else SUITES["toybox"].targets)
    where = "all" if options.all else "base"
    done = set()
    if options.out.exists():
        with options.out.open() as file:
            done = {(row["set"], int(row["shots"]), int(row["seed"]), row["trained"]) for row in csv.DictReader(file)}
    jobs: list[Job] = [
        (name, shots, seed, options.all, options.real, options.dtype)
        for seed in options.seeds
        for shots in options.shots
        for name in names
        if (name, shots, seed, where) not in done
    ]
    with options.out.open("a", newline="") as file, get_context("spawn").Pool(options.jobs) as pool:
        writer = csv.writer(file)
        if not done:
            writer.writerow(COLUMNS)
        for rows in pool.imap_unordered(measure, jobs):
            writer.writerows(rows)
            file.flush()
            print(*rows[-1][:5], flush=True)


if __name__ == "__main__":
    main()
