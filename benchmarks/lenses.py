"""Which lens the shots choose, and what it does to classes that they are of and to new ones.

    python -m benchmarks.features F --lenses --sets NAME …          embeddings of drawn sets through every lens, once
    python -m benchmarks.features F --lenses --real FOLDER          and of photographs
    python -m benchmarks.lenses F --out FILE [--shots 1 4 16] [--sets NAME …]

The head of `gaussian` on the frozen CLIP, not yet centered, shots of the base classes, seeds 1 to 3; accuracy on images
of the training and validation splits that were not drawn, as in `benchmarks.heads`. No test image is looked at. A line
is a set, a number of shots, a seed and a lens, and whether `choose_lens` takes it.
"""

import argparse
import csv
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.heads import SEEDS, Case
from benchmarks.strong import harmonic
from perlclip.backbone import LENSES, PLAIN
from perlclip.training.choose_lens import IMAGES, SHOTS, Through, best_lens

COLUMNS = ("set", "shots", "seed", "lens", "chosen", "base", "novel", "all base", "all novel")


def lines(folder: Path, name: str, shots: int, seed: int, depth: int) -> Iterator[list[object]]:
    """Of every lens."""
    cases = {lens: Case(folder / lens, name, shots, seed, depth) for lens in (PLAIN, *LENSES)}
    plain, rng = cases[PLAIN], random.Random(f"lens {seed}")
    # As many as `choose_lens` looks at.
    classes = rng.sample(range(plain.base), min(plain.base, max(2, IMAGES // min(shots, SHOTS))))
    asked_N = torch.isin(plain.y_N, torch.tensor(classes))
    seen = {lens: Through(case.x_NE[asked_N], case.m_NF[asked_N].float()) for lens, case in cases.items()}
    there_C, labels_N = torch.unique(plain.y_N[asked_N], return_inverse=True)
    choice = best_lens(seen, labels_N, plain.t_CE[there_C].float(), plain.scale)
    for lens, case in cases.items():
        found = dict(case.rows(seed))["uncentered"]
        yield [name, shots, seed, lens, int(lens == choice.name), *(f"{value:.2f}" for value in found)]


def show(found: list[list[object]]) -> None:
    """Means over sets and seeds without a lens and with the one chosen, and what was chosen."""
    for shots in sorted({int(str(line[1])) for line in found}):
        mine = [line for line in found if line[1] == shots]
        for title, some in (
            (PLAIN, [line for line in mine if line[3] == PLAIN]), ("chosen", [line for line in mine if line[4]]),
        ):  # fmt: skip
            base, novel, *among = (fmean(float(str(line[k])) for line in some) for k in range(5, 9))
            told = f"{base:.1f} / {novel:.1f} / {harmonic(base, novel):.1f}   among all {harmonic(*among):.1f}"
            print(f"{shots:3} shots  {title:8} {told}   ({len(some)} runs)")
        chosen: dict[str, Counter[str]] = defaultdict(Counter)
        for line in mine:
            if line[4] and line[3] != PLAIN:
                chosen[str(line[0])][str(line[3])] += 1
        print("           ", "; ".join(f"{name}: {dict(count)}" for name, count in chosen.items()) or "no lens")


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shots", type=int, nargs="*", default=[16])
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--depth", type=int, default=7)
    options = parser.parse_args()
    names = options.sets or sorted(
        path.name.removesuffix("-texts.safetensors") for path in (options.folder / PLAIN).glob("*-texts.*")
    )
    found = [
        line for name in names for shots in options.shots for seed in SEEDS
        for line in lines(options.folder, name, shots, seed, options.depth)
    ]  # fmt: skip
    show(found)
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *found])


if __name__ == "__main__":
    main()
