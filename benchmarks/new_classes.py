"""What adapters with a head say of classes that they were not trained on, by other rules, on validation images.

    perlclip bench base-to-novel --suite SUITE --methods perl --recipe strong --head --out DIR
    python -m benchmarks.new_classes DIR/runs --out FILE [--real FOLDER] [--sets NAME …]      FOLDER as for photographs

From one look at the images of each adapter, two questions. In a list of *new classes alone*, novel accuracy: by the
trained texts; with more and more of the score that guessed means give, by `choose_unseen.CENTERED`; as `fit` has made
it. In a list of *all classes*, base and novel accuracy, of adapters that ask trained texts whether an image is of a new
class: by frozen texts, by trained ones with nothing taken off, and as made. Other numbers stay. Of the toybox its ten
targets count; seeds 1 to 3 and runs without a lens.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import perlclip
from benchmarks.photographs import photographs
from benchmarks.strong import split
from perlclip.adapters.folder import Adapter
from perlclip.backbone import Backbone
from perlclip.bench.store import Store
from perlclip.data.sets import DataSet
from perlclip.data.suites import SUITES
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.heads.unseen import Unseen
from perlclip.methods.perl import Perl
from perlclip.training.choose_unseen import CENTERED
from perlclip.training.shots import Seen, look_at

SEEDS = (1, 2, 3)
WEIGHTS = (0.0, *(2.0**k for k in range(-5, 0)))  # of the score beside the texts
COLUMNS = ("set", "seed", "list", "rule", "base", "novel")


def alone(unseen: Unseen) -> dict[str, Unseen]:
    """Rules for lists of new classes."""
    others = {f"{weight:g}": replace(unseen, alone=replace(CENTERED, scale=weight)) for weight in WEIGHTS}
    return {**others, "as made": unseen}


def among(unseen: Unseen) -> dict[str, Unseen]:
    """The same for lists of both kinds."""
    if not unseen.gained:
        return {}
    frozen, plain = (replace(unseen, gained=gained) for gained in ((), (0.0,)))
    return {"frozen texts": frozen, "trained texts, nothing taken off": plain, "as made": unseen}


@torch.no_grad()
def rows(adapter: Adapter, data: DataSet, shots: int, seed: int) -> Iterator[tuple[str, str, float | None, float]]:
    """List, rule, base and novel accuracy in percent."""
    method, head, parts = adapter.method, adapter.head, split(data, shots, seed)
    assert isinstance(method, Perl) and head is not None and head.unseen is not None
    new, every = parts["novel"].classes, data.train.classes
    seen = {part: look_at(method, parts[part], method.class_state(every, novel=True)) for part in ("base", "novel")}
    for name, unseen in alone(head.unseen).items():
        answering = Answering(method, method.class_state(new, novel=True), replace(head, unseen=unseen))
        yield "new classes", name, None, accuracy(answering, seen["novel"], seen["novel"].labels_N)
    for name, unseen in among(head.unseen).items():
        answering = Answering(method, method.class_state(every, novel=True), replace(head, unseen=unseen))
        shifted = seen["novel"].labels_N + len(adapter.class_names)
        base, novel = ((seen["base"], seen["base"].labels_N), (seen["novel"], shifted))
        yield "all classes", name, accuracy(answering, *base), accuracy(answering, *novel)


def accuracy(answering: Answering, seen: Seen, labels_N: Tensor) -> float:
    """In percent, of images that were looked at before."""
    method, device = answering.method, answering.method.backbone.device
    assert isinstance(method, Perl)
    v_KNE, m_NF = seen.v_KNE.to(device), seen.middle_NF
    logits_KNC = method.read_out(v_KNE, method.class_embedding_steps(answering.state))
    more_NC = None if m_NF is None else answering.from_middle(m_NF.to(device))
    answer_N = answering.finish(logits_KNC, v_KNE, more_NC)[-1].argmax(-1).cpu()
    return 100 * (answer_N == labels_N).double().mean().item()


def adapters(store: Path, backbone: Backbone, sets: Sequence[str] = ()) -> Iterator[tuple[dict[str, Any], Adapter]]:
    """Runs of PERL by `strong` that have a head with rules for new classes, and their adapters."""
    records = Store(store).records()
    for home, record in zip(records.homes, records.complete, strict=True):
        run = record["run"]
        kind = run["protocol"], run["method"], run["recipe"], run["settings"], run.get("head"), run.get("lens", False)
        source = SUITES[run["suite"]].source if run["suite"] in SUITES else ""
        asked = run["seed"] in SEEDS and run["dataset"] != source and run["dataset"] in (sets or [run["dataset"]])
        if kind != ("base-to-novel", "perl", "strong", {}, True, False) or not asked:
            continue
        adapter = perlclip.load_adapter(
            store / (record.get("adapter_of") or home.relative_to(store)), backbone=backbone
        )
        if adapter.head is not None and adapter.head.unseen is not None:
            yield run, adapter


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    clip = str(options.real / "clip") if options.real else "tiny"
    backbone = perlclip.load_backbone(clip, dtype="bfloat16" if options.real else "float32")
    found = []
    for run, adapter in adapters(options.store, backbone, options.sets or ()):
        name = run["dataset"]
        data = photographs(options.real, name) if options.real else load_toybox(name)
        for classes, rule, base, novel in rows(adapter, data, run["shots"], run["seed"]):
            found.append([name, run["seed"], classes, rule, "" if base is None else f"{base:.3f}", f"{novel:.3f}"])
            print(*found[-1], flush=True)
    if not found:
        raise SystemExit("there is no adapter with a head by PERL's recipe strong here")
    with options.out.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *found])


if __name__ == "__main__":
    main()
