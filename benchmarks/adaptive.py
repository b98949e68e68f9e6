"""Adaptive thinking on a benchmark's test sets: accuracy against refinement passes.

    perlclip bench base-to-novel --suite toybox --methods perl --recipe extended --out BENCH
    python -m benchmarks.adaptive BENCH/runs        # writes docs/results/adaptive; about 20 minutes on one core

Every run's thresholds are set on that run's own training shots. Its test sets are then looked at once with all K
steps, from which follow the accuracies at each fixed number of steps, of `steps="adaptive"`, and of the thresholds of
every budget. For one seed of each set, a real adaptive pass checks that it takes the steps foretold, and is timed in
turn with one of K steps, batch by batch and without the decoding.
"""

import argparse
import csv
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.adaptive_figure import draw
from perlclip.adapters.folder import load_adapter
from perlclip.bench.run import Workspace
from perlclip.bench.store import Record, Run, Store
from perlclip.data.loading import fixed_views
from perlclip.data.sets import ImageSet
from perlclip.files import write_files
from perlclip.methods.perl import Perl
from perlclip.thinking.policy import ALL_STEPS, Plan, Policy, Stages, answered, simulate
from perlclip.thinking.thresholds import Thresholds
from perlclip.training.choose_thresholds import SPACING, set_thresholds

OUT = Path("docs/results/adaptive")
BATCH = 64
Row = dict[str, str | int | float]


@dataclass(frozen=True)
class Tested:
    """One half of a test set, seen at all of its steps."""

    own_KB: Tensor  # whether (v_k, T_k) is right, or the readout up to there
    logits_KBC: Tensor  # of (v_k, T_K), or the readout up to (v_k, T_k)
    labels_B: Tensor

    @property
    def answers_KB(self) -> Tensor:
        """Of an image that stops after each step."""
        return self.logits_KBC.argmax(-1)

    def point(self, policy: Policy) -> tuple[float, float, float]:
        """Mean steps, accuracy, and agreement with step K, in percent."""
        steps_B = simulate(policy, self.logits_KBC)
        chosen_B = self.answers_KB.gather(0, steps_B[None])[0]
        agreement = _percent(chosen_B == self.answers_KB[-1])
        return steps_B.double().mean().item(), _percent(chosen_B == self.labels_B), agreement


def _percent(right: Tensor) -> float:
    return 100 * right.double().mean().item()


@torch.inference_mode()
def look(method: Perl, images: ImageSet, *, novel: bool) -> Tested:
    """All K steps of a test set."""
    t_KCE = method.encode_text_steps(method.class_state(images.classes, novel=novel))
    own, logits = [], []
    for pixels, labels_B in fixed_views(images, method.backbone.preprocess, BATCH, method.backbone.device):
        v_KBE = method.encode_image_steps(pixels)
        own.append(method.read_out(v_KBE, t_KCE).argmax(-1) == labels_B)
        logits.append(torch.stack([answered(method, list(v_KBE[: k + 1]), t_KCE) for k in range(len(v_KBE))]))
    return Tested(torch.cat(own, 1), torch.cat(logits, 1), torch.as_tensor(images.labels))


@torch.inference_mode()
def really(method: Perl, images: ImageSet, policy: Policy, *, novel: bool) -> tuple[Tensor, list[float]]:
    """The steps that images take with real compaction, and the seconds of that and of K steps for all."""
    state = method.class_state(images.classes, novel=novel)
    plans = [Plan(method=method, steps=method.config.steps, policy=each) for each in (policy, ALL_STEPS)]
    method.class_embeddings(state)  # once per class list, so no part of the comparison
    steps, seconds = [], [0.0, 0.0]
    for i, (pixels, _) in enumerate(fixed_views(images, method.backbone.preprocess, BATCH, method.backbone.device)):
        for which in ((0, 1), (1, 0))[i % 2]:
            began = time.perf_counter()
            answer = plans[which].answer(pixels, Stages(method, state))
            seconds[which] += time.perf_counter() - began
            steps += [answer.steps_B] if which == 0 else []
    return torch.cat(steps), seconds


def runs_of(
    store: Path, workspace: Workspace, seeds: Sequence[int] = (), recipe: str = ""
) -> Iterator[tuple[Run, Record, Perl]]:
    """The base-to-novel runs of PERL in a store, with what they have trained; by one recipe, without ablations."""
    for record in Store(store).records().complete:
        run = Run(**{**record["run"], "settings": tuple(record["run"]["settings"].items())})
        wanted = not recipe or (run.recipe == recipe and not run.settings and not run.head and not run.lens)
        if (run.method, run.protocol) == ("perl", "base-to-novel") and wanted and (not seeds or run.seed in seeds):
            home = store / record["adapter_of"] if record.get("adapter_of") else Store(store).home(run)
            method = load_adapter(home, backbone=workspace.backbone(run)).method
            assert isinstance(method, Perl)
            yield run, record, method


def measure(
    run: Run, record: Record, method: Perl, workspace: Workspace, *, real: bool
) -> Iterator[tuple[Row, list[Row]]]:
    """The table's row and the curve's points of each half of a run's tests."""
    shots = workspace.shots(run)
    thresholds = set_thresholds(method, shots, seed=run.seed, progress=False)
    policy, chosen = thresholds.policy, thresholds.chosen
    for test, found in workspace.tests(run).items():
        tested = look(method, found.images, novel=test.novel)
        mean_steps, accuracy, agreement = tested.point(policy)
        row: Row = {
            "dataset": run.dataset, "seed": run.seed, "classes": test.name, "images": len(found.images),
            "accuracy_K": _percent(tested.own_KB[-1]), "accuracy_adaptive": accuracy, "mean_steps": mean_steps,
            "agreement": agreement, "first": policy.first, "lead": policy.lead,
            "calibration_steps": chosen.mean_steps, "calibration_agreement": 100 * chosen.agreement,
            "views": thresholds.views, "same_shots": int(shots.fingerprint() == record["fit"]["data"]),
        }  # fmt: skip
        if real:
            steps_B, (adaptive, full) = really(method, found.images, policy, novel=test.novel)
            differ = (simulate(policy, tested.logits_KBC) != steps_B).sum().item()
            row |= {"steps_not_foretold": differ, "seconds_adaptive": adaptive, "seconds_K": full}
        yield row, list(_curve(test.name, tested, thresholds))


def _curve(classes: str, tested: Tested, thresholds: Thresholds) -> Iterator[Row]:
    K = len(tested.own_KB) - 1
    for k, right_B in enumerate(tested.own_KB):
        yield {"classes": classes, "kind": "k steps", "setting": k, "passes": k, "accuracy": _percent(right_B)}
    for k, answers_B in enumerate(tested.answers_KB):
        accuracy = _percent(answers_B == tested.labels_B)
        yield {"classes": classes, "kind": "image k, classes K", "setting": k, "passes": k, "accuracy": accuracy}
    for i in range(int(K / SPACING) + 1):
        passes, accuracy, _ = tested.point(thresholds.within(i * SPACING))
        yield {"classes": classes, "kind": "budget", "setting": i * SPACING, "passes": passes, "accuracy": accuracy}
    passes, accuracy, _ = tested.point(thresholds.policy)
    yield {"classes": classes, "kind": "adaptive", "setting": "default", "passes": passes, "accuracy": accuracy}


def average(rows: Sequence[Row]) -> list[Row]:
    """Points of all runs as one; every set has the same seeds, so this is the mean over sets."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["classes"]), str(row["kind"]), str(row["setting"])), []).append(row)
    return [
        {**found[0], **{key: fmean(float(row[key]) for row in found) for key in ("passes", "accuracy")}}
        for found in groups.values()
    ]


def summary(rows: Sequence[Row], K: int) -> Iterator[str]:
    """What it comes to, half by half."""
    for classes in ("base", "novel"):
        part = [row for row in rows if row["classes"] == classes]
        before, after, passes, same = (
            fmean(float(row[key]) for row in part)
            for key in ("accuracy_K", "accuracy_adaptive", "mean_steps", "agreement")
        )
        yield (
            f"{classes}: accuracy at K={K} {before:.2f}, adaptive {after:.2f} ({after - before:+.2f}), {passes:.2f} "
            f"refinement passes ({100 * passes / K:.0f} %), {same:.2f} % of the answers are step K's"
        )
    timed = [row for row in rows if "seconds_K" in row]
    differ, images, adaptive, full = (
        sum(float(row[key]) for row in timed)
        for key in ("steps_not_foretold", "images", "seconds_adaptive", "seconds_K")
    )
    yield f"a real pass takes {adaptive / full:.2f} of the time of K steps for all ({len(timed)} of {len(rows)} rows)"
    yield f"and other steps than foretold on {differ:.0f} of {images:.0f} images"
    yield f"{sum(int(row['same_shots']) for row in rows)} of {len(rows)} rows have the run's own shots to the bit"


def table(rows: Sequence[Row]) -> bytes:
    """CSV, numbers with four decimals."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return text.getvalue().encode()


def main() -> None:
    """Measure all runs of a store, write the tables and the figure, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seeds", type=int, nargs="*", help="only these")
    parser.add_argument("--recipe", default="", help="only runs by this one, with no setting changed")
    given = parser.parse_args()
    workspace = Workspace()
    rows: list[Row] = []
    points: list[Row] = []
    steps, timed = set(), set()
    for run, record, method in runs_of(given.store, workspace, given.seeds or (), given.recipe):
        steps.add(method.config.steps)
        for row, curve in measure(run, record, method, workspace, real=run.dataset not in timed):
            rows.append(row)
            points += curve
            print(*(f"{v:.2f}" if isinstance(v, float) else v for v in row.values()), flush=True)
        timed.add(run.dataset)
    (K,) = steps
    averages = average(points)
    png, svg = draw(averages)
    write_files(
        {
            given.out / "adaptive.csv": table(rows), given.out / "curve.csv": table(averages),
            given.out / "curve.png": png, given.out / "curve.svg": svg,
        }
    )  # fmt: skip
    print(*summary(rows, K), sep="\n")


if __name__ == "__main__":
    main()
