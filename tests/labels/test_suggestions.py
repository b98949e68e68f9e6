"""What to label next: spread out, uncertain, rare classes not forgotten, and the same every time."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import perlclip
from perlclip.errors import PerlclipError
from perlclip.labels.suggestions import NOISE, most_worth
from tests.labels.test_wrong import CLASSES, EACH, clusters

NONE = torch.zeros(0, dtype=torch.long)


def test_first_suggestions_are_of_all_classes():
    """Nothing is known, all answers are alike: only how the images are spread counts."""
    v_NE, _, labels_N = clusters(5, spread=0.05)
    even_NC = torch.full((len(v_NE), CLASSES), 1 / CLASSES)
    taken = [i for i, _ in most_worth(v_NE, even_NC, CLASSES, v_NE[:0], NONE)]
    assert len(set(labels_N[taken].tolist())) == CLASSES
    before = [0, EACH]  # of classes 0 and 1
    more = [i for i, _ in most_worth(v_NE, even_NC, CLASSES - 2, v_NE[before], labels_N[before])]
    assert set(labels_N[more].tolist()) == set(range(2, CLASSES))


def test_of_images_alike_the_uncertain_one_and_of_classes_the_rare_one():
    v_NE = F.normalize(torch.eye(4, 8) + 0.01, dim=-1)
    p_NC = torch.tensor([[0.9, 0.1], [0.55, 0.45], [0.9, 0.1], [0.9, 0.1]])
    assert most_worth(v_NE, p_NC, 1, v_NE[:0], NONE)[0][0] == 1
    p_NC = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8], [0.8, 0.2]])
    assert most_worth(v_NE, p_NC, 1, torch.zeros(3, 8), torch.tensor([0, 0, 0]))[0][0] == 2


def test_what_is_left_of_the_variance_is_that_of_ridge_regression():
    """One after the other, by changes of rank one, as from all that was taken at once."""
    v_NE, _, _ = clusters(6)
    taken = most_worth(v_NE, torch.full((len(v_NE), 2), 0.5), 8, v_NE[:3], torch.zeros(3, dtype=torch.long))
    x_NE = v_NE.double() - v_NE.double().mean(0)
    before = [0, 1, 2, *(i for i, _ in taken[:-1])]
    k, last = x_NE[before] @ x_NE.T, taken[-1][0]
    gram = x_NE[before] @ x_NE[before].T + NOISE * torch.eye(len(before), dtype=torch.float64)
    whole = x_NE[last] @ x_NE[last]
    left = whole - k[:, last] @ torch.linalg.solve(gram, k[:, last])
    assert abs(taken[-1][1] - (left / whole).item()) < 1e-6


def test_each_is_the_one_that_would_be_taken_first_after_those_before():
    v_NE, _, _ = clusters(7)
    p_NC = torch.rand(len(v_NE), 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
    known: list[int] = []
    for i, _ in most_worth(v_NE, p_NC, 12, v_NE[:0], NONE):
        assert i == most_worth(v_NE, p_NC, 1, v_NE[known], p_NC[known].argmax(-1))[0][0]
        known.append(i)


@pytest.fixture(scope="module")
def pool(tree):
    return sorted(tree.rglob("*.png"))


def test_suggestions_are_the_same_again_and_leave_out_what_is_labelled(tiny, tree, pool):
    method = perlclip.create_method("zero-shot", tiny)
    how = dict(count=5, class_names=["red", "green grass", "blue"], progress=False)
    first, again = (perlclip.suggest(method, pool, **how) for _ in range(2))
    assert [one.row() for one in first.chosen] == [one.row() for one in again.chosen]
    assert [one.rank for one in first.chosen] == [1, 2, 3, 4, 5] and first.images == len(pool) == 24
    labelled = perlclip.load_images(tree).select(range(0, 24, 3))
    after = perlclip.suggest(method, pool, labelled=labelled, **how)
    assert after.known == 8 and after.images == 16
    assert not {str(one.image) for one in after.chosen} & set(map(str, labelled.images))


def test_an_adapter_knows_its_classes_and_what_is_unreadable_is_said(tiny, tree, pool, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no image")
    adapter = perlclip.Adapter(
        method=perlclip.create_method("perl", tiny), class_names=("red", "blue"), template="a photo of a {}."
    )
    found = perlclip.suggest(adapter, [*pool[:3], tmp_path / "broken.png"], on_error="skip", progress=False)
    assert len(found.chosen) == 3 and len(found.skipped) == 1
    with pytest.raises(PerlclipError, match="not an image"):
        perlclip.suggest(adapter, [tmp_path / "broken.png"], progress=False)
    with pytest.raises(PerlclipError, match="class_names"):
        perlclip.suggest(adapter.method, pool)
    with pytest.raises(PerlclipError, match="at least 1"):
        perlclip.suggest(adapter, pool, count=0)
    with pytest.raises(PerlclipError, match="label already"):
        labelled = perlclip.ImageSet(images=pool[:2], labels=[0, 1], class_names=("red", "blue"))
        perlclip.suggest(adapter, pool[:2], labelled=labelled, progress=False)
    assert np.isfinite([one.new for one in found.chosen]).all()
