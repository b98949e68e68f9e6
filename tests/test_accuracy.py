"""Adaptation measured as accuracy on drawn tasks, with the trained tiny CLIP. Slow: it trains PERL in earnest."""

import pytest

from perlclip.demo import Run, perform


@pytest.mark.slow
@pytest.mark.parametrize(("task", "base_gain"), [("faint_toys", 8.0), ("tiny_toys", 10.0)])
def test_perl_beats_zero_shot_on_base_and_keeps_novel(tiny, task, base_gain):
    record = perform(Run(task=task, seed=1, modalities="both", recipe="extended"), tiny)
    base, novel = record["base"], record["novel"]
    assert base[-1] >= base[0] + base_gain
    assert novel[-1] >= novel[0]
    assert base[1] > base[0] and base[4] >= base[1], "accuracy rises with the steps"
    assert record["corrected"], "some images are put right"
