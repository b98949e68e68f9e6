"""What training has added to the odds of the classes trained on is taken off again."""

import random
from dataclasses import replace

import pytest
import torch

import perlclip
from perlclip.data.loading import fixed_views
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.text.classes import Classes
from perlclip.training import choose_head as choosing
from perlclip.training.added_odds import added_odds
from perlclip.training.shots import center_of, look_at
from perlclip.trust.rejection import free_words
from tests.common import UNSEEN, check_early_stops, gaussian_head, loud

OWN = dict(readout="mean", center=0.75)
ASKED = replace(UNSEEN, among=replace(UNSEEN.among, text=1.0))


@pytest.fixture(scope="module")
def shots():
    return load_toybox("faint_toys").train.few_shot(4, random.Random(1)).base()


def shown(tiny, shots, name: str = "perl", **settings):
    """A method that is not as it was made, what it says about the shots, and their classes."""
    method = loud(perlclip.create_method(name, tiny, seed=2, **settings)).eval()
    if method.center:
        method.take_center(center_of(method, shots))
    state = method.class_state(shots.classes)
    return method, look_at(method, shots, state), state.classes


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(
    ("name", "settings"),
    [("perl", OWN), ("perl", {}), ("perl", dict(modalities="text", **OWN)), ("kgcoop", {})],
    ids=["strong's", "the paper's", "text alone", "kgcoop"],
)
@torch.no_grad()
def test_shots_are_as_sure_to_be_of_a_trained_class_as_with_frozen_texts(tiny, shots, name, settings, share):
    """On average, in a list with words for new classes; but not each of them, or trained texts would say nothing."""
    method, seen, classes = shown(tiny, shots, name, **settings)
    head = gaussian_head(tiny, shots.class_names, share=share, unseen=ASKED)
    gained = added_odds(method, seen, classes, head)
    words = random.Random("words 1").sample(free := free_words(tiny, classes), min(len(free), len(classes.names)))
    both = Classes((*classes.names, *words), classes.template)
    state, v_KNE, trained = method.class_state(both, novel=True), seen.v_KNE, len(classes.names)
    odds = []
    for unseen in (ASKED, replace(ASKED, gained=gained)):
        asked = Answering(method, state, replace(head, unseen=unseen))
        if name == "perl":
            p_KNC = asked.image_trajectory(v_KNE[: method.image_steps + 1]).softmax(-1)
        else:
            p_KNC = asked.logits(torch.cat([x for x, _ in fixed_views(shots, tiny.preprocess, 16, tiny.device)]))[None]
            p_KNC = p_KNC.softmax(-1)
        odds.append((p_KNC[..., :trained].sum(-1) / p_KNC[..., trained:].sum(-1)).log())
    assert len(gained) == (method.image_steps or 0) + 1 and abs(gained[-1]) > 0.02
    torch.testing.assert_close(odds[1].mean(1), odds[0].mean(1), atol=1e-3, rtol=1e-3)
    assert (odds[1] - odds[0])[-1].abs().max() > 0.05
    if name == "perl" and settings == OWN and share == 1.0:
        assert gained[0] == pytest.approx(0, abs=1e-4)  # before the first thought both are the centered frozen CLIP
        torch.testing.assert_close(odds[1][0], odds[0][0], atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_what_is_taken_off_is_that_of_the_steps_taken(tiny, shots):
    """However the answer is made: of all steps, or of images that stop early."""
    method, *_ = shown(tiny, shots, **OWN)
    head = gaussian_head(tiny, shots.class_names, unseen=replace(ASKED, gained=(0.0, 3.0, -3.0, 0.5, 1.0)))
    names = (*shots.class_names[:3], "boat", "sky")
    asked = Answering(method, method.class_state(Classes(names), novel=True), head)
    pixels = next(iter(fixed_views(shots, tiny.preprocess, 6, tiny.device)))[0]
    check_early_stops(asked, pixels)
    torch.testing.assert_close(
        asked.trajectory(pixels), asked.image_trajectory(method.encode_image_steps(pixels)), atol=1e-4, rtol=1e-4
    )


def test_frozen_texts_do_where_nothing_was_trained_or_asked(tiny, shots):
    method, seen, classes = shown(tiny, shots, **OWN)
    head = gaussian_head(tiny, shots.class_names)
    silent = replace(UNSEEN, among=replace(UNSEEN.among, text=0.0))
    for other in (dict(share=0.0), dict(unseen=None), dict(unseen=silent)):
        assert added_odds(method, seen, classes, replace(head, **other)) == ()
    sentences = Classes(classes.names, "{}", tuple(f"there is a {name}" for name in classes.names))
    assert added_odds(method, seen, sentences, head) == ()
    for name in ("zero-shot", "gaussian", "mma", "cocoop"):
        assert added_odds(*shown(tiny, shots, name), head) == ()
    few = shots.select([places[i] for places in shots.by_class().values() for i in range(3)])
    assert added_odds(*shown(tiny, few, **OWN), head) == ()


def test_a_head_keeps_it(tiny, shots, monkeypatch):
    method, seen, _ = shown(tiny, shots, **OWN)
    monkeypatch.setattr(choosing, "choose_unseen", lambda *_: (UNSEEN, 0.0, 0.0))
    head, *_ = choosing.choose_head(method, shots, seen=seen)
    assert head.unseen == replace(UNSEEN, gained=added_odds(method, seen, shots.classes, head))
    assert len(head.unseen.gained) == 5
