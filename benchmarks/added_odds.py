"""What trained texts bring to lists with trained and new classes, and what is taken off for it, on validation images.

    perlclip bench base-to-novel --suite SUITE --methods perl --recipe strong --head --out DIR
    python -m benchmarks.added_odds DIR/runs [--real FOLDER] [--seeds 1] [--sets NAME …]      FOLDER as for photographs

Of adapters that ask trained texts whether an image is of a new class: base and novel accuracy with all classes to
choose from, by frozen texts, by trained ones with nothing taken off, and as `fit` has made it. Other numbers stay.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch

import perlclip
from benchmarks.photographs import photographs
from benchmarks.strong import harmonic, split
from perlclip.adapters.folder import Adapter
from perlclip.bench.store import Store
from perlclip.data.sets import DataSet
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.heads.head import Head
from perlclip.training.shots import look_at

ROWS = ("frozen texts", "trained texts", "as made")


def heads(head: Head) -> list[Head]:
    """One for each row."""
    assert head.unseen is not None
    others = [replace(head, unseen=replace(head.unseen, gained=gained)) for gained in ((), (0.0,))]
    return [*others, head]


@torch.no_grad()
def accuracies(adapter: Adapter, data: DataSet, shots: int, seed: int) -> list[tuple[float, float]]:
    """Base and novel accuracy of each row, from one look at the images."""
    method, parts = adapter.method, split(data, shots, seed)
    assert adapter.head is not None
    state = method.class_state(data.train.classes, novel=True)
    asked = [Answering(method, state, head) for head in heads(adapter.head)]
    found = []
    for part, shift in (("base", 0), ("novel", len(adapter.class_names))):
        seen, device = look_at(method, parts[part], state), method.backbone.device
        v_KNE, m_NF = seen.v_KNE.to(device), seen.middle_NF
        more = [None if m_NF is None else each.from_middle(m_NF.to(device)) for each in asked]
        answers = [
            each.finish(seen.adapted_NC[None].to(device), v_KNE, more_NC)[-1].argmax(-1).cpu()
            for each, more_NC in zip(asked, more, strict=True)
        ]
        found.append([100 * (answer_N == seen.labels_N + shift).double().mean().item() for answer_N in answers])
    return list(zip(*found, strict=True))


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--real", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sets", nargs="+")
    options = parser.parse_args()
    clip = str(options.real / "clip") if options.real else "tiny"
    backbone = perlclip.load_backbone(clip, dtype="bfloat16" if options.real else "float32")
    found: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for records in (Store(path).records() for path in options.stores):
        for home, record in zip(records.homes, records.complete, strict=True):
            run = record["run"]
            here = run["seed"] in options.seeds and run["dataset"] in (options.sets or [run["dataset"]])
            adapter = None if record.get("adapter_of") or not here else perlclip.load_adapter(home, backbone=backbone)
            unseen = adapter.head.unseen if adapter and adapter.head else None
            if adapter is None or unseen is None or not unseen.gained:
                continue
            name = run["dataset"]
            data = photographs(options.real, name) if options.real else load_toybox(name)
            found[name].append(accuracies(adapter, data, run["shots"], run["seed"]))
            said = "   ".join(f"{row} {a:.1f} / {b:.1f}" for row, (a, b) in zip(ROWS, found[name][-1], strict=True))
            print(f"{name:18} seed {run['seed']}, taken off {unseen.gained[-1]:5.2f}:   {said}", flush=True)
    if not found:
        raise SystemExit("no adapter here asks trained texts whether an image is of a new class")
    for place, row in enumerate(ROWS):
        sets = [[fmean(half) for half in zip(*(each[place] for each in runs), strict=True)] for runs in found.values()]
        base, novel = (fmean(half) for half in zip(*sets, strict=True))
        print(f"{row:14} {base:.1f} / {novel:.1f}, HM {harmonic(base, novel):.1f}, over {len(sets)} sets")


if __name__ == "__main__":
    main()
