"""`choose_unseen`: how a head speaks about classes that it was not trained on, from the shots alone.

Half of the classes are left out in turn, several times, and a quarter of the other classes' shots with them. The rest
is fitted, in closed form, which is cheap. Then the shots that were left out are asked for among all classes, and the
rule and the offset are those of a grid that make the true classes most likely, known ones and left out ones alike.

A list of new classes alone is answered by the same rule, or by the texts, if among themselves these make the classes
left out clearly more likely than `PLAIN` does, by a standard error over classes; else by `PLAIN`, which did well on
every set of photographs and drawings that it was measured on (docs/strong.md). Fewer than six classes are not asked:
they say little about others, however many shots they have. EuroSAT's five base classes prefer a rule that gains nothing
on the other five, where `PLAIN` gains five points.

Where the head reads the image tower's middle, that has a word on whether an image is of a known class at all: scores of
a class there say how much more probable it makes the image than a class in the middle of all would. How much of them
counts, and the offset beside it, make images of known classes and of left out ones most likely to be that.

Shapes: N images, C classes, S of them known, E embedding width, F the middle's, M models, T mixtures, O offsets.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.heads.discriminant import Discriminant, solution
from perlclip.heads.regression import one_thread
from perlclip.heads.unseen import NewClasses, Unseen, means_of

FEWEST, FEW = 4, 6  # classes: two to tell apart in either half; so many say which rule is good for others
TURNS, ENOUGH = 4, 160  # turns at most; that so many classes have been left out in all is enough
HELD = 4  # of the classes that stay, one shot of so many is left out
IMAGES = 500  # of classes left out, at most, to choose on, and as many of the others
MODELS = tuple(
    NewClasses(strength=strength, gain=gain, handed=handed)
    for strength, gain, handed in product((0.4, 0.6, 0.8, 0.95), (0.7, 1.0), (0.0, 1.0, 3.0))
)
MIXTURES = tuple(
    (text, scale) for text in (0.0, 0.25, 0.5, 1.0) for scale in (0.0, *(2.0**k for k in range(-6, 1))) if text or scale
)
OFFSETS = torch.arange(-8, 9) / 2
PLAIN = NewClasses(text=1.0, scale=1.0, strength=0.95, gain=0.7)
TEXTS = replace(MODELS[0], text=1.0, scale=0.0)
WARMTHS = tuple(2.0**k for k in range(-4, 3))  # by which a rule is multiplied
CLEAR = 1.0  # standard errors
AMONG = (0.0, *(2.0**k for k in range(-12, -1)))  # weights of the middle's scores


Read = tuple[Tensor, float]  # what the middle says of each image, (N, F), and the strength of the fit to it


@dataclass(frozen=True)
class Fold:
    """What was left out, and what a fit to the rest says about it by each of `MODELS`."""

    class_N: Tensor  # of each image, among all classes
    labels_N: Tensor  # the same among the columns: first the classes that stayed
    stayed: int
    texts_NC: Tensor
    scores_MNC: Tensor
    middle_NS: Tensor | None = None  # what the tower's middle says of the classes that stayed

    @property
    def new_N(self) -> Tensor:
        """Whether an image is of a class left out."""
        return self.labels_N >= self.stayed


@one_thread()
def choose_unseen(
    x_NE: Tensor, labels_N: Tensor, t_CE: Tensor, logit_scale: float, seed: int = 1, middle: Read | None = None
) -> tuple[Unseen | None, float, float]:
    """The numbers for features `x_NE` and the texts `t_CE` that go with them; nothing if classes are too few.

    And how much of the middle's scores, where a head reads it, counts for whether an image is of a known class, and the
    offset for those who do not read it.
    """
    there = sorted(set(labels_N.tolist()))
    if len(there) < FEWEST:
        return None, 0.0, 0.0
    folds = list(_folds(x_NE.double(), labels_N, t_CE.double(), logit_scale, there, seed, middle))
    # Fewer than four shots leave none of the known classes' to ask about: whether it is one of them, the texts say.
    alike = all(fold.new_N.all() for fold in folds)
    among, offset = (TEXTS, 0.0) if alike else _among(folds)
    weight, beside = (0.0, offset) if alike or middle is None else _known(among, folds)
    alone = _warmed(PLAIN, folds)
    for other in (_warmed(TEXTS, folds), _warmed(among, folds)) if len(there) >= FEW else ():
        gain_C = other[1] - alone[1]
        if gain_C.mean() > CLEAR * gain_C.std() / sqrt(len(gain_C)):
            alone = other
    return Unseen(alone=alone[0], among=among, offset=beside), weight, offset


def _among(folds: Sequence[Fold]) -> tuple[NewClasses, float]:
    """The rule and the offset by which all images, of known classes and of new ones, are most likely what they are."""
    mixtures_T11 = torch.tensor(MIXTURES).T[..., None, None]
    likely_OP = torch.zeros(len(OFFSETS), len(MODELS) * len(MIXTURES))
    counts = [sum(int((fold.new_N == new).sum()) for fold in folds) for new in (False, True)]
    for fold in folds:
        weight_N = torch.where(fold.new_N, 1 / counts[1], 1 / counts[0])
        shift_ON = OFFSETS[:, None] * ~fold.new_N
        for m, scores_NC in enumerate(fold.scores_MNC):
            logits_TNC = mixtures_T11[0] * fold.texts_NC + mixtures_T11[1] * scores_NC
            true_TN = logits_TNC.gather(-1, fold.labels_N.expand(logits_TNC.shape[:-1])[..., None])[..., 0]
            known_TN, new_TN = (
                part.logsumexp(-1) for part in (logits_TNC[..., : fold.stayed], logits_TNC[..., fold.stayed :])
            )
            for o, shift_N in enumerate(shift_ON):
                logp_TN = true_TN + shift_N - torch.logaddexp(known_TN + OFFSETS[o], new_TN)
                likely_OP[o, m * len(MIXTURES) : (m + 1) * len(MIXTURES)] += logp_TN @ weight_N
    o, p = divmod(int(likely_OP.argmax()), likely_OP.shape[1])
    text, scale = MIXTURES[p % len(MIXTURES)]
    return replace(MODELS[p // len(MIXTURES)], text=text, scale=scale), OFFSETS[o].item()


def _known(rule: NewClasses, folds: Sequence[Fold]) -> tuple[float, float]:
    """The weight of the middle's scores and the offset that tell known classes from new ones best by the rule."""
    model, likely_AO = _model(rule), torch.zeros(len(AMONG), len(OFFSETS))
    counts = [sum(int((fold.new_N == new).sum()) for fold in folds) for new in (False, True)]
    for fold in folds:
        assert fold.middle_NS is not None
        logits_NC = rule.text * fold.texts_NC + rule.scale * fold.scores_MNC[model]
        new_N, stayed_NS = logits_NC[:, fold.stayed :].logsumexp(-1), logits_NC[:, : fold.stayed]
        known_AN = torch.stack([(stayed_NS + weight * fold.middle_NS).logsumexp(-1) for weight in AMONG])
        lead_AON = known_AN[:, None] + OFFSETS[:, None] - new_N
        logp_AON = F.logsigmoid(torch.where(fold.new_N, -lead_AON, lead_AON))
        likely_AO += logp_AON @ torch.where(fold.new_N, 1 / counts[1], 1 / counts[0])
    a, o = divmod(int(likely_AO.argmax()), len(OFFSETS))
    return AMONG[a], OFFSETS[o].item()


def _model(rule: NewClasses) -> int:
    return MODELS.index(replace(rule, text=MODELS[0].text, scale=MODELS[0].scale))


def _warmed(rule: NewClasses, folds: Sequence[Fold]) -> tuple[NewClasses, Tensor]:
    """The rule at its best warmth for classes left out among themselves, and how likely it makes each of them, (C,)."""
    model = _model(rule)
    found: list[tuple[NewClasses, Tensor]] = []
    for warmth in WARMTHS:
        warm = replace(rule, text=warmth * rule.text, scale=warmth * rule.scale)
        parts = []
        for fold in folds:
            new_N, scores_NC = fold.new_N, fold.scores_MNC[model]
            logits_NC = (warm.text * fold.texts_NC + warm.scale * scores_NC)[new_N][:, fold.stayed :]
            label_N1 = (fold.labels_N[new_N] - fold.stayed)[:, None]
            parts.append(logits_NC.log_softmax(-1).gather(-1, label_N1)[:, 0])
        logp_N, class_N = torch.cat(parts), torch.cat([fold.class_N[fold.new_N] for fold in folds])
        found.append((warm, torch.stack([logp_N[class_N == c].mean() for c in sorted(set(class_N.tolist()))])))
    return max(found, key=lambda pair: pair[1].mean().item())


def _folds(
    x_NE: Tensor, labels_N: Tensor, t_CE: Tensor, logit_scale: float, there: Sequence[int], seed: int,
    middle: Read | None,
) -> Iterator[Fold]:  # fmt: skip
    rng = random.Random(f"unseen {seed}")
    places = {c: rng.sample(where, len(where)) for c in there if (where := (labels_N == c).nonzero()[:, 0].tolist())}
    turns = min(TURNS, -(-ENOUGH // len(there)))
    most = IMAGES // (2 * turns)
    for _ in range(turns):
        order = rng.sample(there, len(there))
        for left in (order[::2], order[1::2]):
            stay = sorted(set(there) - set(left))
            held = {c: places[c][: len(places[c]) // HELD] for c in stay}
            fitted = [(i, n) for n, c in enumerate(stay) for i in places[c][len(held[c]) :]]
            asked = [
                *_some([(i, n) for n, c in enumerate(stay) for i in held[c]], most, rng),
                *_some([(i, n) for n, c in enumerate(left, len(stay)) for i in places[c]], most, rng),
            ]
            rows_N, fit_N = torch.tensor(fitted).T
            kept = Discriminant.of(x_NE[rows_N], fit_N, len(stay)).kept()
            read = middle and solution(middle[0][rows_N], fit_N, len(stay), middle[1])
            rows_N, asked_N = torch.tensor(asked).T
            scores, guessed = [], {}
            for rule in MODELS:
                kind = rule.gain, rule.handed
                if kind not in guessed:
                    guessed[kind] = means_of(kept, t_CE[stay], t_CE[left], rule)
                weight_CE, bias_C = kept.scores_of(torch.cat([kept.means_CE, guessed[kind]]), rule.strength)
                scores.append((x_NE[rows_N] @ weight_CE.T + bias_C).float())
            texts_NC = logit_scale * x_NE[rows_N] @ t_CE[[*stay, *left]].T
            middle_NS = None
            if middle and read:
                middle_NS = (middle[0][rows_N].double() @ read[0].T + read[1]).float()
            yield Fold(labels_N[rows_N], asked_N, len(stay), texts_NC.float(), torch.stack(scores), middle_NS)


def _some(asked: list[tuple[int, int]], most: int, rng: random.Random) -> list[tuple[int, int]]:
    """So many of them at most."""
    return rng.sample(asked, min(len(asked), most))
