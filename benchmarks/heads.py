"""Heads in closed form on frozen embeddings: ridge regression, and Gaussians with their rules for new classes.

    python -m benchmarks.features F --sets NAME …                   embeddings of drawn sets, once
    python -m benchmarks.features F --real FOLDER                   and of photographs
    python -m benchmarks.heads F --out FILE [--shots 1 4 16] [--sets NAME …] [--directions 16]

Shots of the base classes, seeds 1 to 3. Accuracy is measured on images of the training and validation splits that were
not drawn: base and novel classes among their own, and both among all. No test image is looked at. Rows: zero-shot CLIP;
`ridge`; `plain`, Gaussians with `choose_unseen.PLAIN` for new classes, texts between old and new; `one rule`, what is
chosen for lists with both kinds of classes for new ones alone, too; `gaussian`, all as chosen.

Shapes: N images, C classes of which the first T are base, E embedding width.
"""

import argparse
import csv
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.strong import harmonic
from perlclip.heads import discriminant
from perlclip.heads.discriminant import Discriminant
from perlclip.heads.regression import Ridge
from perlclip.heads.unseen import NewClasses, Unseen, means_of
from perlclip.training.choose_head import FIXED, Choice, Said, choose
from perlclip.training.choose_unseen import PLAIN, choose_unseen

SEEDS = (1, 2, 3)
COLUMNS = ("set", "shots", "row", "base", "novel", "all base", "all novel")


class Case:
    """A set and a draw of shots."""

    def __init__(self, folder: Path, name: str, shots: int, seed: int) -> None:
        texts = load_file(folder / f"{name}-texts.safetensors")
        parts = [load_file(path) for p in ("train", "val") if (path := folder / f"{name}-{p}.safetensors").exists()]
        v_NE, labels_N = (torch.cat([part[key] for part in parts]) for key in ("v_NE", "labels_N"))
        self.t_CE, self.scale = texts["t_CE"].double(), texts["scale"].item()
        self.base = (len(self.t_CE) + 1) // 2
        rng, train = random.Random(seed), parts[0]["labels_N"].tolist()
        places = [[i for i, label in enumerate(train) if label == c] for c in range(self.base)]
        drawn = [i for where in places for i in rng.sample(where, min(shots, len(where)))]
        rest = torch.ones(len(labels_N), dtype=torch.bool)
        rest[drawn] = False
        self.x_NE, self.y_N = v_NE[drawn], labels_N[drawn]
        self.images = {
            "base": (v_NE[rest & (labels_N < self.base)].double(), labels_N[rest & (labels_N < self.base)]),
            "novel": (v_NE[labels_N >= self.base].double(), labels_N[labels_N >= self.base]),
        }

    def rows(self, seed: int) -> Iterator[tuple[str, list[float]]]:
        """Each row's four accuracies in percent."""
        yield "zero-shot", self._right(Choice(strength=1, text=1, scale=0, share=1, how=""), None, None)
        for solver, rows in ((Ridge, ("ridge",)), (Discriminant, ("plain", "one rule", "gaussian"))):
            found = solver.of(self.x_NE, self.y_N, self.base)
            choice = FIXED[solver]
            if len(self.y_N) > self.base:
                zero_NC = (self.scale * self.x_NE.double() @ self.t_CE[: self.base].T).float()
                scores_LNC = found.left_out(solver.STRENGTHS, torch.arange(len(self.y_N)))
                said = Said(
                    labels_N=self.y_N, zero_NC=zero_NC, adapted_NC=zero_NC, scores_LNC=scores_LNC, solver=solver
                )
                choice = choose(said, (1.0,), "each left out")
            for row in rows:
                unseen = None
                if row == "plain":
                    unseen = Unseen(alone=PLAIN, among=NewClasses())
                elif row != "ridge":
                    unseen = choose_unseen(self.x_NE, self.y_N, self.t_CE[: self.base], self.scale, seed)
                if row == "one rule" and unseen is not None:
                    unseen = replace(unseen, alone=unseen.among)
                yield row, self._right(choice, found, unseen)

    def _right(self, choice: Choice, found: Ridge | Discriminant | None, unseen: Unseen | None) -> list[float]:
        accuracy = {}
        for part, (x_NE, labels_N) in self.images.items():
            texts_NC = self.scale * x_NE @ self.t_CE.T
            known_NT = choice.text * texts_NC[:, : self.base]
            if found is not None:
                weight_TE, bias_T = (found.kept() if isinstance(found, Discriminant) else found).solution(
                    choice.strength
                )
                known_NT = known_NT + choice.scale * (x_NE @ weight_TE.T + bias_T)
            alone_NC = among_NC = texts_NC
            if unseen is not None:
                assert isinstance(found, Discriminant)
                alone_NC, among_NC = (self._by(rule, found, x_NE) for rule in (unseen.alone, unseen.among))
            among_NC = among_NC.clone()
            among_NC[:, : self.base] += unseen.offset if unseen else 0.0
            both_NC = torch.cat(
                [
                    known_NT.log_softmax(1) + among_NC[:, : self.base].logsumexp(1, keepdim=True),
                    among_NC[:, self.base :],
                ],
                1,
            )
            own_N = known_NT.argmax(1) if part == "base" else alone_NC[:, self.base :].argmax(1) + self.base
            for key, answer_N in ((part, own_N), (f"all {part}", both_NC.argmax(1))):
                accuracy[key] = 100 * (answer_N == labels_N).double().mean().item()
        return [accuracy[key] for key in COLUMNS[3:]]

    def _by(self, rule: NewClasses, found: Discriminant, x_NE: Tensor) -> Tensor:
        """Logits of all classes by a rule."""
        kept = found.kept()
        new_XE = means_of(kept, self.t_CE[: self.base], self.t_CE[self.base :], rule)
        weight_CE, bias_C = kept.scores_of(torch.cat([kept.means_CE, new_XE]), rule.strength)
        return rule.text * self.scale * x_NE @ self.t_CE.T + rule.scale * (x_NE @ weight_CE.T + bias_C)


def show(rows: list[tuple[str, int, str, list[float]]]) -> None:
    """Means over sets, HM of each pair."""
    found = defaultdict(list)
    for _, shots, row, values in rows:
        found[shots, row].append(values)
    for (shots, row), values in found.items():
        base, novel, all_base, all_novel = (fmean(column) for column in zip(*values, strict=True))
        told = f"{base:.1f} / {novel:.1f} / {harmonic(base, novel):.1f}", f"{harmonic(all_base, all_novel):.1f}"
        print(f"{shots:3} shots  {row:12} {told[0]}   among all {told[1]}   ({len(values)} sets)")


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shots", type=int, nargs="*", default=[16])
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--directions", type=int, default=discriminant.DIRECTIONS)
    options = parser.parse_args()
    discriminant.DIRECTIONS = options.directions
    names = options.sets or sorted(
        path.name.removesuffix("-texts.safetensors") for path in options.folder.glob("*-texts.*")
    )
    rows = []
    for name in names:
        for shots in options.shots:
            by_row = defaultdict(list)
            for seed in SEEDS:
                for row, values in Case(options.folder, name, shots, seed).rows(seed):
                    by_row[row].append(values)
            rows += [
                (name, shots, row, [fmean(column) for column in zip(*values, strict=True)])
                for row, values in by_row.items()
            ]
    show(rows)
    if options.out:
        with options.out.open("w", newline="") as file:
            lines = [[name, shots, row, *(f"{value:.2f}" for value in values)] for name, shots, row, values in rows]
            csv.writer(file).writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
