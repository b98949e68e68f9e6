"""How the rule of adaptive thinking was chosen: candidates on validation images, with thresholds from training shots.

    python -m benchmarks.adaptive_choice BENCH/runs     # writes docs/results/adaptive/choice.csv; no test image is seen

For every run of PERL in the store, each candidate's thresholds are set on views of the run's training shots as
`set_thresholds` does, once for each share of views that must agree with step K. They are then applied to the validation
images of the classes trained on (base) and of the others (novel). The table has means over runs; printed are the
answers that differ from step K's, in percent, at equal passes.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.adaptive import BATCH, OUT, Row, runs_of, table
from perlclip.bench.run import Workspace
from perlclip.bench.store import Run
from perlclip.data.loading import fixed_views
from perlclip.data.sets import PARTS
from perlclip.data.suites import SUITES
from perlclip.files import write_files
from perlclip.methods.perl import Perl
from perlclip.thinking import policy as adaptive
from perlclip.training.choose_thresholds import QUANTILES, VIEWS, training_views

TARGETS = (0.93, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995, 0.998)
AT = (1.0, 1.25, 1.5)
NEVER = adaptive.NEVER
# Done after step 0 where x >= a; after a later one where y >= b, or z >= a.
Scores = tuple[Tensor, Tensor, Tensor]
Rule = Callable[[Tensor], Scores]


def probability_or_change(logits_KBC: Tensor) -> Scores:
    """The largest probability, and the total variation distance that the last step moved the distribution."""
    p_KBC = logits_KBC.double().softmax(-1)
    top_KB, moved_KB = p_KBC.amax(-1), (p_KBC[1:] - p_KBC[:-1]).abs().sum(-1) / 2
    return top_KB[0], -moved_KB, top_KB[1:]


def lead(ahead: float) -> Rule:
    """The smallest lead so many steps ahead; 0 is confidence alone."""

    def scores(logits_KBC: Tensor) -> Scores:
        usual, adaptive.AHEAD = adaptive.AHEAD, ahead
        settled_KB = adaptive.settled_steps(logits_KBC).double()
        adaptive.AHEAD = usual
        return settled_KB[0], settled_KB[1:], torch.full_like(settled_KB[1:], -NEVER)

    return scores


RULES: dict[str, Rule] = {
    "probability or change": probability_or_change,
    **{f"lead, {n} ahead": lead(n) for n in (0, 1, 2, 3, 4)},
}


def stops(scores: Scores, a: float, b: float) -> Tensor:
    """The step after which each image is done."""
    x_B, y_KB, z_KB = scores
    done_KB = torch.cat([(x_B >= a)[None], (y_KB >= b) | (z_KB >= a)])
    done_KB[-1] = True
    return done_KB.int().argmax(0)


def thresholds(logits_KVC: Tensor, scores: Scores) -> list[tuple[float, float]]:
    """For each target the cheapest pair of the grid that agrees so often with step K."""
    x_B, y_KB, _ = scores
    shares = torch.linspace(0, 1, QUANTILES, dtype=torch.double)
    grid = [
        (a, b)
        for a in (*torch.quantile(x_B.double(), shares).tolist(), NEVER)
        for b in (*torch.quantile(y_KB.double().flatten(), shares).tolist(), NEVER)
    ]
    results = [(*effect(logits_KVC, stops(scores, *pair)), pair) for pair in grid]
    return [min(found for found in results if found[1] >= target)[2] for target in TARGETS]


def effect(logits_KBC: Tensor, steps_B: Tensor) -> tuple[float, float]:
    """Mean passes, and the share of answers that are step K's."""
    answers_KB = logits_KBC.argmax(-1)
    same_B = answers_KB.gather(0, steps_B[None])[0] == answers_KB[-1]
    return steps_B.double().mean().item(), same_B.double().mean().item()


@torch.inference_mode()
def seen(run: Run, method: Perl, workspace: Workspace) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """v of every step, labels (none for views) and T of every step: of training views and both halves of validation."""
    preprocess, shots = method.backbone.preprocess, workspace.shots(run)
    views = training_views(method, shots, VIEWS, run.seed, BATCH)
    v_KVE = torch.cat([method.encode_image_steps(pixels) for pixels in views], 1)
    found = {"views": (v_KVE, torch.empty(0), method.encode_text_steps(method.class_state(shots.classes)))}
    for part in ("base", "novel"):
        images = PARTS[part](SUITES[run.suite].load(run.dataset, None).val)
        v = [
            method.encode_image_steps(pixels)
            for pixels, _ in fixed_views(images, preprocess, BATCH, method.backbone.device)
        ]
        t_KCE = method.encode_text_steps(method.class_state(images.classes))
        found[part] = torch.cat(v, 1), torch.as_tensor(images.labels), t_KCE
    return found


def candidates(run: Run, method: Perl, workspace: Workspace) -> Iterator[Row]:
    """One row for each rule, text and target."""
    found = seen(run, method, workspace)
    for texts in ("T_k", "T_K"):
        logits = {
            name: torch.stack([method.similarity(v, t_KCE[k if texts == "T_k" else -1]) for k, v in enumerate(v_KBE)])
            for name, (v_KBE, _, t_KCE) in found.items()
        }
        for rule, scores in RULES.items():
            pairs = thresholds(logits["views"], scores(logits["views"]))
            for target, pair in zip(TARGETS, pairs, strict=True):
                row: Row = {"texts": texts, "rule": rule, "agreement_on_views": target}
                for part in ("base", "novel"):
                    steps_B = stops(scores(logits[part]), *pair)
                    passes, agreement = effect(logits[part], steps_B)
                    right_KB = (logits[part].argmax(-1) == found[part][1]).double()
                    change = 100 * (right_KB.gather(0, steps_B[None])[0].mean() - right_KB[-1].mean()).item()
                    row |= {f"{part}_passes": passes, f"{part}_agreement": 100 * agreement, f"{part}_change": change}
                yield row


def average(rows: Sequence[Row]) -> list[Row]:
    """Means over runs."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(row["texts"]), str(row["rule"]), str(row["agreement_on_views"])), []).append(row)
    numbers = [key for key in rows[0] if key.startswith(("base", "novel"))]
    return [{**g[0], **{key: float(np.mean([row[key] for row in g])) for key in numbers}} for g in groups.values()]


def main() -> None:
    """Measure, write the table, and print the comparison at equal passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    workspace = Workspace()
    rows = [row for run, _, method in runs_of(given.store, workspace) for row in candidates(run, method, workspace)]
    means = average(rows)
    write_files({given.out / "choice.csv": table(means)})
    print("answers that differ from step K's, %, at", AT, "passes: base | novel")
    for texts in ("T_k", "T_K"):
        for rule in RULES:
            part = [row for row in means if (row["texts"], row["rule"]) == (texts, rule)]
            shown = [
                np.interp(AT, *np.array(sorted((row[f"{half}_passes"], row[f"{half}_agreement"]) for row in part)).T)
                for half in ("base", "novel")
            ]
            print(texts, rule.ljust(22), " | ".join(" ".join(f"{100 - value:.2f}" for value in line) for line in shown))


if __name__ == "__main__":
    main()
