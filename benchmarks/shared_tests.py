"""What the runs of one process save by sharing what their tests have in common (`perlclip.inference.cache`).

    python -m benchmarks.shared_tests [METHOD …] [--task faint_toys] [--device cpu]

Three seeds of each method are tested on base and novel classes of a toybox set with the embedded backbone, untrained
(the time does not depend on the weights): each once alone and once with the cache of those before it, in turn. The
answers are compared to the bit. The result is written to benchmarks/results/, its name states the conditions.
"""

import argparse
import time

import torch

import perlclip
from benchmarks.common import RESULTS, file_name, machine, write_csv
from perlclip.data.toybox import load_toybox
from perlclip.inference.cache import EvalCache


def measure(methods: list[str], task: str, device: str) -> list[dict]:
    backbone, test = perlclip.load_backbone("tiny", device=device), load_toybox(task).test
    halves = {"base": test.base(), "novel": test.novel()}
    cache, rows = EvalCache(), []

    def seconds(method: perlclip.methods.Method, shared: bool) -> tuple[float, list[torch.Tensor]]:
        started = time.perf_counter()
        results = [
            perlclip.evaluate(
                method, images, novel=half == "novel", progress=False, cache=cache.of(half) if shared else None
            )
            for half, images in halves.items()
        ]
        return time.perf_counter() - started, [result.probabilities_BC for result in results]

    for name in methods:
        for seed in (1, 2, 3):
            method = perlclip.create_method(name, backbone, seed=seed)
            (alone, one), (shared, other) = seconds(method, False), seconds(method, True)
            assert all(map(torch.equal, one, other)), f"{name} does not answer the same"
            rows.append({"method": name, "seed": seed, "alone_s": alone, "shared_s": shared})
    total = {key: sum(row[key] for row in rows) for key in ("alone_s", "shared_s")}
    return [*rows, {"method": "all", "seed": "", **total, "kept_MiB": cache.used / 2**20}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=["zero-shot", "coop", "perl", "mmrl"])
    parser.add_argument("--task", default="faint_toys")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rows = measure(options.methods, options.task, options.device)
    path = RESULTS / file_name("shared-tests", machine(options.device))
    write_csv(path, rows)
    print(path.read_text())


if __name__ == "__main__":
    main()
