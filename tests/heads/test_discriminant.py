"""Gaussians in closed form against fits that really leave shots out."""

import pytest
import torch
from torch.nn import functional as F

from perlclip import PerlclipError, threads
from perlclip.heads import discriminant
from perlclip.heads.discriminant import DIRECTIONS, Discriminant
from tests.heads.test_regression import samples

STRENGTHS = (0.1, 0.5, 0.95)


def brute_force(x_NE, labels_N, classes, strength, spread, free):
    """Weight and bias from the covariance itself; `spread` and degrees of freedom are given."""
    center, m_CE = middle(x_NE.double(), labels_N, classes)
    weight = torch.linalg.solve(covariance(x_NE, labels_N, classes, strength, spread, free), m_CE.T).T
    return weight, -weight @ center - (weight * m_CE).sum(-1) / 2


def middle(x_NE, labels_N, classes):
    """The mean of the classes' means, and how far they are from it."""
    means = {c: x_NE[labels_N == c].mean(0) for c in range(classes) if (labels_N == c).any()}
    center = torch.stack(list(means.values())).mean(0)
    return center, torch.stack([means.get(c, center) - center for c in range(classes)])


def covariance(x_NE, labels_N, classes, strength, spread, free):
    center, m_CE = middle(x_NE.double(), labels_N, classes)
    rest = x_NE.double() - center - m_CE[labels_N]
    return (1 - strength) * rest.T @ rest / free + strength * spread * torch.eye(x_NE.shape[1]).double()


@pytest.mark.parametrize(("count", "width"), [(24, 6), (14, 40)], ids=["primal", "dual"])
def test_the_solution_and_every_answer_left_out_are_those_of_fits(count, width):
    """Shots alone, in groups of a class, a class that is left out whole, and one that has no shot."""
    x_NE, labels_N = samples(count, width, 3)
    labels_N[-1] = 4  # alone in its class; nobody is in class 3
    found = Discriminant.of(x_NE, labels_N, 5)
    groups_N = torch.tensor([int(labels_N[i]) if i < 6 else 10 + i for i in range(count)])
    left_LNC = found.left_out(STRENGTHS, groups_N)
    for scores_NC, strength in zip(left_LNC, STRENGTHS, strict=True):
        given = 5, strength, found.spread, count - 4
        for got, want in zip(found.solution(strength), brute_force(x_NE, labels_N, *given), strict=True):
            torch.testing.assert_close(got, want)
        expected, away, others = torch.zeros_like(scores_NC), torch.zeros(count).double(), torch.zeros(count).double()
        for group in groups_N.unique():
            inside = groups_N == group
            x, labels, own = x_NE[~inside], labels_N[~inside], labels_N[inside][0]
            weight_CE, bias_C = brute_force(x, labels, *given)
            expected[inside] = x_NE[inside].double() @ weight_CE.T + bias_C
            others[inside] = (labels == own).sum().double()
            if (labels == own).any():
                d = x_NE[inside].double() - x[labels == own].double().mean(0)
                away[inside] = (d @ covariance(x, labels, *given).inverse() * d).sum(-1)
        there = others > 0
        v = (away * others / (others + 1))[there].mean()  # what a shot is off its class's mean
        lack = 1 / others[there] - 1 / torch.bincount(labels_N)[labels_N[there]]
        expected[there, labels_N[there]] += v * lack / 2
        torch.testing.assert_close(scores_NC, expected)


@pytest.mark.parametrize(("count", "width"), [(90, 40), (40, 90)], ids=["primal", "dual"])
def test_a_large_matrix_is_rounded_where_it_does_not_matter(count, width, monkeypatch):
    x_NE, labels_N = samples(count, width, 3)
    exact, rounded = (Discriminant.of(x_NE, labels_N, 3) for _ in range(2))
    assert exact.scatter.dtype == torch.float64
    monkeypatch.setattr(discriminant, "LARGE", 30)
    assert rounded.scatter.dtype == torch.float32
    for strength in (0.2, 0.95):
        left = [(it.left_out((strength,), torch.arange(count)), *it.solution(strength)) for it in (rounded, exact)]
        for got, want in zip(*left, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_a_class_is_not_the_less_likely_for_the_shot_left_out():
    """Two shots of each of many classes, all noise: a shot's own class is as far as the others, not twice as noisy."""
    generator = torch.Generator().manual_seed(0)
    x_NE, labels_N = torch.randn(80, 400, generator=generator), torch.arange(80) % 40
    scores_NC = Discriminant.of(x_NE, labels_N, 40).left_out([0.9], torch.arange(80))[0]
    own_N = scores_NC.gather(1, labels_N[:, None])[:, 0]
    gap = own_N.mean() - scores_NC.mean()
    assert gap.abs() < 0.3 * scores_NC.std(1).mean()


def test_a_shift_of_all_images_changes_no_score():
    """What all images have in common, a camera's look, is not what classes are told apart by."""
    x_NE, labels_N = samples(24, 6, 3)
    one, two = (Discriminant.of(x, labels_N, 3).solution(0.5) for x in (x_NE, x_NE + 3))
    scores = [x.double() @ w.T + b for x, (w, b) in ((x_NE, one), (x_NE + 3, two))]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)


def test_directions_in_which_a_class_differs_count_less():
    x_NE, labels_N = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)) * 0.1, torch.arange(60) % 2
    x_NE[:, 0] *= 30  # says nothing
    x_NE[:, 1] += labels_N  # says it all
    weight_CE, _ = Discriminant.of(x_NE, labels_N, 2).solution(0.05)
    ratio = (weight_CE[1, 0] / weight_CE[1, 1]).abs()
    assert ratio < 0.02


def test_what_an_adapter_keeps_is_rounded_and_has_all_of_the_variance():
    x_NE, labels_N = samples(90, 64, 3)
    found = Discriminant.of(x_NE, labels_N, 3)
    kept = found.kept()
    variance = found.scatter.trace()
    assert len(kept.directions_RE) == DIRECTIONS and kept.directions_RE.square().sum() > 0.7 * variance
    torch.testing.assert_close(kept.directions_RE.square().sum() + 32 * kept.rest, variance, rtol=1e-3, atol=0)
    for rounded, dtype in ((kept.means_CE, torch.half), (kept.directions_RE, torch.half), (kept.center_E, torch.float)):
        assert torch.equal(rounded, rounded.to(dtype).double())


def test_scores_by_several_strengths_are_those_of_each():
    x_NE, labels_N = samples(90, 64, 3)
    kept = Discriminant.of(x_NE, labels_N, 3).kept()
    means_CE = torch.cat([kept.means_CE, 2 * kept.means_CE[:2]])
    for strength, scores_NC in zip(STRENGTHS, kept.scores(x_NE, means_CE, STRENGTHS), strict=True):
        weight_CE, bias_C = kept.scores_of(means_CE, strength)
        torch.testing.assert_close(scores_NC, x_NE.double() @ weight_CE.T + bias_C)


def test_one_shot_of_each_class_and_one_class_alone_have_a_solution():
    x_NE, _ = samples(4, 8, 1)
    for x, labels_N, classes in ((x_NE, torch.arange(4), 4), (x_NE[:1], torch.zeros(1), 1)):
        weight_CE, bias_C = Discriminant.of(x, labels_N, classes).solution(0.5)
        scores = x.double() @ weight_CE.T + bias_C
        assert scores.isfinite().all() and torch.equal(scores.argmax(-1), labels_N.long())


def test_what_cannot_be_fitted_is_refused():
    x_NE, labels_N = samples(6, 4, 3)
    with pytest.raises(PerlclipError, match="needs a label for each embedding"):
        Discriminant.of(x_NE, labels_N[:5], 3)
    for strength in (0.0, 1.0):
        with pytest.raises(PerlclipError, match="between 0 and 1"):
            Discriminant.of(F.normalize(x_NE, dim=-1), labels_N, 3).solution(strength)


def test_strengths_side_by_side_have_the_bits_of_one_after_the_other(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    labels_N = torch.arange(60) % 5
    x_NE = torch.nn.functional.normalize(torch.randn(60, 40, generator=draw) + labels_N[:, None], dim=-1)
    before = torch.get_num_threads()
    found = Discriminant.of(x_NE, labels_N, 5).left_out(Discriminant.STRENGTHS, torch.arange(60))
    monkeypatch.setattr(threads, "CORES", 1)
    assert torch.equal(found, Discriminant.of(x_NE, labels_N, 5).left_out(Discriminant.STRENGTHS, torch.arange(60)))
    assert torch.get_num_threads() == before
    assert threads.side_by_side(lambda n: n * n, range(9)) == [n * n for n in range(9)]
