"""How `fit` chooses a head: on shots that were held out, towards what is simple, and never for the worse."""

import random
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip import PerlclipError, Recipe
from perlclip.data.toybox import load_toybox
from perlclip.heads.discriminant import Discriminant
from perlclip.heads.regression import Ridge
from perlclip.training import choose_head, loop
from perlclip.training.choose_head import FIXED, SHARES, HeldOut, Said, choose
from tests.cli.test_cli import run
from tests.test_threads import pictures

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
        scores_LNC=scores_NC.expand(len(Ridge.STRENGTHS), -1, -1),
        v0_NE=torch.zeros(images, 2),
        near_N=torch.zeros(images),
        means_CE=torch.zeros(4, 2),
    )


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((0.5, 0.9, 0.3), "adapted"),
        ((0.9, 0.5, 0.3), "zero-shot"),
        ((0.5, 0.6, 1.0), "adapted + head"),
        ((0.6, 0.3, 1.0), "zero-shot + head"),
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


@pytest.mark.parametrize(
    ("zero", "first", "adapted", "share", "centered", "words"),
    [
        (0.5, 0.9, 0.4, 0.0, True, "centered zero-shot"),
        (0.9, 0.5, 0.4, 0.0, False, "zero-shot"),
        (0.5, 0.6, 0.9, 1.0, False, "adapted"),
    ],
)
def test_zero_shot_is_asked_centered_too(zero, first, adapted, share, centered, words):
    """Where the method is centered; without it is what nothing may be worse than."""
    held = held_out(zero, adapted, 0.2)
    choice = choose(replace(held, centered_NC=answers(held.labels_N, first)), SHARES, "rehearsal")
    assert (choice.share, choice.centered, choice.answer) == (share, centered, words)
    assert choice.zero_shot == pytest.approx(100 * zero) and choice.chosen == pytest.approx(
        100 * max(zero, first, adapted)
    )
    assert choice.sentence.endswith("nothing adapted" if words == "zero-shot" else words)


def test_a_difference_within_the_noise_keeps_what_was_adapted():
    """Eight images of twelve against seven others do not make zero-shot the answer."""
    held = held_out(8 / 12, 7 / 12, 0.0, images=12)
    found = choose(replace(held, adapted_NC=held.adapted_NC.roll(4, 0)), SHARES, "rehearsal")
    assert found.zero_shot > found.adapted and found.share > 0


def test_texts_that_are_too_sure_of_themselves_are_weighed_down():
    held = held_out(0.7, 0.7, 0.95)
    sure = choose(replace(held, zero_NC=100 * held.zero_NC, adapted_NC=100 * held.adapted_NC), (1.0,), "")
    assert sure.chosen >= 95 and sure.text < 0.1


def test_numbers_are_chosen_on_all_shots_and_not_on_the_few_held_out():
    """With adapted texts as good as zero-shot's, what is chosen is what all shots choose, whatever the few say."""
    draw = torch.Generator().manual_seed(0)
    labels_N = torch.arange(160) % 4
    noise = torch.randn(3, len(Ridge.STRENGTHS), 160, 4, generator=draw)
    zero_NC = F.one_hot(labels_N, 4) + noise[0, 0]
    scores_LNC = 2.0 * F.one_hot(labels_N, 4) + torch.linspace(2, 1, len(Ridge.STRENGTHS))[:, None, None] * noise[1]
    every = Said(labels_N=labels_N, zero_NC=zero_NC, adapted_NC=zero_NC, scores_LNC=scores_LNC)
    few = replace(every, **every.of(slice(0, 24)))
    few = replace(few, scores_LNC=noise[2, :, :24])  # by chance the head knows nothing of these
    numbers = ("strength", "text", "scale")
    alone, together = choose(few, (1.0,), ""), choose(few, (1.0,), "", every)
    all_of_them = choose(every, (1.0,), "")
    assert alone.scale < all_of_them.scale
    same = replace(few, scores_LNC=scores_LNC[:, :24])
    found = choose(same, (1.0,), "", every)
    assert [getattr(found, key) for key in numbers] == [getattr(all_of_them, key) for key in numbers]
    assert together.images == 24, "what is reported was held out"
    # Also where it is centered, and not the centered one that is as good as what all shots know.
    centered = replace(same, centered_NC=noise[2, 0, :24], adapted_NC=noise[2, 1, :24])
    found = choose(centered, SHARES, "", replace(every, centered_NC=noise[2, 0]))
    assert (found.share, found.centered) == (0.0, False)
    assert [getattr(found, key) for key in numbers] == [getattr(all_of_them, key) for key in numbers]
    found = choose(same, (1.0,), "", every)
    # Adapted texts that are better than zero-shot's have more weight than zero-shot's would have.
    better = choose(replace(same, adapted_NC=9.0 * F.one_hot(labels_N[:24], 4)), (1.0,), "", every)
    assert better.text / max(better.scale, 1e-9) > found.text / found.scale


def test_a_few_shots_that_a_head_knows_by_chance_do_not_make_it_loud():
    """Scores of pure noise: the luckiest of its numbers stay near the fixed ones."""
    draw, fixed = torch.Generator().manual_seed(0), FIXED[Discriminant]
    loud = {False: [], True: []}
    for _ in range(20):
        labels_N = torch.arange(24) % 12
        zero_NC = 3.0 * F.one_hot(labels_N, 12) + torch.randn(24, 12, generator=draw)
        scores_LNC = 4 * torch.randn(len(Discriminant.STRENGTHS), 24, 12, generator=draw)
        said = Said(labels_N=labels_N, zero_NC=zero_NC, adapted_NC=zero_NC, scores_LNC=scores_LNC, solver=Discriminant)
        for few, found in loud.items():
            choice = choose(said, (1.0,), "", few=few)
            found.append(max(choice.scale / choice.text, fixed.scale))
    assert max(loud[True]) <= max(loud[False]) / 4 and fmean(loud[True]) < fmean(loud[False])
    useful = replace(said, scores_LNC=(40.0 * F.one_hot(labels_N, 12)).expand_as(scores_LNC), zero_NC=0 * zero_NC)
    assert choose(useful, (1.0,), "", few=True).scale > 2 * fixed.scale, "what they say clearly is heard"


@pytest.mark.parametrize(("number", "few"), [(4, True), (5, False)])
def test_fewer_than_five_shots_of_a_class_are_few(tiny, monkeypatch, number, few):
    heard, choosing = [], choose_head.choose
    monkeypatch.setattr(choose_head, "choose", lambda *a, few, **k: (heard.append(few), choosing(*a, few=few, **k))[1])
    train = load_toybox("noisy_shapes").train.few_shot(number, random.Random(1)).base()
    for name in ("gaussian", "ridge"):
        perlclip.fit(perlclip.create_method(name, tiny), train, lens="plain")
    assert heard == [few, False], "ridge regression's few numbers choose as they did"
    fitted(tiny, train.select(range(3 * number)), lens="plain")
    assert heard[2:] == [few], "nor otherwise in a rehearsal"


@pytest.fixture(scope="module")
def noisy():
    data = load_toybox("noisy_shapes")
    return data.train.few_shot(4, random.Random(1)).base(), data.test.base().select(range(0, 504, 4))


@pytest.mark.parametrize("name", ["ridge", "gaussian"])
def test_a_head_beside_zero_shot_gains_on_its_classes_and_gaussians_on_new_ones_too(tiny, noisy, name):
    train, test = noisy
    found = perlclip.fit(perlclip.create_method(name, tiny), train, lens="plain")
    assert not found.losses and found.training["head"]["how"] == "each left out"
    new = load_toybox("noisy_shapes").test.novel().select(range(0, 504, 4))
    (here, here_bare), (there, there_bare) = (
        [perlclip.evaluate(found, images, head=head, progress=False) for head in (True, False)]
        for images in (test, new)
    )
    zero = perlclip.evaluate(perlclip.create_method("zero-shot", tiny), test, progress=False)
    assert here.accuracy > zero.accuracy + 3 and here.accuracy > here_bare.accuracy
    if name == "ridge":
        assert found.head.unseen is None and torch.equal(there.probabilities_BC, there_bare.probabilities_BC)
    else:
        assert here_bare.accuracy > zero.accuracy + 3, "the center alone"
        assert there.accuracy > there_bare.accuracy


@pytest.fixture(scope="module")
def shots(tree):
    return perlclip.train_val(perlclip.load_images(tree), shots=4, seed=1)[0]


def fitted(backbone, shots, seed=1, **options):
    method = perlclip.create_method("perl", backbone, seed=seed, steps=2)
    return perlclip.fit(method, shots, **{"recipe": QUICK, "thresholds": False, "progress": False} | options)


def test_rehearsals_ask_centered_zero_shot_with_their_own_center(tiny, monkeypatch):
    """Of the shots that they train on: those held out have no part in it."""
    kept, chosen = [], choose_head.choose
    monkeypatch.setattr(
        choose_head, "choose", lambda held, *rest, **how: (kept.append(held), chosen(held, *rest, **how))[1]
    )
    shots = load_toybox("blurred_shapes").train.few_shot(2, random.Random(1)).base()
    method = perlclip.create_method("perl", tiny, center=0.75, steps=1)
    found = perlclip.fit(method, shots, recipe=QUICK, lens="plain", thresholds=False, progress=False)
    (held,) = kept
    assert held.centered_NC.shape == held.zero_NC.shape == (len(shots), len(shots.class_names))
    one_NC, other_NC = (held.zero_NC - held.centered_NC).chunk(2)  # what is taken off, by rehearsal
    assert all((off_NC - off_NC[0]).abs().max() < 1e-3 for off_NC in (one_NC, other_NC))
    assert (one_NC[0] - other_NC[0]).abs().max() > 0.1
    assert f", centered {found.choice.centered_zero_shot:.1f} %, adapted" in found.choice.sentence


def test_a_rehearsal_changes_nothing_of_the_training_and_comes_out_the_same(backbone, shots, tmp_path):
    """Whatever the method was initialised with before it was resumed, and whether or not it was."""
    path = tmp_path / "c.safetensors"
    plain, first = (fitted(backbone, shots, head=head, checkpoint=path) for head in (False, True))
    again = fitted(backbone, shots, seed=9, checkpoint=path, resume=True)
    assert plain.head is None and plain.choice is None and "head" not in plain.training
    for a, b, c in zip(*(fit.method.parameters() for fit in (plain, first, again)), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert first.choice == again.choice and first.choice.how == "rehearsal"
    assert first.fingerprint == again.fingerprint


@pytest.mark.parametrize(("number", "rehearsals", "images"), [(8, 2, 12), (4, 4, 12), (3, 3, 9), (2, 2, 6)])
def test_few_shots_are_held_out_in_turn(backbone, tree, monkeypatch, number, rehearsals, images):
    shots = perlclip.train_val(perlclip.load_images(tree), shots=number, val=0)[0]
    sizes = []
    complete = perlclip.training.loop._Run.complete
    monkeypatch.setattr(
        perlclip.training.loop._Run, "complete",
        lambda self, *inputs: (sizes.append(len(self.train_set)), complete(self, *inputs))[1],
    )  # fmt: skip
    found = fitted(backbone, shots).choice
    held = images // rehearsals
    assert sizes == [3 * number] + [3 * number - held] * rehearsals and found.images == images


def test_one_shot_of_three_classes_has_fixed_numbers(backbone, tree):
    """Half of them is one, which nothing is to be told from."""
    found = fitted(backbone, perlclip.train_val(perlclip.load_images(tree), shots=1)[0])
    fixed = FIXED[Discriminant]
    assert replace(found.choice, unseen=None) == fixed and found.head.scale == fixed.scale
    assert found.choice.sentence.startswith("too few shots to hold any out")


@pytest.fixture(scope="module")
def singles():
    return load_toybox("blurred_shapes").train.few_shot(1, random.Random(1)).base()


def test_with_one_shot_classes_are_left_out_instead(tiny, singles, monkeypatch):
    """Each half of them in turn: trained on with its own names alone, and asked about by who has not seen them."""
    trained, asked, complete, look = [], [], loop._Run.complete, choose_head.look_at

    def keep(of, kept):
        return lambda self, *inputs: (kept.append(of(self, *inputs)), complete(self, *inputs))[1]

    monkeypatch.setattr(loop._Run, "complete", keep(lambda self, *_: self.train_set.class_names, trained))
    monkeypatch.setattr(
        choose_head,
        "look_at",
        lambda method, images, *more: (asked.append(images.class_names), look(method, images, *more))[1],
    )
    found = fitted(tiny, singles, lens="plain").choice
    names = singles.class_names
    assert trained[0] == names and set(trained[1]) | set(trained[2]) == set(names)
    assert {len(trained[1]), len(trained[2])} == {len(names) // 2} and asked == [trained[2], trained[1]]
    assert found.how == "classes left out" and found.images == len(singles) and found.chosen is None
    assert (
        replace(found, unseen=None, share=1, how="fixed", images=0, zero_shot=None, adapted=None) == FIXED[Discriminant]
    )
    assert (
        f"zero-shot {found.zero_shot:.1f} %, adapted {found.adapted:.1f} %; the adapter answers with" in found.sentence
    )


def test_a_training_that_ruins_classes_left_out_has_no_say_about_one_shot(tiny, singles):
    """Thoughts of noise make them less likely, whoever's they are."""

    def train(fresh, part):
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in fresh.parameters():
                p.copy_(30 * torch.randn(p.shape, generator=draw))

    method = perlclip.create_method("perl", tiny)
    train(method, singles)
    head, found, held = choose_head.choose_head(method.eval(), singles, train=train)
    assert held is None and head.share == found.share == 0 and head.scale == FIXED[Discriminant].scale


@pytest.mark.parametrize(("zero", "adapted", "share"), [(0.9, 0.5, 0.0), (0.5, 0.9, 1.0)])
def test_halves_of_a_list_choose_one_share(zero, adapted, share):
    """With an odd number of classes the lists are of different lengths."""
    halves = []
    for classes in (4, 3):
        labels_N = torch.arange(60) % classes
        logits = {"zero_NC": answers(labels_N, zero, classes), "adapted_NC": answers(labels_N, adapted, classes)}
        halves.append(Said(labels_N=labels_N, scores_LNC=torch.zeros(0), **logits))
    assert choose_head._best_mixture(halves, SHARES) == (share, False)


def test_a_rehearsal_has_half_of_the_epochs_however_names_are_spelt(backbone, shots, monkeypatch):
    """CLIP reads them without curly quotes; one of half of the classes has all, as those are half of the steps."""
    epochs, complete = [], loop._Run.complete
    monkeypatch.setattr(
        loop._Run, "complete", lambda self, *inputs: (epochs.append(self.recipe.epochs), complete(self, *inputs))[1]
    )
    named = replace(shots, class_names=("bird’s nest", *shots.class_names[1:]))
    fitted(backbone, named, recipe=replace(QUICK, epochs=2))
    assert epochs == [2, 1, 1, 1, 1]


def test_with_one_shot_of_most_classes_each_class_counts_once(tiny, singles):
    """However many images the others have."""
    more = load_toybox("blurred_shapes").train.base()
    many = [i for i, label in enumerate(more.labels) if label == 0][:5]
    mostly = replace(
        singles,
        images=[*singles.images, *(more.images[i] for i in many)],
        labels=[*singles.labels, *(0 for _ in many)],
    )
    found = fitted(tiny, mostly, lens="plain").choice
    assert found.how == "classes left out" and found.images == len(singles)


def test_a_class_with_one_image_stays_in_every_rehearsal(backbone, shots):
    few = shots.select([i for i, label in enumerate(shots.labels) if label != 1] + [list(shots.labels).index(1)])
    assert fitted(backbone, few).choice.images == 4 * 2


def test_without_a_rehearsal_zero_shot_is_no_candidate(backbone, shots):
    found = fitted(backbone, shots, rehearse=False)
    assert found.choice.how == "each left out" and found.choice.share == 1 and found.choice.images == len(shots)


def test_a_method_with_nothing_to_train_needs_a_head(backbone, shots):
    with pytest.raises(PerlclipError, match="'zero-shot' has nothing to train"):
        perlclip.fit(perlclip.create_method("zero-shot", backbone), shots, head=False)


def test_thresholds_are_those_of_the_answers_with_the_head(backbone, shots):
    with_head, without = (fitted(backbone, shots, head=head, thresholds=True) for head in (True, False))
    assert with_head.head and with_head.thresholds != without.thresholds
    assert perlclip.set_thresholds(with_head, shots, progress=False) == with_head.thresholds


def test_the_command_says_what_the_adapter_answers_with(tree, clip_folder, tmp_path):
    command = ("fit", tree, "--shots", 4, "--backbone", clip_folder, "--device", "cpu")
    told = run(*command, "--out", tmp_path / "a", "--recipe", "fast").stdout
    assert "held-out accuracy on 12 shots (rehearsal): zero-shot" in told and "the adapter answers with: " in told
    adapter = perlclip.load_adapter(tmp_path / "a", device="cpu")
    assert adapter.training["head"]["answer"] in told
    assert adapter.training["head"]["answer"] in (tmp_path / "a" / "README.md").read_text()
    bare = run(*command, "--out", tmp_path / "b", "--no-head", "--method", "zero-shot").stdout
    assert "held-out" not in bare and perlclip.load_adapter(tmp_path / "b", device="cpu").head is None
    assert (
        "head of" in run("inspect", tmp_path / "a").stdout or "head: numbers" in run("inspect", tmp_path / "a").stdout
    )
    files = [str(path) for path in sorted((tree / "red").iterdir())[:2]]
    told = [run("predict", tmp_path / "a", *files, "--device", "cpu", *more).stdout for more in ((), ("--no-head",))]
    assert (told[0] == told[1]) == (adapter.head is None)


def test_rehearsals_take_half_of_the_epochs(backbone, monkeypatch):
    """Eight shots of two classes, two steps an epoch; four rehearsals on six of them, two steps an epoch as well."""
    taken = []
    step = loop._Run.train_step
    monkeypatch.setattr(
        loop._Run, "train_step", lambda run, *batch: (taken.append(len(batch[1])), step(run, *batch))[1]
    )
    method = perlclip.create_method("perl", backbone, steps=1)
    shots = pictures(0, 8, ("cat", "striped horse"))
    perlclip.fit(method, shots, recipe=Recipe(epochs=4), thresholds=False, progress=False)
    assert taken == [4, 4] * 4 + [4, 2] * 2 * 4
