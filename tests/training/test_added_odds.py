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
from tests.common import UNSEEN, gaussian_head, loud

OWN = dict(readout="mean", center=0.75)
ASKED = replace(UNSEEN, among=replace(UNSEEN.among, text=1.0))


@pytest.fixture(scope="module")
def shots():
    return load_toybox("faint_toys").train.few_shot(2, random.Random(1)).base()


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
    odds = []
    for unseen in (ASKED, replace(ASKED, gained=gained)):
        asked = Answering(method, method.class_state(both, novel=True), replace(head, unseen=unseen))
        views = fixed_views(shots, tiny.preprocess, 16, tiny.device)
        p_NC = torch.cat([asked.logits(pixels) for pixels, _ in views]).softmax(-1)
        odds.append((p_NC[:, : len(classes.names)].sum(-1) / p_NC[:, len(classes.names) :].sum(-1)).log())
    assert abs(gained) > 0.02 and odds[1].mean().item() == pytest.approx(odds[0].mean().item(), abs=1e-3)
    assert (odds[1] - odds[0]).abs().max() > 0.05


def test_frozen_texts_do_where_nothing_was_trained_or_asked(tiny, shots):
    method, seen, classes = shown(tiny, shots, **OWN)
    head = gaussian_head(tiny, shots.class_names)
    silent = replace(UNSEEN, among=replace(UNSEEN.among, text=0.0))
    for other in (dict(share=0.0), dict(unseen=None), dict(unseen=silent)):
        assert added_odds(method, seen, classes, replace(head, **other)) is None
    sentences = Classes(classes.names, "{}", tuple(f"there is a {name}" for name in classes.names))
    assert added_odds(method, seen, sentences, head) is None
    for name in ("zero-shot", "gaussian", "mma", "cocoop"):
        assert added_odds(*shown(tiny, shots, name), head) is None


def test_a_head_keeps_it(tiny, shots, monkeypatch):
    method, seen, _ = shown(tiny, shots, **OWN)
    monkeypatch.setattr(choosing, "choose_unseen", lambda *_: (UNSEEN, 0.0, 0.0))
    head, *_ = choosing.choose_head(method, shots, seen=seen)
    assert head.unseen == replace(UNSEEN, gained=added_odds(method, seen, shots.classes, head))
    assert head.unseen.gained is not None
