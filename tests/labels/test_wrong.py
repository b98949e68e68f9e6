"""Wrong labels: found where they were put, and none where there are none."""

import torch
from torch.nn import functional as F

from perlclip.heads.regression import Ridge
from perlclip.labels.wrong import SUSPECT, doubts, left_out, mislabelled

CLASSES, EACH, WIDTH = 6, 12, 24


def clusters(seed=0, spread=0.12, each=EACH):
    """Unit features around a centre per class, texts that half know them, and the true labels."""
    make = torch.Generator().manual_seed(seed)
    centres_CE = F.normalize(torch.randn(CLASSES, WIDTH, generator=make), dim=-1)
    labels_N = torch.arange(CLASSES).repeat_interleave(each)
    v_NE = F.normalize(centres_CE[labels_N] + spread * torch.randn(len(labels_N), WIDTH, generator=make), dim=-1)
    texts_CE = F.normalize(centres_CE + 0.3 * torch.randn(CLASSES, WIDTH, generator=make), dim=-1)
    return v_NE, 20 * v_NE @ texts_CE.T, labels_N


def test_labels_that_were_changed_are_found_and_put_right():
    v_NE, texts_NC, labels_N = clusters()
    given_N, changed = labels_N.clone(), torch.tensor([3, 17, 30, 44, 58, 70])
    given_N[changed] = (labels_N[changed] + 2) % CLASSES
    found = doubts(v_NE, texts_NC, given_N)
    assert (found.wrong_N > SUSPECT).nonzero()[:, 0].tolist() == changed.tolist()
    assert torch.equal(found.likely_N[changed], labels_N[changed])
    assert abs(found.share - len(changed) / len(labels_N)) < 0.03
    assert (found.likely_N != given_N).all()


def test_where_all_labels_are_right_none_is_doubted():
    v_NE, texts_NC, labels_N = clusters(1)
    found = doubts(v_NE, texts_NC, labels_N)
    assert not (found.wrong_N > SUSPECT).any() and found.share < 0.01


def test_regression_has_its_say_and_texts_are_no_surer_than_they_are_right():
    """Even where texts are right more often, so that there would be no head: alone they doubt whole classes."""
    v_NE, _, labels_N = clusters(6, spread=3.0, each=20)
    texts_NC = 60.0 * F.one_hot(torch.where(labels_N < 2, labels_N + 2, labels_N), CLASSES)
    p_NC = left_out(v_NE, texts_NC, labels_N, None)[0].softmax(-1)
    assert 0.5 < p_NC.amax(1).mean() < 0.9, "two thirds of what they say is right"
    assert p_NC[labels_N == 5].std(0).max() > 1e-4, "these images differ only for regression"


def test_labels_mixed_up_with_one_other_class_are_found_as_well():
    """All wrong ones are of one class and called the same: that is not spread evenly, and the share says nothing."""
    v_NE, texts_NC, labels_N = clusters(7, each=60)
    given_N, changed = labels_N.clone(), torch.tensor([1, 15, 29, 43])
    given_N[changed] = 1
    found = doubts(v_NE, texts_NC, given_N)
    assert (found.wrong_N > SUSPECT).nonzero()[:, 0].tolist() == changed.tolist()
    assert (found.likely_N[changed] == 0).all()


def test_an_image_does_not_vouch_for_its_own_copy():
    """Two copies with the same wrong label: each is found only if both are left out together."""
    v_NE, texts_NC, labels_N = clusters(2)
    v_NE[1], texts_NC[1] = v_NE[0], texts_NC[0]
    given_N = labels_N.clone()
    given_N[:2] = 4
    groups_N = torch.arange(len(labels_N))
    groups_N[1] = 0
    assert (doubts(v_NE, texts_NC, given_N, groups_N).wrong_N[:2] > 0.9).all()
    alone, together = (left_out(v_NE, 0 * texts_NC, given_N, g)[0][0].softmax(-1)[4] for g in (None, groups_N))
    assert alone > together


def test_left_out_is_what_a_fit_without_the_image_says():
    v_NE, texts_NC, labels_N = clusters(3)
    vouched_N = left_out(v_NE, texts_NC, labels_N, None)[1]
    strengths = [10 ** (k / 2) for k in range(-4, 3)]
    rest = torch.arange(1, len(labels_N))
    said = []
    for strength in strengths:
        weight_CE, bias_C = Ridge.of(v_NE[rest], labels_N[rest], CLASSES).solution(strength)
        said.append((v_NE[0].double() @ weight_CE.T + bias_C).max().item())
    assert min(abs(vouched_N[0].item() - one) for one in said) < 1e-6


def test_one_image_alone_in_its_class_is_judged_by_the_texts():
    v_NE, texts_NC, labels_N = clusters(4)
    kept = [0, *range(EACH, len(labels_N))]  # one image of class 0
    found = doubts(v_NE[kept], texts_NC[kept], labels_N[kept])
    assert found.wrong_N[0] < SUSPECT, "the others know no class 0, which is no reason to doubt it"
    logits_NC = left_out(v_NE[kept], texts_NC[kept], labels_N[kept], None)[0]
    assert torch.equal(logits_NC[0], texts_NC[0]) and not torch.equal(logits_NC[1], texts_NC[kept][1])


def test_the_share_of_wrong_labels_is_the_most_probable_one():
    """Answers that are always sure and right: what differs from them is wrong, neither more nor less."""
    labels_N = torch.arange(100) % 10
    logits_NC = 12.0 * F.one_hot(labels_N, 10).float()
    given_N = torch.where(torch.arange(100) < 15, (labels_N + 1) % 10, labels_N)
    p_NC, share, wrong_N = mislabelled(logits_NC, given_N)
    assert abs(share - 0.15) < 0.01 and (wrong_N[:15] > 0.95).all() and (wrong_N[15:] < 0.01).all()
    assert torch.allclose(p_NC.sum(1), torch.ones(100, dtype=torch.float64))
