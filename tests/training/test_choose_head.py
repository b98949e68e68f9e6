"""How `fit` chooses a head: on shots that were held out, towards what is simple, and never for the worse."""

import json
import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip import PerlclipError, Recipe
from perlclip.data.toybox import load_toybox
from perlclip.training.choose_head import SHARES, STRENGTHS, HeldOut, choose, choose_head
from tests.cli.test_cli import run

QUICK = Recipe(lr=1e-3, epochs=1, crop_scale=(0.5, 1.0))


def answers(labels_N: torch.Tensor, share: float, classes: int = 4, sure: float = 6.0) -> torch.Tensor:
    """Logits that name the true class for so many of the images, and the next one for the others."""
    wrong_N = torch.arange(len(labels_N)) >= share * len(labels_N)
    return sure * F.one_hot((labels_N + wrong_N) % classes, classes).float()


def held_out(zero: float, adapted: float, head: float, images: int = 80) -> HeldOut:
    labels_N = torch.arange(images) % 4
    scores_NC = answers(labels_N, head, sure=0.9)
    return HeldOut(
        labels_N=labels_N,
        zero_NC=answers(labels_N, zero),
        adapted_NC=answers(labels_N, adapted),
        scores_LNC=scores_NC.expand(len(STRENGTHS), -1, -1),
    )


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.5, 0.9, 0.3), "adapted"),
        ((0.9, 0.5, 0.3), "zero-shot"),
        ((0.5, 0.6, 1.0), "adapted + head"),
        ((0.6, 0.3, 1.0), "adapted + head"),
        ((1.0, 1.0, 0.25), "adapted"),
    ],
)
def test_what_is_better_on_shots_held_out_is_taken(shares, words):
    choice = choose(held_out(*shares), SHARES, "rehearsal")
    assert choice.answer == words
    assert choice.chosen == pytest.approx(100 * max(shares))
    assert (choice.zero_shot, choice.adapted) == pytest.approx((100 * shares[0], 100 * shares[1]))
    if words == "zero-shot":
        assert "zero-shot is better: nothing adapted" in choice.sentence and (choice.share, choice.scale) == (0, 0)


def test_a_difference_within_the_noise_keeps_what_was_adapted():
    """One image of twelve more does not make zero-shot the answer."""
    assert choose(held_out(8 / 12, 7 / 12, 0.0, images=12), SHARES, "rehearsal").share == 1


def test_texts_that_are_too_sure_of_themselves_are_weighed_down():
    held = held_out(0.7, 0.7, 0.95)
    sure = choose(replace(held, zero_NC=100 * held.zero_NC, adapted_NC=100 * held.adapted_NC), (1.0,), "")
    assert sure.chosen >= 95 and sure.text < 0.1


@pytest.fixture(scope="module")
def noisy():
    data = load_toybox("noisy_shapes")
    return data.train.few_shot(4, random.Random(1)).base(), data.test.base().select(range(0, 504, 4))


def test_ridge_regression_beside_zero_shot_gains_and_knows_nothing_of_new_classes(tiny, noisy):
    train, test = noisy
    fits = {name: perlclip.fit(perlclip.create_method(name, tiny), train) for name in ("ridge", "zero-shot")}
    assert fits["ridge"].head.as_json() == fits["zero-shot"].head.as_json() and not fits["ridge"].losses
    accuracy = {head: perlclip.evaluate(fits["ridge"], test, head=head, progress=False).accuracy for head in (True, False)}
    assert accuracy[True] > accuracy[False] + 3
    new = load_toybox("noisy_shapes").test.novel().select(range(0, 504, 20))
    with_head, without = (
        perlclip.evaluate(fits["ridge"], new, head=head, progress=False).probabilities_BC for head in (True, False)
    )
    assert torch.equal(with_head, without)
    assert fits["ridge"].training["head"]["how"] == "each left out"


def test_leaving_each_out_is_what_refitting_says(tiny, noisy):
    """The accuracy that is reported is that of fits without the image in question."""
    train, _ = noisy
    method = perlclip.create_method("zero-shot", tiny)
    head, choice = choose_head(method, train)
    right = 0
    for i in range(0, len(train), 4):
        rest = perlclip.fit(method, train.select(j for j in range(len(train)) if j != i))
        moved = replace(rest.head, **{name: getattr(head, name) for name in ("text", "scale", "strength")})
        from perlclip.heads.head import make_head
        from perlclip.heads.regression import Ridge

        del moved
        others = [j for j in range(len(train)) if j != i]
        v_NE = embeddings(tiny, train)
        solved = Ridge.of(v_NE[others], torch.tensor(train.labels)[others], len(train.class_names)).solution(head.strength)
        alone = make_head(train.class_names, solved, text=head.text, scale=head.scale)
        right += perlclip.Classifier(replace(rest, head=alone)).predict(train.images[i]).label == "x"
    assert choice.images == len(train)
