"""`choose_head`: the head of what was trained, and how it is mixed with the texts' answer, from the shots alone.

Four numbers are chosen on shots that the answer in question has not seen: the head's strength, the weights of texts and
head in the sum, and the share of the adapted answer against zero-shot's. Where nothing but the head is trained, each
shot in turn is left out, which is exact and costs no other fit. A trained method has seen its shots, and its
answers to them are too good; so training is *rehearsed* on three quarters of them, and the rest is looked at; with
fewer shots several times, each time without others. Of one shot of each class none can be left out: the numbers are
fixed, and only the share is chosen, by what training on half of the classes does to the answers about the other half.
What the image tower's middle adds (`heads.middle`) is chosen on top of that, on the same shots; what is said about
classes that were not trained on, with classes left out (`choose_unseen`).

The measure is the mean log-probability of the true class. The share is chosen first, by the texts alone: it is also
what new classes are answered with, and the head must not hide there that adapting has hurt. Where the texts alone are
clearly more often right, by a standard error, the head is silent about the classes trained on. docs/strong.md has the
measurements behind this.

Shapes: N images, C classes, E embedding width, L strengths, S scales, G points of the grid.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import log2, sqrt
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from perlclip.backbone import PLAIN
from perlclip.data.sets import ImageSet
from perlclip.heads.discriminant import Discriminant
from perlclip.heads.head import Head, make_head
from perlclip.heads.middle import Middle
from perlclip.heads.regression import Ridge
from perlclip.heads.unseen import Unseen
from perlclip.methods.base import ClassState, Method
from perlclip.methods.seeding import Seeded
from perlclip.threads import one_thread
from perlclip.training.added_odds import added_odds
from perlclip.training.choose_unseen import FEWEST, choose_unseen
from perlclip.training.shots import FEATURES, Seen, look_at
from perlclip.trust.rejection import class_means

HEADS: dict[str, type[Ridge] | type[Discriminant]] = {"ridge": Ridge, "discriminant": Discriminant}
TEXTS = tuple(2.0**k for k in range(-6, 1))
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
STRENGTH = 0.5  # of a middle that says nothing
MIDDLES = (0.0, *(2.0**k for k in range(-13, 0)))  # weights of its scores: shots differ less there
BESIDE = (1.0, 0.7, 0.5, 0.35)  # how much of the rest is left beside what the middle adds
CLEAR = 1.0  # standard errors of a difference by which accuracy overrules
PART, REHEARSED = 4, 16  # a rehearsal holds out one shot of so many; up to so many shots are trained on in rehearsals
IMAGES = 500  # at most, to choose on
FEW, PULL = 5, 0.25  # with fewer shots of a class Gaussians' numbers stay near `FIXED`: nats for a doubling, squared

Train = Callable[[Method, ImageSet], None]


class Mixture(NamedTuple):
    """How much of the texts' answer is the adapted one; the rest is zero-shot's, as it is or centered, too."""

    share: float
    centered: bool = False


ZERO_SHOT, CENTERED_ZERO_SHOT, ADAPTED = Mixture(0.0), Mixture(0.0, True), Mixture(1.0)


@dataclass(frozen=True, kw_only=True)
class Said:
    """What zero-shot CLIP, the method's texts and a head of each strength say about images left out."""

    labels_N: Tensor
    zero_NC: Tensor
    adapted_NC: Tensor
    scores_LNC: Tensor
    centered_NC: Tensor | None = None  # zero-shot's answers centered as the method's are, where it is centered
    middle_LNC: Tensor | None = None  # the same of the tower's middle
    solver: type[Ridge] | type[Discriminant] = Ridge

    def some(self, most: int) -> Self:
        """So many of the images, spread over all."""
        return replace(self, **self.of(torch.tensor(_spread(len(self.labels_N), most))))

    def of(self, place: Tensor | slice) -> dict[str, Any]:
        """The fields that have something for each image, for some of them."""
        middle_LNC = None if self.middle_LNC is None else self.middle_LNC[:, place]
        return {**_texts(self, place), "scores_LNC": self.scores_LNC[:, place], "middle_LNC": middle_LNC}

    def texts(self, mixture: Mixture, adapted_NC: Tensor | None = None) -> Tensor:
        """So much of the adapted answer, the rest of zero-shot's, (N, C)."""
        adapted_NC = self.adapted_NC if adapted_NC is None else adapted_NC
        frozen_NC = self.centered_NC if mixture.centered and self.centered_NC is not None else self.zero_NC
        return (mixture.share * adapted_NC + (1 - mixture.share) * frozen_NC).float()

    def answers(self, choice: "Choice") -> tuple[Tensor, Tensor]:
        """The logits of what was chosen, and those of its texts alone, (N, C) both."""
        return self._mixed(self.adapted_NC, choice)

    def _mixed(self, adapted_NC: Tensor, choice: "Choice") -> tuple[Tensor, Tensor]:
        texts_NC = self.texts(Mixture(choice.share, choice.centered), adapted_NC)
        scores_NC = self.scores_LNC[self.solver.STRENGTHS.index(choice.strength)]
        both_NC = choice.text * texts_NC + choice.scale * scores_NC
        if choice.middle and self.middle_LNC is not None:
            both_NC = both_NC + choice.middle * self.middle_LNC[Discriminant.STRENGTHS.index(choice.middle_strength)]
        return both_NC, texts_NC


@dataclass(frozen=True, kw_only=True)
class HeldOut(Said):
    """The same of shots, and where they are."""

    v0_NE: Tensor  # their embeddings by the frozen CLIP
    near_N: Tensor  # how near they are to the mean of a class's shots, themselves left out
    means_CE: Tensor  # these means, of all shots
    cosines_NC: Tensor | None = None  # the method's scores of each class by itself, if they are not `adapted_NC`

    def scores(self, choice: "Choice") -> tuple[Tensor, Tensor]:
        """`answers` before any softmax."""
        return self._mixed(self.adapted_NC if self.cosines_NC is None else self.cosines_NC, choice)

    def of(self, place: Tensor | slice) -> dict[str, Any]:
        """The same with what there is more."""
        cosines = {} if self.cosines_NC is None else {"cosines_NC": self.cosines_NC[place]}
        return {**super().of(place), "v0_NE": self.v0_NE[place], "near_N": self.near_N[place], **cosines}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The numbers chosen, how, and what they and the answers without a head did on the shots held out, in percent."""

    strength: float
    text: float
    scale: float
    share: float
    how: str
    centered: bool = False  # whether zero-shot's part is, too
    middle: float = 0.0  # scale of what the tower's middle adds, and how far its covariance is pulled
    middle_strength: float = STRENGTH
    beside: float = 1.0  # how much of the rest is left beside it; in `text` and `scale` already
    trained: bool = True  # whether there is anything adapted but the head
    lensed: bool = False  # whether all of it, zero-shot too, looks through a lens
    unseen: Unseen | None = None
    ruled: bool = False  # whether that is as sure as it should be: chosen on features that training does not change
    images: int = 0
    zero_shot: float | None = None
    centered_zero_shot: float | None = None  # where the method is centered
    adapted: float | None = None
    chosen: float | None = None

    @property
    def answer(self) -> str:
        """What the adapter answers with, in words."""
        nothing = "centered zero-shot" if self.centered else "zero-shot"
        whole = {1.0: "adapted" if self.trained else "zero-shot", 0.0: nothing}
        texts = whole.get(self.share, f"{self.share:g} adapted, {1 - self.share:g} {nothing}")
        return f"{texts} + head" if self.scale or self.middle else texts

    @property
    def sentence(self) -> str:
        """For the screen."""
        if self.zero_shot is None:
            return f"too few shots to hold any out; the adapter answers with: {self.answer}"
        adapted = f", adapted {self.adapted:.1f} %" if self.trained else ""
        if self.centered_zero_shot is not None:
            adapted = f", centered {self.centered_zero_shot:.1f} %{adapted}"
        looked = " through the lens" * self.lensed
        if self.chosen is None:
            asked = f"accuracy on {self.images} shots when training left out their classes: zero-shot{looked}"
            return f"{asked} {self.zero_shot:.1f} %{adapted}; the adapter answers with: {self.answer}"
        both = f", {self.answer} {self.chosen:.1f} %" if self.answer not in ("zero-shot", "adapted") else ""
        ending = "zero-shot is better: nothing adapted" if self.answer == "zero-shot" and self.trained else self.answer
        seen = f"held-out accuracy on {self.images} shots ({self.how}): zero-shot{looked} {self.zero_shot:.1f} %"
        return f"{seen}{adapted}{both}; the adapter answers with: {ending}"

    def record(self) -> dict[str, Any]:
        """For the training record; the numbers themselves are the head's."""
        measured = {
            "zero-shot": self.zero_shot,
            "centered zero-shot": self.centered_zero_shot,
            "adapted": self.adapted if self.trained else None,
            "chosen": self.chosen,
        }
        accuracy = {key: round(value, 2) for key, value in measured.items() if value is not None}
        return {"answer": self.answer, "how": self.how, "images": self.images, "accuracy": accuracy}


# With one shot: better than zero-shot on average, on drawn sets and on photographs (docs/strong.md).
FIXED = {
    Ridge: Choice(strength=1.0, text=1.0, scale=16.0, share=1.0, how="fixed"),
    Discriminant: Choice(strength=0.5, text=1.0, scale=2.0**-8, middle=2.0**-10, share=1.0, how="fixed"),
}


def choose_head(
    method: Method,
    train_set: ImageSet,
    *,
    train: Train | None = None,
    state: ClassState | None = None,
    seen: Seen | None = None,
    seed: int = 1,
    workers: int = 0,
) -> tuple[Head | None, Choice, HeldOut | None]:
    """The head of a trained method, how it was chosen, and the shots held out for that, if any were.

    There is no head where the method's own answer is as good.

    `train` trains a fresh method of the same kind as this one was trained; without it there is no rehearsal, and the
    shots' own text answers are taken for what they are. `state` is that of the images' classes, `seen` what the method
    says about them, if it was asked already.
    """
    state = state or method.class_state(train_set.classes)
    seen = seen or look_at(method, train_set, state, workers)
    solver = HEADS[method.head_by]
    fitted = solver.of(seen.features_NF, seen.labels_N, len(train_set.class_names))
    looked = None
    if solver is Discriminant and seen.middle_NF is not None:
        looked = Discriminant.of(seen.middle_NF, seen.labels_N, len(train_set.class_names))
    splits = list(_splits(train_set, seed))
    rehearse = train if method.num_trainable > 0 else None
    held: HeldOut | None = None
    means_CE, near_N = class_means(seen.v0_NE, seen.labels_N, len(train_set.class_names))
    if not splits:
        choice = FIXED[solver]
        if rehearse and len(train_set.by_class()) >= FEWEST:
            choice = _between_classes(choice, method, train_set, rehearse, seed, workers)
    else:
        # No more are left out than are looked at.
        several = [i for places in _several(train_set) for i in places]
        left_out = [sorted(several)[i] for i in _spread(len(several), IMAGES)]
        asked = [i for split in splits for i in split] if rehearse else left_out
        few = solver is Discriminant and train_set.shots_each < FEW

        def without(places: Sequence[int]) -> dict[str, Any]:
            """What is said about shots of these places, each left out."""
            asked_n, each_n = torch.tensor(places), torch.arange(len(places))
            scores = (each and each.left_out(each.STRENGTHS, each_n, asked_n) for each in (fitted, looked))
            return {
                **_texts(seen, asked_n),
                **dict(zip(("scores_LNC", "middle_LNC"), scores, strict=True)),
                "solver": solver,
            }

        asked_n = torch.tensor(asked)
        alone = HeldOut(
            **without(asked), v0_NE=seen.v0_NE[asked_n], near_N=near_N[asked_n], means_CE=means_CE,
            cosines_NC=seen.cosines_NC[asked_n],
        )  # fmt: skip
        if rehearse is None:
            choice = choose(alone, (1.0,), "each left out", few=few)
            held = None if method.num_trainable else alone  # what it was trained on was not held out
        else:
            how = method, train_set, rehearse, state, seen.frozen, seed, workers
            starts = accumulate(map(len, splits), initial=0)
            parts = (replace(alone, **alone.of(slice(a, b))) for a, b in pairwise(starts))
            held = _join([_rehearsed(split, part, *how) for split, part in zip(splits, parts, strict=True)])
            every = Said(**without(left_out)) if seen.frozen and len(asked) < len(left_out) else None
            choice = choose(held, SHARES, "rehearsal", every, few=few)
    unseen, among, offset = None, 0.0, 0.0
    if solver is Discriminant:
        read = (seen.middle_NF, choice.middle_strength) if choice.middle and seen.middle_NF is not None else None
        scale = method.backbone.logit_scale
        unseen, among, offset = choose_unseen(
            seen.features_NF, seen.labels_N, seen.texts_CE, scale, seed, read, method.center
        )
    ruled = unseen is not None and unseen.among.scale > 0 and seen.frozen
    trained, lensed = method.num_trainable > 0, method.config.lens != PLAIN
    choice = replace(choice, trained=trained, lensed=lensed, unseen=unseen, ruled=ruled)
    head = make_head(
        train_set.class_names, fitted.kept() if isinstance(fitted, Discriminant) else fitted.solution(choice.strength),
        strength=choice.strength, text=choice.text, scale=choice.scale,
        share=choice.share, centered=choice.centered, features=FEATURES, unseen=unseen,
        middle=looked and _middle(method, looked, choice, among, offset),
    )  # fmt: skip
    gained = added_odds(method, seen, state.classes, head, seed)
    if unseen is not None and gained:
        head = replace(head, unseen=replace(unseen, gained=gained))
    return None if head.idle else head, choice, held and held.some(IMAGES)


def _texts(said: Seen | Said, place: Tensor | slice = slice(None)) -> dict[str, Any]:
    """What texts say about some of the images."""
    centered_NC = None if said.centered_NC is None else said.centered_NC[place]
    return {
        "labels_N": said.labels_N[place], "zero_NC": said.zero_NC[place],
        "centered_NC": centered_NC, "adapted_NC": said.adapted_NC[place],
    }  # fmt: skip


def _middle(method: Method, looked: Discriminant, choice: Choice, among: float, offset: float) -> Middle | None:
    """What the tower's middle adds, as it was chosen; one class alone has nothing to be told from."""
    solution = looked.solution(choice.middle_strength)
    if not choice.middle or not solution[0].any():
        return None
    numbers = {"among": among / choice.middle, "beside": choice.beside, "offset": offset}
    return Middle.of(method.backbone.vision.middle, solution, choice.middle, **numbers)


@one_thread()
def choose(held: Said, shares: Sequence[float], how: str, every: Said | None = None, *, few: bool = False) -> Choice:
    """The numbers for what was held out; `every`: all shots, each left out, where only some were in a rehearsal.

    Of so many numbers some do well on a `few` shots by chance: there they are held to those fixed for one shot.
    """
    held = held.some(IMAGES)
    labels_N, count = held.labels_N, len(held.labels_N)
    mixture = _best_mixture([held], shares)
    texts_NC = held.texts(mixture)
    parts = [_Part(held, texts_NC)]
    if every is not None:
        parts += [_Part(held, held.zero_NC.float(), -1.0), _Part(every, every.zero_NC.float())]
    scales, fixed = held.solver.SCALES, FIXED[held.solver]
    pull = PULL / len(parts[-1].said.labels_N) if few else 0.0
    grid = list(product(range(len(held.solver.STRENGTHS)), TEXTS))
    likely_GS = torch.stack([_likely(parts, [part.sums(*point, scales) for part in parts]) for point in grid])
    text_G1 = _doublings([text for _, text in grid], fixed.text)[:, None]
    at, s = divmod(int((likely_GS - pull * (text_G1 + _doublings(scales, fixed.scale))).argmax()), len(scales))
    (place, text), scale = grid[at], scales[s]
    sums = [part.sums(place, text, (scale,))[0] for part in parts]
    alone_N, chosen_N, more = texts_NC.argmax(-1) == labels_N, sums[0].argmax(-1) == labels_N, Beyond()
    if held.middle_LNC is not None:
        more, chosen_N = _choose_middle(parts, sums, pull)
    if not (scale or more.scale) or _clearly_better(alone_N, chosen_N):
        text, scale, chosen_N, more = 1.0, 0.0, alone_N, Beyond()  # texts alone keep their own scale
    return Choice(
        strength=held.solver.STRENGTHS[place], text=more.beside * text, scale=more.beside * scale, share=mixture.share,
        centered=mixture.centered, how=how, images=count,
        beside=more.beside, middle=more.scale, middle_strength=more.strength,
        chosen=_percent(chosen_N), **_alone([held]),
    )  # fmt: skip


def _best_mixture(asked: Sequence[Said], shares: Sequence[float]) -> Mixture:
    """By the texts alone, each mixture at its best temperature: not the surer, the better."""

    def likely(mixture: Mixture) -> float:
        by_text = ([logp_of(text * each.texts(mixture), each.labels_N) for each in asked] for text in TEXTS)
        return max(torch.cat(logp).mean().item() for logp in by_text)

    centered = all(each.centered_NC is not None for each in asked)
    mixtures = [Mixture(share, centered and share < 1) for share in shares]
    if 0.0 not in shares:
        return max(mixtures, key=likely)
    best = max([*mixtures, ZERO_SHOT], key=likely)
    return ZERO_SHOT if _clearly_better(*(_right(asked, each) for each in (ZERO_SHOT, best))) else best


def _right(asked: Sequence[Said], mixture: Mixture) -> Tensor:
    """Which images' classes a mixture of the texts finds."""
    return torch.cat([each.texts(mixture).argmax(-1) == each.labels_N for each in asked])


def _alone(asked: Sequence[Said]) -> dict[str, Any]:
    """Accuracy of the texts without a head, by those who may answer."""
    centered = all(each.centered_NC is not None for each in asked)
    kinds = {"zero_shot": ZERO_SHOT, "centered_zero_shot": CENTERED_ZERO_SHOT if centered else None, "adapted": ADAPTED}
    return {name: None if mixture is None else _percent(_right(asked, mixture)) for name, mixture in kinds.items()}


def _percent(right_N: Tensor) -> float:
    return 100 * right_N.double().mean().item()


@dataclass(frozen=True)
class _Part:
    """Images that are asked, what their texts say, and how much they count.

    Only shots held out of a rehearsal have an answer of the adapted texts that can be believed. Of these alone the mean
    would be noisy, as they are a quarter; but the head's scores and zero-shot's texts are there for all shots. So how
    likely numbers make all shots with the adapted texts is estimated by a control variate: how likely they make all
    with zero-shot's texts, and by how much more the shots held out are with the adapted ones. Not centered: a rehearsal
    has another center than all shots have, and what is taken off again must be what was added.
    """

    said: Said
    texts_NC: Tensor
    weight: float = 1.0

    def sums(self, place: int, text: float, scales: Sequence[float]) -> Tensor:
        """Logits with a head of one strength, (S, N, C)."""
        return text * self.texts_NC + torch.tensor(scales)[:, None, None] * self.said.scores_LNC[place].float()


def _likely(parts: Sequence[_Part], sums: Sequence[Tensor]) -> Tensor:
    """How likely logits make the true classes, (S,), by what all parts say of it."""
    shares = [part.weight * logp_of(each, part.said.labels_N).mean(1) for part, each in zip(parts, sums, strict=True)]
    return torch.stack(shares).sum(0)


class Beyond(NamedTuple):
    """What the tower's middle adds to a sum: how much of it is left beside its scores, their scale and strength."""

    beside: float = 1.0
    scale: float = 0.0
    strength: float = STRENGTH


def _choose_middle(parts: Sequence[_Part], sums: Sequence[Tensor], pull: float) -> tuple[Beyond, Tensor]:
    """The numbers, and what of the first part is right then."""
    scales_S11, far_S = torch.tensor(MIDDLES)[:, None, None], _doublings(MIDDLES, FIXED[Discriminant].middle)
    found = []
    for place, strength in enumerate(Discriminant.STRENGTHS):
        for beside in BESIDE:
            all_sums = [
                beside * both_NC + scales_S11 * part.said.middle_LNC[place].float()
                for part, both_NC in zip(parts, sums, strict=True)
                if part.said.middle_LNC is not None
            ]
            best, at = (_likely(parts, all_sums) - pull * (far_S + log2(beside) ** 2)).max(0)
            right_N = all_sums[0][at].argmax(-1) == parts[0].said.labels_N
            found.append((best.item(), Beyond(beside, MIDDLES[int(at)], strength), right_N))
    _, numbers, right_N = max(found, key=lambda each: each[0])
    return numbers, right_N


def _doublings(numbers: Sequence[float], fixed: float) -> Tensor:
    """How far from the fixed one, squared; 0 is half of the least."""
    least = min(number for number in numbers if number)
    return torch.tensor([log2((number or least / 2) / fixed) ** 2 for number in numbers])


def logp_of(logits_XNC: Tensor, labels_N: Tensor) -> Tensor:
    """Log-probability of the true class, (X, N) or (N,)."""
    labels = labels_N.expand(logits_XNC.shape[:-1])[..., None]
    return logits_XNC.log_softmax(-1).gather(-1, labels)[..., 0]


def _clearly_better(one_N: Tensor, other_N: Tensor) -> bool:
    """More often right, by so many standard errors of the images on which they differ."""
    gain, differ = int(one_N.sum() - other_N.sum()), int((one_N != other_N).sum())
    return gain > CLEAR * sqrt(differ)


def _spread(count: int, most: int) -> list[int]:
    """So many of them at most, at even distances."""
    taken = min(count, most)
    return [i * count // taken for i in range(taken)]


def _several(train_set: ImageSet) -> list[list[int]]:
    """Positions of the images of each class that has several: with a class's only image left out, it would be gone.

    None at all where most classes have one image: a few would choose for all.
    """
    classes = list(train_set.by_class().values())
    found = [places for places in classes if len(places) > 1]
    return found if 2 * len(found) >= len(classes) else []


def _splits(train_set: ImageSet, seed: int) -> Iterator[list[int]]:
    """Positions held out of each rehearsal, as far as there are several of a class."""
    rng = random.Random(f"rehearsal {seed}")
    classes = [rng.sample(places, len(places)) for places in _several(train_set)]
    shots = max(map(len, classes), default=0)
    for turn in range(min(PART, shots, max(1, REHEARSED // max(1, shots)))):
        parts = [(places, max(1, len(places) // PART)) for places in classes]
        yield sorted(i for places, part in parts for i in places[turn * part : (turn + 1) * part])


def _rehearsed(
    split: Sequence[int], alone: HeldOut, method: Method, train_set: ImageSet, train: Train, state: ClassState,
    frozen: bool, seed: int, workers: int,
) -> HeldOut:  # fmt: skip
    """A fresh method is trained without the split's shots and asked about them.

    Features that training does not change have been left out exactly: `alone` has these scores.
    """
    held, rest = train_set.select(split), train_set.select(sorted(set(range(len(train_set))) - set(split)))
    fresh = _fresh(method, train, rest, seed)
    state = copy(state)  # what it has encoded is the trained method's
    seen = look_at(fresh, held, state, workers)
    if frozen:
        scores_LNC = alone.scores_LNC
    else:
        before = look_at(fresh, rest, state, workers)
        fitted = alone.solver.of(before.features_NF, before.labels_N, before.zero_NC.shape[1])
        solutions = [fitted.solution(strength) for strength in alone.solver.STRENGTHS]
        scores_LNC = torch.stack([seen.features_NF.double() @ weight.T + bias for weight, bias in solutions])
    return replace(
        alone,
        centered_NC=seen.centered_NC,
        adapted_NC=seen.adapted_NC,
        scores_LNC=scores_LNC,
        cosines_NC=seen.cosines_NC,
    )


def _between_classes(
    choice: Choice, method: Method, train_set: ImageSet, train: Train, seed: int, workers: int
) -> Choice:
    """The share, with one shot of each class: training that hurts classes left out is not trusted."""
    first = {label: places[0] for label, places in train_set.by_class().items()}  # some may have more than one
    there, ones = sorted(first), train_set.select(first.values())
    order, asked = random.Random(f"rehearsal {seed}").sample(there, len(there)), []
    for stay, left in ((order[::2], order[1::2]), (order[1::2], order[::2])):
        fresh = _fresh(method, train, train_set.of_classes(stay), seed)
        others = ones.of_classes(left)
        seen = look_at(fresh, others, fresh.class_state(others.classes, novel=True), workers)
        asked.append(Said(**_texts(seen), scores_LNC=seen.zero_NC.new_zeros(0)))
    share, centered = _best_mixture(asked, SHARES)
    return replace(choice, share=share, centered=centered, how="classes left out", images=len(ones), **_alone(asked))


def _fresh(method: Method, train: Train, images: ImageSet, seed: int) -> Method:
    """Another of its kind, trained on these."""
    with Seeded(seed):
        fresh = type(method)(method.backbone, method.config)
    train(fresh.to(method.backbone.device), images)
    return fresh


def _join(parts: Sequence[HeldOut]) -> HeldOut:
    firsts = [part.centered_NC for part in parts if part.centered_NC is not None]
    middles = [part.middle_LNC for part in parts if part.middle_LNC is not None]
    return HeldOut(
        labels_N=torch.cat([part.labels_N for part in parts]),
        zero_NC=torch.cat([part.zero_NC for part in parts]),
        centered_NC=torch.cat(firsts) if len(firsts) == len(parts) else None,
        adapted_NC=torch.cat([part.adapted_NC for part in parts]),
        scores_LNC=torch.cat([part.scores_LNC for part in parts], 1),
        middle_LNC=torch.cat(middles, 1) if len(middles) == len(parts) else None,
        v0_NE=torch.cat([part.v0_NE for part in parts]),
        near_N=torch.cat([part.near_N for part in parts]),
        means_CE=parts[0].means_CE,
        cosines_NC=torch.cat([part.cosines_NC for part in parts if part.cosines_NC is not None]),
        solver=parts[0].solver,
    )
