"""What a head says about classes that it was not trained on."""

from dataclasses import replace
from itertools import product
from statistics import fmean

import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip import PerlclipError
from perlclip.adapters.folder import WEIGHTS, Adapter, read_info
from perlclip.heads.answering import Answering
from perlclip.heads.discriminant import Discriminant
from perlclip.heads.head import make_head
from perlclip.heads.unseen import NewClasses, means_of
from perlclip.methods.parts import CENTER
from perlclip.text.classes import Classes
from perlclip.training import choose_unseen as choosing
from perlclip.training.choose_unseen import FEW, PLAIN, choose_unseen
from tests.common import UNSEEN, gaussian_head, loud, random_pixels

NAMES = ("red", "green grass", "blue", "cat")
NEW = ("violet", "boat")


def world(classes: int, shots: int = 16, width: int = 24, noise: float = 0.5, look: float = 2.0, seed: int = 0):
    """Texts, and images that have a look in common and point where their text does, and elsewhere."""
    draw = torch.Generator().manual_seed(seed)
    t_CE = F.normalize(torch.randn(classes, width, generator=draw), dim=-1)
    labels_N = torch.arange(classes * shots) % classes
    common_E = look * t_CE[: classes // 2].sum(0)  # towards the trained classes' texts, as a camera's look may be
    x_NE = t_CE[labels_N] + common_E + noise * torch.randn(len(labels_N), width, generator=draw) / width**0.5
    return F.normalize(x_NE, dim=-1), labels_N, t_CE


def right(x_NE, labels_N, t_CE, kept, trained: int, rule: NewClasses) -> float:
    """Accuracy on images of the classes behind the trained ones, among these."""
    of_them = labels_N >= trained
    weight, bias = kept.scores_of(means_of(kept, t_CE[:trained], t_CE[trained:], rule), rule.strength)
    logits = rule.text * 20 * x_NE[of_them].double() @ t_CE[trained:].double().T
    logits = logits + rule.scale * (x_NE[of_them].double() @ weight.T + bias)
    return (logits.argmax(-1) == labels_N[of_them] - trained).double().mean().item()


def test_a_class_with_a_trained_ones_text_has_its_mean():
    x_NE, labels_N, t_CE = world(8)
    found = Discriminant.of(x_NE, labels_N, 8)
    handed = means_of(found, t_CE, t_CE[[2, 5]], NewClasses(handed=1e6))
    torch.testing.assert_close(handed, found.means_CE[[2, 5]], atol=1e-4, rtol=1e-4)
    alone = means_of(found, t_CE, t_CE[[2, 5]], NewClasses(handed=0.0))
    along = F.cosine_similarity(alone, (t_CE - t_CE.mean(0))[[2, 5]].double())
    torch.testing.assert_close(along, torch.ones(2).double())


def test_what_new_images_share_with_trained_ones_is_not_held_against_them():
    """Texts alone are led astray by the common look; the guessed means are not."""
    x_NE, labels_N, t_CE = world(16, noise=0.7)
    trained = labels_N < 8
    kept = Discriminant.of(x_NE[trained], labels_N[trained], 8).kept()
    texts, means = (
        right(x_NE, labels_N, t_CE, kept, 8, rule) for rule in (NewClasses(), NewClasses(text=0.0, scale=1.0))
    )
    assert means > texts + 0.1
    found, *_ = choose_unseen(x_NE[trained], labels_N[trained], t_CE[:8], 20.0)
    assert found.alone.scale > 0 and right(x_NE, labels_N, t_CE, kept, 8, found.alone) > texts + 0.1


def test_the_choice_is_the_seeds_and_leaves_rows_as_they_were():
    x_NE, labels_N, t_CE = world(8)
    before = x_NE.clone()
    assert choose_unseen(x_NE, labels_N, t_CE, 20.0, seed=3) == choose_unseen(x_NE, labels_N, t_CE, 20.0, seed=3)
    assert torch.equal(x_NE, before)


def test_few_classes_or_shots_leave_less_to_choose():
    x_NE, labels_N, t_CE = world(3)
    assert choose_unseen(x_NE, labels_N, t_CE, 20.0) == (None, 0.0, 0.0)
    x_NE, labels_N, t_CE = world(8, shots=1)
    found, *_ = choose_unseen(x_NE, labels_N, t_CE, 20.0)
    assert (found.among.text, found.among.scale, found.offset) == (1, 0, 0), "who is trained, only the texts can say"
    assert found.alone.scale > 0


@pytest.mark.parametrize(("logit_scale", "noise"), [(20.0, 1.0), (300.0, 0.1)])
def test_the_rule_for_both_kinds_is_the_most_likely_of_the_grid(logit_scale, noise, monkeypatch):
    """Against every mixture and offset by itself; scores of embeddings with little noise are in the hundreds."""
    x_NE, labels_N, t_CE = world(8, shots=8, noise=noise)
    models = choosing.MODELS[:: len(choosing.MEANS)]
    for name, value in (("TURNS", 1), ("MEANS", choosing.MEANS[:1]), ("MODELS", models)):
        monkeypatch.setattr(choosing, name, value)
    folds = list(choosing._folds(x_NE.double(), labels_N, t_CE.double(), logit_scale, range(8), 1, None))
    likely = {}
    for m, (t, text), (s, scale) in product(
        range(len(models)), enumerate(choosing.MIXED_TEXTS), enumerate(choosing.MIXED_SCALES)
    ):
        kinds = {(offset, new): [] for offset in choosing.OFFSETS.tolist() for new in (False, True)}
        for fold in folds:
            logits_NC = text * fold.texts_NC.double() + scale * fold.scores_MNC[m].double()
            for part in (slice(fold.stayed), slice(fold.stayed, None)):
                texts = choosing._Weighted.of(fold.texts_NC, part, choosing.MIXED_TEXTS)
                mixed_NTS = texts.mixed(choosing._Weighted.of(fold.scores_MNC[m], part, choosing.MIXED_SCALES))
                torch.testing.assert_close(mixed_NTS[:, t, s], logits_NC[:, part].logsumexp(-1))
            for (offset, new), values in kinds.items():
                shifted_NC = logits_NC + offset * (torch.arange(8) < fold.stayed)
                logp_N = shifted_NC.log_softmax(-1).gather(1, fold.labels_N[:, None])[:, 0]
                values += logp_N[fold.new_N == new].tolist()
        for offset in choosing.OFFSETS.tolist() if text or scale else ():
            rule = replace(models[m], text=text, scale=scale)
            likely[rule, offset] = sum(fmean(kinds[offset, new]) for new in (False, True))
    assert likely[choosing._among(folds)] == pytest.approx(max(likely.values()), abs=1e-5)


def test_means_that_mislead_leave_it_to_the_texts():
    """Images lie where the next class's text would have them, more than by their own: no mean is to be guessed."""
    x_NE, labels_N, t_CE = world(12, noise=0.2, look=0.0)
    draw = torch.Generator().manual_seed(5)
    astray_CE = F.normalize(torch.randn(12, 24, generator=draw), dim=-1)
    x_NE = F.normalize(x_NE + 3 * astray_CE[labels_N] - 3 * (astray_CE @ t_CE.T @ t_CE)[labels_N] / 12, dim=-1)
    found, *_ = choose_unseen(x_NE, labels_N, t_CE, 20.0)
    assert found.alone.scale == 0 or found.alone.text > found.alone.scale


def test_a_few_classes_do_not_choose_a_rule_for_others():
    x_NE, labels_N, t_CE = world(12, noise=0.2, look=0.0)
    draw = torch.Generator().manual_seed(5)
    x_NE = F.normalize(x_NE + 3 * F.normalize(torch.randn(12, 24, generator=draw), dim=-1)[labels_N], dim=-1)
    for count, plain in ((FEW, False), (FEW - 1, True)):
        few_N = labels_N < count
        found, *_ = choose_unseen(x_NE[few_N], labels_N[few_N], t_CE[:count], 20.0)
        rule = found.alone
        assert (rule == replace(PLAIN, text=rule.text, scale=rule.scale) and rule.text == rule.scale) == plain, count


def test_centered_images_leave_new_classes_to_the_texts_all_but_a_little():
    x_NE, labels_N, t_CE = world(FEW - 1)
    plain, centered = (choose_unseen(x_NE, labels_N, t_CE, 20.0, center=center)[0].alone for center in (0.0, CENTER))
    assert plain.scale == plain.text and centered.scale == pytest.approx(centered.text / 16)


def test_a_rule_for_new_classes_is_as_sure_as_fits_classes_left_out():
    """To a fifth, not to a factor of two: how likely classes left out are is found again from the folds alone."""
    x_NE, labels_N, t_CE = world(12, noise=1.0)
    found, *_ = choose_unseen(x_NE, labels_N, t_CE, 60.0)
    folds = choosing._folds(x_NE.double(), labels_N, t_CE.double(), 60.0, range(12), 1, None)
    model = choosing._model(found.alone)

    def likely(warmth: float) -> float:
        by_class = [[] for _ in range(12)]
        for fold in folds:
            logits_NC = found.alone.text * fold.texts_NC + found.alone.scale * fold.scores_MNC[model]
            logp_NC = (warmth * logits_NC[:, fold.stayed :]).log_softmax(-1)
            for c, label, logp_C in zip(fold.class_N.tolist(), fold.labels_N.tolist(), logp_NC, strict=True):
                if label >= fold.stayed:
                    by_class[c].append(logp_C[label - fold.stayed].item())
        return fmean(map(fmean, by_class))

    assert likely(1.0) > max(likely(1.2), likely(1 / 1.2))


def test_copies_of_one_shot_do_not_make_it_sure():
    """Frames of one film: hardly any spread, by which all would be certain."""
    x_NE, labels_N, t_CE = world(8, shots=1)
    x_NE, labels_N = x_NE.repeat(3, 1) + 1e-7 * torch.randn(24, 24), labels_N.repeat(3)
    found = Discriminant.of(x_NE, labels_N, 8)
    weight_CE, _ = found.kept().solution(0.5)
    assert weight_CE.isfinite().all() and weight_CE.abs().max() < 1e6
    assert choose_unseen(x_NE, labels_N, t_CE, 20.0)[0].alone.text > 0


def test_a_trained_class_without_a_shot_says_nothing_about_others():
    x_NE, labels_N, t_CE = world(8)
    without, fewer = (Discriminant.of(x_NE, labels_N, classes).kept() for classes in (9, 8))
    more_CE = torch.cat([t_CE, 5 * torch.ones(1, 24)])
    rule = NewClasses(handed=1.0)
    torch.testing.assert_close(means_of(without, more_CE, t_CE[:2], rule), means_of(fewer, t_CE, t_CE[:2], rule))


# ---- in an adapter ----


def answering(method, names, head):
    return Answering(method, method.class_state(Classes.spoken(names)), head)


@pytest.fixture(scope="module")
def images(backbone):
    return random_pixels(backbone, 6)


@pytest.mark.parametrize("name", ["perl", "coop", "mma"])
@torch.no_grad()
def test_a_list_of_new_classes_is_answered_by_its_rule(backbone, images, name):
    method = perlclip.create_method(name, backbone, seed=3).eval()
    head = gaussian_head(backbone, NAMES, share=0.5)
    asked, rule = answering(method, NEW, head), UNSEEN.alone
    own = method.class_embeddings if name == "mma" else lambda s: backbone.encode_text(s.classes.prompts())
    t_CE, t_XE = (own(method.class_state(Classes.spoken(names))) for names in (NAMES, NEW))
    weight, bias = head.gaussians.scores_of(means_of(head.gaussians, t_CE, t_XE, rule), rule.strength)
    zero = perlclip.create_method("zero-shot", backbone)
    zero_BC = zero.logits(images, zero.class_state(asked.state.classes))
    texts_BC = 0.5 * method.logits(images, asked.state) + 0.5 * zero_BC
    v_BE = method.encode_image_steps(images)[0].double()
    expected = rule.text * texts_BC + rule.scale * (v_BE @ weight.T + bias)
    torch.testing.assert_close(asked.logits(images).double(), expected.double(), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(asked.logits(images), texts_BC, atol=0.1)


@pytest.mark.parametrize("gained", [(), (9.0, 9.0, 9.0, 9.0, 0.5), (0.5,)])
@torch.no_grad()
def test_in_a_list_with_both_the_rule_says_how_probable_either_are_together(backbone, images, gained):
    """With the frozen texts, or with the trained ones and what training has added to their odds taken off."""
    method = loud(perlclip.create_method("perl", backbone, seed=3, readout="mean")).eval()
    head = gaussian_head(backbone, NAMES, unseen=replace(UNSEEN, gained=gained), share=0.75)
    names, rule = ("violet", "Red", "boat", "cat"), UNSEEN.among
    p = answering(method, names, head).logits(images).softmax(-1)
    t_CE, t_LE = (backbone.encode_text(Classes.spoken(each).prompts()) for each in (NAMES, names))
    kept = head.gaussians
    means = torch.stack([kept.means_CE[0], kept.means_CE[3], *means_of(kept, t_CE, t_LE[[0, 2]], rule)])[[2, 0, 3, 1]]
    weight, bias = kept.scores_of(means, rule.strength)
    v_BE = backbone.encode_image(images)
    texts = backbone.logit_scale * v_BE @ t_LE.T
    if gained:
        texts = 0.75 * method.logits(images, method.class_state(Classes.spoken(names))) + 0.25 * texts
    joint = rule.text * texts + rule.scale * (v_BE.double() @ weight.T + bias)
    odds = joint[:, [1, 3]].logsumexp(-1) - joint[:, [0, 2]].logsumexp(-1) + UNSEEN.offset - sum(gained[-1:])
    got = (p[:, [1, 3]].sum(-1) / p[:, [0, 2]].sum(-1)).log()
    torch.testing.assert_close(got.double(), odds.double(), atol=1e-3, rtol=1e-3)
    alone = answering(method, ("red", "cat"), head).logits(images).softmax(-1)
    among = p[:, [1, 3]] / p[:, [1, 3]].sum(-1, keepdim=True)
    torch.testing.assert_close(among, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_sentences_that_no_template_makes_are_left_to_the_texts(backbone, images):
    method, head = perlclip.create_method("perl", backbone, seed=3).eval(), gaussian_head(backbone, NAMES)
    state = method.class_state(["a violet thing, outdoors", "two boats"])
    assert torch.equal(Answering(method, state, head).logits(images), method.trajectory(images, state)[-1])


@torch.no_grad()
def test_a_head_that_is_silent_about_its_classes_may_speak_about_new_ones(backbone, images):
    method, head = perlclip.create_method("perl", backbone, seed=3).eval(), gaussian_head(backbone, NAMES, scale=0.0)
    assert not head.idle
    own = answering(method, NAMES, head)
    assert torch.equal(own.logits(images), method.trajectory(images, own.state)[-1])
    loud = gaussian_head(backbone, NAMES)
    assert torch.equal(*(answering(method, NEW, each).logits(images) for each in (head, loud)))


@pytest.mark.parametrize("gained", [(), (0.0, -0.25, 0.1)])
@pytest.mark.parametrize("shots", [2, 40], ids=["fewer shots than numbers", "more"])
def test_saved_and_loaded_it_answers_the_same_and_counts(backbone, tmp_path, images, shots, gained):
    method, unseen = perlclip.create_method("perl", backbone, seed=3, steps=2), replace(UNSEEN, gained=gained)
    head = gaussian_head(backbone, NAMES, shots=shots, text=0.25, unseen=unseen)
    adapter = Adapter(method=method.eval(), class_names=NAMES, template="a {}.", head=head)
    folder = adapter.save(tmp_path / "adapter")
    loaded, info = perlclip.load_adapter(folder, backbone=backbone), read_info(folder)
    assert loaded.head.unseen == unseen and loaded.fingerprint == adapter.fingerprint
    assert info["format_version"] == (6 if gained else 3)
    assert info["head"]["unseen"].get("gained", []) == list(gained)
    rows = len(NAMES) + 1 + len(head.gaussians.directions_RE)
    assert info["head"]["numbers"] == head.numbers == rows * backbone.embed_dim
    with torch.no_grad():
        for names in (NAMES, NEW, NAMES + NEW):
            one, two = (answering(each.method, names, each.head).logits(images) for each in (adapter, loaded))
            assert torch.equal(one, two)
    perlclip.save_adapter(loaded, tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    for other in (replace(unseen, offset=1.0), replace(unseen, gained=(1.0,))):
        assert replace(adapter, head=replace(head, unseen=other)).fingerprint != adapter.fingerprint
    assert head.without_middle().unseen == UNSEEN  # those who have frozen embeddings alone have no trained texts


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("head.means", lambda x: x[:2], "a head for 4 classes has tensors of shape"),
        ("head.directions", lambda x: x[:, :3], "a head for 4 classes has tensors of shape"),
        ("head.center", lambda x: x * float("nan"), "not finite"),
        ("head.directions", lambda x: 0 * x, "lead nowhere"),
        ("head.spread", lambda x: x[:-1], "a head for 4 classes has tensors of shape"),
        ("head.spread", lambda x: x[0], "a head for 4 classes has tensors of shape"),
        ("head.spread", lambda x: torch.cat([-x[:1], x[1:]]), "variances between"),
        ("head.spread", lambda x: torch.cat([x[:-1], x[-1:] + 1]), "not those in its tensor file"),
    ],
)
def test_damaged_tensors_are_refused(backbone, name, change, words):
    head = gaussian_head(backbone, NAMES)
    tensors = head.tensors()
    tensors[name] = change(tensors[name])
    with pytest.raises(PerlclipError, match=words):
        type(head).read(NAMES, backbone.embed_dim, head.as_json(), tensors)


def test_a_rule_is_checked():
    for wrong in (dict(text=-1.0), dict(scale=float("nan")), dict(strength=1.0)):
        with pytest.raises(PerlclipError):
            NewClasses(**wrong)
    for wrong in (dict(offset=float("inf")), dict(gained=(0.0, 2e6))):
        with pytest.raises(PerlclipError, match="what training added"):
            replace(UNSEEN, **wrong)


def test_ridge_regression_makes_no_such_head(backbone):
    weight = torch.randn(len(NAMES), backbone.embed_dim).double()
    head = make_head(NAMES, (weight, torch.zeros(len(NAMES)).double()), strength=1.0)
    assert head.gaussians is None and head.unseen is None and set(head.tensors()) >= {"head.weight", "head.bias"}
