"""`choose_unseen`: how a head speaks about classes that it was not trained on, from the shots alone.

Half of the classes are left out in turn, several times, and a quarter of the other classes' shots with them. The rest
is fitted, in closed form, which is cheap. Then the shots that were left out are asked for among all classes, and the
rule and the offset are those of a grid that make the true classes most likely, known ones and left out ones alike.

A list of new classes alone is answered by the same rule, or by the texts, if among themselves these make the classes
left out clearly more likely than `PLAIN` does, by a standard error over classes; else by `PLAIN`, or `CENTERED` where
images are centered, which did well on the photographs and drawings that they were measured on (docs/strong.md). Fewer
than six classes are not asked: they say little about others, however many shots they have. EuroSAT's five base classes
prefer a rule that gains nothing on the other five, where `PLAIN` gains five points. What is taken is then multiplied so
that the classes left out are most likely: it is as sure of new classes as it should be of these.

Where the head reads the image tower's middle, that has a word on whether an image is of a known class at all: scores of
a class there say how much more probable it makes the image than a class in the middle of all would. How much of them
counts, and the offset beside it, make images of known classes and of left out ones most likely to be that.

Shapes: N images, C classes, K of them known, E embedding width, F the middle's, M models, T weights of texts,
S of scores, O offsets.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.heads.discriminant import Discriminant
from perlclip.heads.unseen import NewClasses, Unseen, means_of
from perlclip.threads import one_thread, side_by_side

FEWEST, FEW = 4, 6  # classes: two to tell apart in either half; so many say which rule is good for others
TURNS, ENOUGH = 4, 160  # turns at most; that so many classes have been left out in all is enough
HELD = 4  # of the classes that stay, one shot of so many is left out
IMAGES = 500  # of classes left out, at most, to choose on, and as many of the others
STRENGTHS, MEANS = (0.4, 0.6, 0.8, 0.95), tuple(product((0.7, 1.0), (0.0, 1.0, 3.0)))
MODELS = tuple(
    NewClasses(strength=strength, gain=gain, handed=handed) for strength in STRENGTHS for gain, handed in MEANS
)
MIXED_TEXTS, MIXED_SCALES = (0.0, 0.25, 0.5, 1.0), (0.0, *(2.0**k for k in range(-6, 1)))
OFFSETS = torch.arange(-8, 9) / 2
PLAIN = NewClasses(text=1.0, scale=1.0, strength=0.95, gain=0.7)
CENTERED = replace(PLAIN, scale=2.0**-4, gain=1.0)  # the same where a center has taken off what all images share
TEXTS = replace(MODELS[0], text=1.0, scale=0.0)
WARMTHS = tuple(2.0**k for k in range(-4, 3))  # by which rules are multiplied to be compared,
FINER = tuple(2.0 ** (k / 4) for k in range(-3, 4))  # and by which the one that is taken
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
    middle_NK: Tensor | None = None  # what the tower's middle says of the classes that stayed

    @property
    def new_N(self) -> Tensor:
        """Whether an image is of a class left out."""
        return self.labels_N >= self.stayed


@one_thread()
def choose_unseen(
    x_NE: Tensor, labels_N: Tensor, t_CE: Tensor, logit_scale: float, seed: int = 1, middle: Read | None = None,
    center: float = 0.0,
) -> tuple[Unseen | None, float, float]:  # fmt: skip
    """The numbers for features `x_NE` and the texts `t_CE` that go with them; nothing if classes are too few.

    `center` is the share of the images' mean that is taken off before they meet texts.

    And how much of the middle's scores, where a head reads it, counts for whether an image is of a known class, and the
    offset for those who do not read it.
    """
    there = sorted(set(labels_N.tolist()))
    if len(there) < FEWEST:
        return None, 0.0, 0.0
    folds = _folds(x_NE.double(), labels_N, t_CE.double(), logit_scale, there, seed, middle, center)
    # Fewer than four shots leave none of the known classes' to ask about: whether it is one of them, the texts say.
    alike = all(fold.new_N.all() for fold in folds)
    among, offset = (TEXTS, 0.0) if alike else _among(folds)
    weight, beside = (0.0, offset) if alike or middle is None else _known(among, folds)
    alone = _warmed(CENTERED if center else PLAIN, folds)
    for other in (_warmed(TEXTS, folds), _warmed(among, folds)) if len(there) >= FEW else ():
        gain_C = other[1] - alone[1]
        if gain_C.mean() > CLEAR * gain_C.std() / sqrt(len(gain_C)):
            alone = other
    alone = _warmed(alone[0], folds, FINER)
    return Unseen(alone=alone[0], among=among, offset=beside), weight, offset


def _among(folds: Sequence[Fold]) -> tuple[NewClasses, float]:
    """The rule and the offset by which all images, of known classes and of new ones, are most likely what they are."""
    counts = [sum(int((fold.new_N == new).sum()) for fold in folds) for new in (False, True)]

    def of(fold: Fold) -> Tensor:
        """What a fold says of every point of the grid."""
        weight_N = torch.where(fold.new_N, 1 / counts[1], 1 / counts[0])
        shift_O11 = weight_N[~fold.new_N].sum() * OFFSETS[:, None, None]
        parts, found = (slice(fold.stayed), slice(fold.stayed, None), fold.labels_N), []
        texts = [_Weighted.of(fold.texts_NC, part, MIXED_TEXTS) for part in parts]
        for scores_NC in fold.scores_MNC:
            scores = (_Weighted.of(scores_NC, part, MIXED_SCALES) for part in parts)
            known_NTS, new_NTS, true_NTS = (one.mixed(other) for one, other in zip(texts, scores, strict=True))
            lead_NTS, below_NTS = ((each - new_NTS).float() for each in (known_NTS, true_NTS))
            logp_NOTS = below_NTS[:, None] - F.softplus(lead_NTS[:, None] + OFFSETS[:, None, None])
            found.append(torch.tensordot(weight_N, logp_NOTS, 1) + shift_O11)
        return torch.stack(found, 1)

    likely_OMTS = torch.stack(side_by_side(of, folds)).sum(0)
    likely_OMTS[..., 0, 0] = -torch.inf  # says nothing
    o, m, t, s = (int(k) for k in np.unravel_index(int(likely_OMTS.argmax()), likely_OMTS.shape))
    return replace(MODELS[m], text=MIXED_TEXTS[t], scale=MIXED_SCALES[s]), OFFSETS[o].item()


@dataclass(frozen=True)
class _Weighted:
    """e to the logits of some classes by every weight, and the logarithm that all of an image's are divided by.

    Sums of products of powers are products of two matrices. No sum is 0 in float64: the class with the highest score
    has a text within twice CLIP's logit scale of the others'.
    """

    e_NWC: Tensor
    most_NW: Tensor

    @classmethod
    def of(cls, logits_NC: Tensor, some: slice | Tensor, weights: Sequence[float]) -> "_Weighted":
        """Of the classes in a slice, or of one for each image."""
        some_NC = (logits_NC[:, some] if isinstance(some, slice) else logits_NC.gather(1, some[:, None])).double()
        most_N1, weights_W = some_NC.amax(1, keepdim=True), torch.tensor(weights).double()
        return cls((weights_W[:, None] * (some_NC - most_N1)[:, None]).exp(), weights_W * most_N1)

    def mixed(self, other: "_Weighted") -> Tensor:
        """Logsumexp over the classes, of every sum of a weight's logits and one of the other's, (N, W, V)."""
        return (self.e_NWC @ other.e_NWC.mT).log() + self.most_NW[..., None] + other.most_NW[:, None]


def _known(rule: NewClasses, folds: Sequence[Fold]) -> tuple[float, float]:
    """The weight of the middle's scores and the offset that tell known classes from new ones best by the rule."""
    model, likely_AO = _model(rule), torch.zeros(len(AMONG), len(OFFSETS))
    counts = [sum(int((fold.new_N == new).sum()) for fold in folds) for new in (False, True)]
    for fold in folds:
        assert fold.middle_NK is not None
        logits_NC = rule.text * fold.texts_NC + rule.scale * fold.scores_MNC[model]
        new_N, stayed_NK = logits_NC[:, fold.stayed :].logsumexp(-1), logits_NC[:, : fold.stayed]
        known_AN = torch.stack([(stayed_NK + weight * fold.middle_NK).logsumexp(-1) for weight in AMONG])
        lead_AON = known_AN[:, None] + OFFSETS[:, None] - new_N
        logp_AON = F.logsigmoid(torch.where(fold.new_N, -lead_AON, lead_AON))
        likely_AO += logp_AON @ torch.where(fold.new_N, 1 / counts[1], 1 / counts[0])
    a, o = divmod(int(likely_AO.argmax()), len(OFFSETS))
    return AMONG[a], OFFSETS[o].item()


def _model(rule: NewClasses) -> int:
    return MODELS.index(replace(rule, text=MODELS[0].text, scale=MODELS[0].scale))


def _warmed(rule: NewClasses, folds: Sequence[Fold], warmths: Sequence[float] = WARMTHS) -> tuple[NewClasses, Tensor]:
    """The rule at its best warmth for classes left out among themselves, and how likely it makes each of them, (C,)."""
    model, asked = _model(rule), []
    for fold in folds:
        logits_NC = rule.text * fold.texts_NC + rule.scale * fold.scores_MNC[model]
        asked.append((logits_NC[fold.new_N, fold.stayed :], (fold.labels_N[fold.new_N] - fold.stayed)[:, None]))
    class_N = torch.cat([fold.class_N[fold.new_N] for fold in folds])
    count_C = class_N.bincount()
    there_C = count_C > 0

    def likely(warmth: float) -> Tensor:
        logp_N = torch.cat([(warmth * x_NC).log_softmax(-1).gather(-1, label_N1)[:, 0] for x_NC, label_N1 in asked])
        sum_C = torch.zeros(len(count_C)).index_add(0, class_N, logp_N)
        return sum_C[there_C] / count_C[there_C]

    best, likely_C = max(((w, likely(w)) for w in warmths), key=lambda found: found[1].mean().item())
    return replace(rule, text=best * rule.text, scale=best * rule.scale), likely_C


# Classes that stay and that are left out; of images that are fitted and asked for, where they are and their columns.
Drawn = tuple[list[int], list[int], list[tuple[int, int]], list[tuple[int, int]]]


def _folds(
    x_NE: Tensor, labels_N: Tensor, t_CE: Tensor, logit_scale: float, there: Sequence[int], seed: int,
    middle: Read | None, center: float = 0.0,
) -> list[Fold]:  # fmt: skip
    drawn: list[Drawn] = []
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
            drawn.append((stay, left, fitted, asked))

    def fold(one: Drawn) -> Fold:
        stay, left, fitted, asked = one
        rows_N, fit_N = torch.tensor(fitted).T
        kept = Discriminant.of(x_NE[rows_N], fit_N, len(stay)).kept()
        read = middle and Discriminant.of(middle[0][rows_N], fit_N, len(stay)).solution(middle[1])
        rows_N, asked_N = torch.tensor(asked).T
        by_means = []
        for gain, handed in MEANS:
            new_CE = means_of(kept, t_CE[stay], t_CE[left], NewClasses(gain=gain, handed=handed))
            by_means.append(kept.scores(x_NE[rows_N], torch.cat([kept.means_CE, new_CE]), STRENGTHS).float())
        scores_MNC = torch.stack(by_means, 1).flatten(0, 1)
        texts_NC = logit_scale * (x_NE[rows_N] - center * kept.center_E) @ t_CE[[*stay, *left]].T
        middle_NK = None
        if middle and read:
            middle_NK = (middle[0][rows_N].double() @ read[0].T + read[1]).float()
        return Fold(labels_N[rows_N], asked_N, len(stay), texts_NC.float(), scores_MNC, middle_NK)

    return side_by_side(fold, drawn)


def _some(asked: list[tuple[int, int]], most: int, rng: random.Random) -> list[tuple[int, int]]:
    """So many of them at most."""
    return rng.sample(asked, min(len(asked), most))
