"""Which labels are wrong, and what would be right: from answers to each image that its own label has no say in.

Ridge regression on frozen features is asked about each image without it, which is exact in closed form, and mixed with
what the class texts say, so that the labels are most probable. That is p(c), how probable each class is for an image.
Then some share e of the labels is wrong, and those are spread evenly over the other classes:

    P(y) = (1 - e) p(y)^T/Z + e (1 - p(y)^T/Z) / (C - 1)

e and the sharpness T are those under which the labels are most probable (T, since answers that were fitted to some
wrong labels are not sure enough); the last term's share of P(y) is the probability that label y is wrong. Above
`SUSPECT` it is worth a look.

Labels that were mixed up with the class next to them are not spread evenly, and look like images that are hard to tell.
So a label also counts as wrong, with half of the other class's probability, where the answer, at the sharpness that
fits the labels as they are, is sure of another class (`SURE`) and the label a tenth as probable at most. docs/labels.md
has how often all this is right, and what confident learning (the rule of `cleanlab`) finds instead.

Shapes: N images, C classes, F features, L strengths, T sharpnesses.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from perlclip.heads.regression import Ridge
from perlclip.training.choose_head import IMAGES, TEXTS

SHARPNESS = tuple(2 ** (k / 4) for k in range(-24, 13))  # texts alone may be sixty times too sure
SUSPECT = 0.25  # chosen on `TUNED` of benchmarks/labels.py, for most of the wrong labels with three in four right
SURE, RATIO = 0.8, 0.1  # chosen on the same
MOST = 0.5  # of the labels may be wrong
ROUNDS = 60  # of expectation and maximisation; e is settled long before


@dataclass(frozen=True, kw_only=True)
class Doubts:
    """How probable each class is for each image by all others, the share of wrong labels, and which those are."""

    p_NC: Tensor
    share: float
    wrong_N: Tensor  # probability that the label is wrong
    likely_N: Tensor  # the most probable class that is not the label
    vouched_N: Tensor  # ridge regression's score for the class that the other images would have it in


def doubts(features_NF: Tensor, texts_NC: Tensor, labels_N: Tensor, groups_N: Tensor | None = None) -> Doubts:
    """What unit features and the logits of the class texts make of labels; a group's images are left out together."""
    logits_NC, vouched_N = left_out(features_NF, texts_NC, labels_N, groups_N)
    p_NC, share, wrong_N = mislabelled(logits_NC, labels_N)
    fitted_NC = (_most_probable(logits_NC, labels_N) * logits_NC.double()).softmax(-1)
    best_N, own_N = fitted_NC.max(1).values, fitted_NC.gather(1, labels_N[:, None])[:, 0]
    sure_N = (best_N >= SURE) & (own_N <= RATIO * best_N)
    wrong_N = torch.where(sure_N, torch.maximum(wrong_N, best_N / 2), wrong_N)
    others_NC = p_NC.scatter(1, labels_N[:, None], -1.0)
    return Doubts(p_NC=p_NC, share=share, wrong_N=wrong_N, likely_N=others_NC.argmax(1), vouched_N=vouched_N)


def left_out(features_NF: Tensor, texts_NC: Tensor, labels_N: Tensor, groups_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits of each image from texts and from ridge regression without it, (N, C), and that one's best score, (N,)."""
    groups_N = torch.arange(len(labels_N)) if groups_N is None else groups_N
    texts_NC = texts_NC.float()
    scores_LNC = Ridge.of(features_NF, labels_N, texts_NC.shape[1]).left_out(Ridge.STRENGTHS, groups_N)
    scores_NC, mixed_NC = _mixed(texts_NC, scores_LNC.float(), labels_N)
    # Without an image that is alone in its class, regression knows no such class: only the texts can say.
    others = Counter(label for label, _ in set(zip(labels_N.tolist(), groups_N.tolist(), strict=True)))
    alone_N = torch.tensor([others[label] == 1 for label in labels_N.tolist()])
    return torch.where(alone_N[:, None], texts_NC, mixed_NC), scores_NC.max(1).values


def _mixed(texts_NC: Tensor, scores_LNC: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regression's scores and their sum with the texts, under which the labels are most probable.

    Unlike a head, regression always has a say: texts alone would doubt every label of a class whose name they do not
    know.
    """
    count = len(labels_N)
    some = torch.arange(min(count, IMAGES)) * count // min(count, IMAGES)  # spread over all; the choice needs no more

    def loss(mixture: tuple[int, float, float]) -> float:
        strength, text, scale = mixture
        return F.cross_entropy(text * texts_NC[some] + scale * scores_LNC[strength, some], labels_N[some]).item()

    strength, text, scale = min(product(range(len(Ridge.STRENGTHS)), TEXTS, Ridge.SCALES[1:]), key=loss)
    return scores_LNC[strength], text * texts_NC + scale * scores_LNC[strength]


def _most_probable(logits_NC: Tensor, labels_N: Tensor) -> float:
    """The sharpness, 1 at most, under which the labels are most probable if all are right."""
    blunt = [sharp for sharp in SHARPNESS if sharp <= 1]
    return min(blunt, key=lambda sharp: F.cross_entropy(sharp * logits_NC.double(), labels_N).item())


def mislabelled(logits_NC: Tensor, labels_N: Tensor) -> tuple[Tensor, float, Tensor]:
    """Probabilities of the classes at the best sharpness, the share of wrong labels, and each one's probability."""
    others, logits_NC = max(1, logits_NC.shape[1] - 1), logits_NC.double()
    logp = [(sharp * logits_NC).log_softmax(-1).gather(-1, labels_N[:, None])[:, 0] for sharp in SHARPNESS]
    right_TN = torch.stack(logp).exp()
    even_TN = (1 - right_TN) / others
    share_T1 = torch.full((len(SHARPNESS), 1), 0.1, dtype=torch.float64)
    for _ in range(ROUNDS):
        total_TN = (share_T1 * even_TN + (1 - share_T1) * right_TN).clamp(min=1e-300)
        wrong_TN = share_T1 * even_TN / total_TN
        share_T1 = wrong_TN.mean(1, keepdim=True).clamp(max=MOST)
    best = int(total_TN.log().mean(1).argmax())
    return (SHARPNESS[best] * logits_NC).softmax(-1), float(share_T1[best]), wrong_TN[best]
