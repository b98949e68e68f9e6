"""How PERL's recipes for the embedded backbone were chosen: eight settings on training and validation shots alone.

    python scripts/choose_tiny_recipe.py --out docs/results/tiny/recipe-search.csv --processes 16

Every setting trains on 16 shots of the base classes of the eleven toybox sets, seed 1, and is measured on their
validation images (8 a class), base and novel halves. No test image is drawn. About six minutes on 16 cores.
"""

import argparse
import csv
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch

import perlclip
from perlclip.data.suites import SUITES
from perlclip.data.toybox import load_toybox

HALF, MOST = (0.5, 1.0), (0.8, 1.0)
CANDIDATES = {
    "lr 1e-4, 1 epoch": {"lr": 1e-4, "epochs": 1},
    "lr 1e-4, 1 epoch, crop 0.5": {"lr": 1e-4, "epochs": 1, "crop_scale": HALF},
    "lr 1e-3, 1 epoch, crop 0.5": {"lr": 1e-3, "epochs": 1, "crop_scale": HALF},
    "lr 1e-3, 5 epochs": {"lr": 1e-3, "epochs": 5},
    "lr 3e-4, 5 epochs, crop 0.5": {"lr": 3e-4, "epochs": 5, "crop_scale": HALF},
    "lr 1e-3, 5 epochs, crop 0.5": {"lr": 1e-3, "epochs": 5, "crop_scale": HALF},
    "lr 3e-3, 5 epochs, crop 0.5": {"lr": 3e-3, "epochs": 5, "crop_scale": HALF},
    "lr 1e-3, 5 epochs, crop 0.8": {"lr": 1e-3, "epochs": 5, "crop_scale": MOST},
}
HEADER = ["candidate", "set", *(f"{half}_k{k}" for half in ("base", "novel") for k in range(5)), "seconds"]


def measure(job: tuple[str, str]) -> list[str]:
    """One candidate on one set: validation accuracy of every step, base then novel."""
    torch.set_num_threads(1)
    candidate, name = job
    began, data = time.monotonic(), load_toybox(name)
    shots = data.train.few_shot(16, Random(1)).base()
    method = perlclip.create_method("perl", perlclip.load_backbone("tiny"), seed=1)
    perlclip.fit(
        method,
        shots,
        recipe=replace(perlclip.Recipe(), **CANDIDATES[candidate]),
        seed=1,
        thresholds=False,
        lens="plain",
        head=False,
        progress=False,
    )
    halves = [perlclip.evaluate(method, half, progress=False) for half in (data.val.base(), data.val.novel())]
    accuracies = [f"{value:.4f}" for result in halves for value in result.step_accuracy]
    return [candidate, name, *accuracies, f"{time.monotonic() - began:.1f}"]


def main() -> None:
    """Measure everything, the longest first, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    slowest_first = sorted(CANDIDATES, key=lambda name: -CANDIDATES[name]["epochs"])
    suite = SUITES["toybox"]
    jobs = [(candidate, name) for candidate in slowest_first for name in (suite.source, *suite.targets)]
    with options.out.open("w", newline="") as file, get_context("spawn").Pool(options.processes) as pool:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        for row in pool.imap(measure, jobs):
            writer.writerow(row)
            file.flush()
            print(*row, flush=True)


if __name__ == "__main__":
    main()
