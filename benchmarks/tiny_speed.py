"""Images per second of the embedded backbone, from drawn picture to label: zero-shot CLIP and PERL, K = 4.

    python -m benchmarks.tiny_speed        # on all cores; writes benchmarks/results/tiny-speed-….csv

Medians of five runs over 512 test images of one toybox set, preprocessing included, in turn.
"""

import csv
import statistics
import time

import torch

import perlclip
from benchmarks.common import RESULTS, file_name
from perlclip.data.toybox import load_toybox

IMAGES, RUNS = 512, 5


def main() -> None:
    """Measure and write the table."""
    backbone = perlclip.load_backbone("tiny", device="auto")
    test = load_toybox("negative_toys").test.select(range(IMAGES))
    variants = {name: perlclip.create_method(name, backbone) for name in ("zero-shot", "perl")}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(RUNS + 1):
        for name, method in variants.items():
            start = time.perf_counter()
            perlclip.evaluate(method, test, progress=False)
            speeds[name].append(IMAGES / (time.perf_counter() - start))
    rows = [
        [name, f"{statistics.median(s[1:]):.1f}", f"{min(s[1:]):.1f}", f"{max(s[1:]):.1f}"]
        for name, s in speeds.items()
    ]
    where = "cuda" if backbone.device.type == "cuda" else f"cpu{torch.get_num_threads()}"
    path = RESULTS / file_name("tiny-speed", where)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["method", "images_per_s", "slowest", "fastest"], *rows])
    print(path, *rows, sep="\n")


if __name__ == "__main__":
    main()
