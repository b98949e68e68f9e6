"""Ridge regression in closed form against fits that really leave samples out."""

import pytest
import torch
from torch.nn import functional as F

from perlclip import PerlclipError
from perlclip.heads.regression import Ridge

STRENGTHS = (0.01, 0.3, 5.0)


def samples(count: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, width, generator=generator)
    return F.normalize(1 + centres[labels] + torch.randn(count, width, generator=generator), dim=-1), labels


def brute_force(x_NE, labels_N, classes, strength) -> tuple[torch.Tensor, torch.Tensor]:
    """The normal equations with a column of ones that is not penalised."""
    x = torch.cat([x_NE.double(), torch.ones(len(x_NE), 1, dtype=torch.double)], 1)
    penalty = strength * torch.eye(x.shape[1], dtype=torch.double)
    penalty[-1, -1] = 0
    solved = torch.linalg.solve(x.T @ x + penalty, x.T @ F.one_hot(labels_N, classes).double())
    return solved[:-1].T, solved[-1]


@pytest.mark.parametrize(("count", "width"), [(24, 6), (12, 40)], ids=["primal", "dual"])
def test_the_solution_and_every_answer_left_out_are_those_of_fits(count, width):
    x_NE, labels_N = samples(count, width, 3)
    ridge = Ridge.of(x_NE, labels_N, 3)
    groups_N = torch.tensor([i // 4 if i < 8 else 2 + i for i in range(count)])  # of four, of four, then single ones
    left_LNC = ridge.left_out(STRENGTHS, groups_N)
    for scores_NC, strength in zip(left_LNC, STRENGTHS, strict=True):
        weight_CE, bias_C = ridge.solution(strength)
        for got, want in zip((weight_CE, bias_C), brute_force(x_NE, labels_N, 3, strength), strict=True):
            torch.testing.assert_close(got, want)
        for group in groups_N.unique():
            inside = groups_N == group
            weight_CE, bias_C = brute_force(x_NE[~inside], labels_N[~inside], 3, strength)
            torch.testing.assert_close(scores_NC[inside], x_NE[inside].double() @ weight_CE.T + bias_C)


def test_views_of_one_image_do_not_vouch_for_each_other():
    """Two copies of each image: left out one by one, the other copy gives the answer away."""
    x_NE, _ = samples(12, 40, 3)
    labels_N = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(1))
    x_NE, labels_N, image_N = x_NE.repeat(2, 1), labels_N.repeat(2), torch.arange(12).repeat(2)
    ridge = Ridge.of(x_NE, labels_N, 3)
    alone, together = (ridge.left_out([0.01], groups)[0].argmax(-1) for groups in (torch.arange(24), image_N))
    assert (alone == labels_N).float().mean() > 0.9 > 0.8 > (together == labels_N).float().mean()


def test_scores_of_a_sample_sum_to_one():
    x_NE, labels_N = samples(24, 6, 3)
    weight_CE, bias_C = Ridge.of(x_NE, labels_N, 3).solution(0.1)
    torch.testing.assert_close((x_NE.double() @ weight_CE.T + bias_C).sum(-1), torch.ones(24, dtype=torch.double))


def test_what_cannot_be_fitted_is_refused():
    x_NE, labels_N = samples(6, 4, 3)
    with pytest.raises(PerlclipError, match="needs a label for each embedding"):
        Ridge.of(x_NE, labels_N[:5], 3)
    with pytest.raises(PerlclipError, match="must be positive"):
        Ridge.of(x_NE, labels_N, 3).solution(0.0)


def test_one_class_alone_has_one_answer():
    x_NE, _ = samples(4, 8, 1)
    weight_CE, bias_C = Ridge.of(x_NE[:1], torch.zeros(1), 1).solution(1.0)
    torch.testing.assert_close((x_NE.double() @ weight_CE.T + bias_C), torch.ones(4, 1, dtype=torch.double))
