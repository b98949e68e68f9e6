"""What it is worth that zero-shot's part of an adapter's answer is centered, on validation images of drawn sets.

    perlclip bench few-shot --suite toybox --methods perl --recipe strong --lens --head --out DIR
    python -m benchmarks.mixtures DIR/runs

Of the adapters for which `fit` chose it: accuracy with zero-shot's part as the frozen CLIP has it, and as chosen. Their
other numbers were chosen with it.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import perlclip
from perlclip.bench.store import Store
from perlclip.data.toybox import load_toybox


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="+")
    found = []
    for records in (Store(path).records() for path in parser.parse_args().stores):
        for home, record in zip(records.homes, records.complete, strict=True):
            adapter = None if record.get("adapter_of") else perlclip.load_adapter(home)
            if adapter is None or adapter.head is None or not adapter.head.centered:
                continue
            run, heads = record["run"], (replace(adapter.head, centered=False), adapter.head)
            images = load_toybox(run["dataset"]).val
            tested = [perlclip.evaluate(replace(adapter, head=head), images, progress=False) for head in heads]
            found.append([each.accuracy for each in tested])
            print(
                f"{run['dataset']:18}{run['shots']:3} shots, seed {run['seed']}:"
                + "{:6.1f} ->{:6.1f}".format(*found[-1])
            )
    if not found:
        raise SystemExit("no adapter here has a head with a centered part of zero-shot's answer")
    before, after = map(fmean, zip(*found, strict=True))
    print(f"{len(found)} adapters: {before:.1f} -> {after:.1f}")


if __name__ == "__main__":
    main()
