"""Heads in closed form on frozen embeddings: ridge regression, and Gaussians with their rules for new classes.

    python -m benchmarks.features F --sets NAME …                   embeddings of drawn sets, once
    python -m benchmarks.features F --real FOLDER                   and of photographs
    python -m benchmarks.heads F --out FILE [--shots 1 4 16] [--sets NAME …] [--directions 16] [--depth 7]
    python -m benchmarks.heads F --across                           what the center of one set does to another
    python -m benchmarks.heads --seconds 100                        what so many classes of 16 shots take on ViT-B/16

Shots of the base classes, seeds 1 to 3. Accuracy is measured on images of the training and validation splits that were
not drawn: base and novel classes among their own, and both among all. No test image is looked at. Rows: zero-shot CLIP;
`ridge`; Gaussians of the embedding alone: `plain`, with `choose_unseen.PLAIN` for new classes and texts between old and
new, `one rule`, with what is chosen for lists of both kinds for new classes alone, too, and `embedding`, all as chosen;
`uncentered`, the same with what the image tower's middle says (`--depth`: after so many blocks); `gaussian`, the
method, whose images are centered before they meet texts, too; `center`, texts and nothing else after that.

Shapes: N images, C classes of which the first T are base, E embedding width, F the middle's.
"""

import argparse
import csv
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from benchmarks.strong import harmonic
from perlclip.heads import discriminant
from perlclip.heads.discriminant import Discriminant
from perlclip.heads.regression import Ridge
from perlclip.heads.unseen import NewClasses, Unseen, means_of
from perlclip.methods.parts import CENTER
from perlclip.training.choose_head import FEW, FIXED, Choice, Said, choose
from perlclip.training.choose_unseen import PLAIN, choose_unseen

SEEDS = (1, 2, 3)
COLUMNS = ("set", "shots", "row", "base", "novel", "all base", "all novel")


class Case:
    """A set and a draw of shots."""

    def __init__(self, folder: Path, name: str, shots: int, seed: int, depth: int) -> None:
        texts = load_file(folder / f"{name}-texts.safetensors")
        parts = [load_file(path) for p in ("train", "val") if (path := folder / f"{name}-{p}.safetensors").exists()]
        keys = "v_NE", "labels_N", f"m{depth}_NF"
        v_NE, labels_N, m_NF = (torch.cat([part[key] for part in parts]) for key in keys)
        self.t_CE, self.scale = texts["t_CE"].double(), texts["scale"].item()
        self.base = (len(self.t_CE) + 1) // 2
        rng, train = random.Random(seed), parts[0]["labels_N"].tolist()
        places = [[i for i, label in enumerate(train) if label == c] for c in range(self.base)]
        drawn = [i for where in places for i in rng.sample(where, min(shots, len(where)))]
        rest = torch.ones(len(labels_N), dtype=torch.bool)
        rest[drawn] = False
        self.x_NE, self.m_NF, self.y_N = v_NE[drawn], m_NF[drawn], labels_N[drawn]
        self.off_C = torch.zeros(len(self.t_CE)).double()
        some = {"base": rest & (labels_N < self.base), "novel": labels_N >= self.base}
        self.images = {part: (v_NE[of_N].double(), m_NF[of_N].double(), labels_N[of_N]) for part, of_N in some.items()}

    def rows(self, seed: int) -> Iterator[tuple[str, list[float]]]:
        """Each row's four accuracies in percent."""
        yield "zero-shot", self._right(Choice(strength=1, text=1, scale=0, share=1, how=""), None, None)
        ridge, found, middle = (
            solver.of(rows_NE, self.y_N, self.base)
            for solver, rows_NE in ((Ridge, self.x_NE), (Discriminant, self.x_NE), (Discriminant, self.m_NF))
        )
        assert isinstance(middle, Discriminant)
        yield "ridge", self._right(self._chosen(ridge), ridge, None)
        unseen, *_ = choose_unseen(self.x_NE, self.y_N, self.t_CE[: self.base], self.scale, seed)
        choice = self._chosen(found)
        yield "plain", self._right(choice, found, Unseen(alone=PLAIN, among=NewClasses()))
        yield "one rule", self._right(choice, found, unseen and replace(unseen, alone=unseen.among))
        yield "embedding", self._right(choice, found, unseen)
        for row, center in (("uncentered", 0.0), ("gaussian", CENTER)):
            self.off_C = center * self.scale * found.center_E @ self.t_CE.T
            choice = self._chosen(found, middle)
            read = (self.m_NF, choice.middle_strength) if choice.middle else None
            trained = self.x_NE, self.y_N, self.t_CE[: self.base]
            unseen, among, _ = choose_unseen(*trained, self.scale, seed, read, center)
            yield row, self._right(choice, found, unseen, middle, among)
        yield "center", self._right(Choice(strength=1, text=1, scale=0, share=1, how=""), None, None)

    def _texts(self, x_NE: Tensor) -> Tensor:
        """What texts say, with the center taken off."""
        return self.scale * x_NE @ self.t_CE.T - self.off_C

    def _chosen(self, found: Ridge | Discriminant, middle: Discriminant | None = None) -> Choice:
        """By shots left out, as far as there are."""
        solver, every = type(found), torch.arange(len(self.y_N))
        if len(self.y_N) <= self.base:
            return FIXED[solver]
        zero_NC = self._texts(self.x_NE.double())[:, : self.base].float()
        said = Said(
            labels_N=self.y_N, zero_NC=zero_NC, adapted_NC=zero_NC, solver=solver,
            scores_LNC=found.left_out(solver.STRENGTHS, every),
            middle_LNC=middle.left_out(middle.STRENGTHS, every) if middle else None,
        )  # fmt: skip
        return choose(said, (1.0,), "each left out", few=solver is Discriminant and len(self.y_N) < FEW * self.base)

    def _right(
        self, choice: Choice, found: Ridge | Discriminant | None, unseen: Unseen | None,
        middle: Discriminant | None = None, among: float = 0.0,
    ) -> list[float]:  # fmt: skip
        accuracy = {}
        for part, (x_NE, m_NF, labels_N) in self.images.items():
            texts_NC = self._texts(x_NE)
            known_NT = choice.text * texts_NC[:, : self.base]
            if found is not None:
                weight_TE, bias_T = (found.kept() if isinstance(found, Discriminant) else found).solution(
                    choice.strength
                )
                known_NT = known_NT + choice.scale * (x_NE @ weight_TE.T + bias_T)
            if middle is not None:
                weight_TF, bias_TF = middle.solution(choice.middle_strength)
                known_NT = known_NT + choice.middle * (m_NF @ weight_TF.T + bias_TF)
            alone_NC = among_NC = texts_NC
            if unseen is not None:
                assert isinstance(found, Discriminant)
                alone_NC, among_NC = (self._by(rule, found, x_NE) for rule in (unseen.alone, unseen.among))
            among_NC = among_NC.clone()
            among_NC[:, : self.base] += unseen.offset if unseen else 0.0
            if middle is not None:
                among_NC[:, : self.base] += among * (m_NF @ weight_TF.T + bias_TF)
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
        return rule.text * self._texts(x_NE) + rule.scale * (x_NE @ weight_CE.T + bias_C)


def show(rows: list[tuple[str, int, str, list[float]]]) -> None:
    """Means over sets, HM of each pair."""
    found = defaultdict(list)
    for _, shots, row, values in rows:
        found[shots, row].append(values)
    for (shots, row), values in found.items():
        base, novel, all_base, all_novel = (fmean(column) for column in zip(*values, strict=True))
        told = f"{base:.1f} / {novel:.1f} / {harmonic(base, novel):.1f}", f"{harmonic(all_base, all_novel):.1f}"
        print(f"{shots:3} shots  {row:12} {told[0]}   among all {told[1]}   ({len(values)} sets)")


def across(folder: Path, names: list[str]) -> None:
    """Accuracy of zero-shot CLIP on all classes of the other sets, with the center of one set taken off."""
    cases = {name: Case(folder, name, 16, 1, 7) for name in names}
    print("center of".ljust(18), *(f"{share:>14} of it" for share in (0.5, CENTER)), "  others change (worst)")
    for source, case in cases.items():
        center_E, told = Discriminant.of(case.x_NE, case.y_N, case.base).center_E, []
        for share in (0.5, CENTER):
            changes = []
            for other in (each for name, each in cases.items() if name != source):
                v_NE, labels_N = (torch.cat([part[k] for part in other.images.values()]) for k in (0, 2))
                right, after = (((v_NE - off * center_E) @ other.t_CE.T).argmax(1) == labels_N for off in (0.0, share))
                changes.append(100 * (after.double().mean() - right.double().mean()).item())
            told.append(f"{fmean(changes):+8.1f} ({min(changes):+.1f})")
        print(source.ljust(18), *(f"{word:>20}" for word in told))


def seconds(classes: int, shots: int = 16, width: int = 512, middle: int = 1536, asked: int = 500) -> None:
    """Noise that looks like embeddings, as many shots left out as `choose_head` does."""
    draw = torch.Generator().manual_seed(0)
    y_N = torch.arange(classes).repeat_interleave(shots)
    t_CE, *rows = (
        F.normalize(
            torch.randn(classes, n, generator=draw)[of] + more * torch.randn(len(of), n, generator=draw), dim=-1
        )
        for n, of, more in ((width, torch.arange(classes), 0), (width, y_N, 1), (middle, y_N, 1))
    )
    asked_n = torch.arange(min(asked, len(y_N))) * len(y_N) // min(asked, len(y_N))
    scores, took, began = [], {}, time.perf_counter()
    for name, x_NE in zip(("embedding", "middle"), rows, strict=True):
        found = Discriminant.of(x_NE, y_N, classes)
        scores.append(found.left_out(found.STRENGTHS, torch.arange(len(asked_n)), asked_n))
        took[name], began = time.perf_counter() - began, time.perf_counter()
    zero_nC = 100 * rows[0][asked_n] @ t_CE.T
    choose(
        Said(
            labels_N=y_N[asked_n], zero_NC=zero_nC, adapted_NC=zero_nC, scores_LNC=scores[0], middle_LNC=scores[1],
            solver=Discriminant,
        ), (1.0,), "",
    )  # fmt: skip
    took["choice"], began = time.perf_counter() - began, time.perf_counter()
    choose_unseen(rows[0], y_N, t_CE, 100.0, middle=(rows[1], 0.5))
    took["new classes"] = time.perf_counter() - began
    told = ", ".join(f"{name} {value:.2f} s" for name, value in took.items())
    print(f"{classes} classes of {shots} shots: {told}; {sum(took.values()):.2f} s in all")


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--seconds", type=int, metavar="CLASSES")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shots", type=int, nargs="*", default=[16])
    parser.add_argument("--sets", nargs="*")
    parser.add_argument("--directions", type=int, default=discriminant.DIRECTIONS)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--across", action="store_true")
    options = parser.parse_args()
    if options.seconds:
        return seconds(options.seconds)
    if not options.folder:
        parser.error("FOLDER has the embeddings")
    discriminant.DIRECTIONS = options.directions
    names = options.sets or sorted(
        path.name.removesuffix("-texts.safetensors") for path in options.folder.glob("*-texts.*")
    )
    if options.across:
        return across(options.folder, names)
    rows = []
    for name in names:
        for shots in options.shots:
            by_row = defaultdict(list)
            for seed in SEEDS:
                for row, values in Case(options.folder, name, shots, seed, options.depth).rows(seed):
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
