"""Progress where there is no terminal: lines now and then, none of what is quick, and never a flood."""

import io
import sys
from types import SimpleNamespace

import pytest

from perlclip import progress
from perlclip.progress import heard_by, progress_bar


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time, as the test sets it, for this module alone: services of other tests go by the real one."""
    now = [1000.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def lines(clock, steps: int, seconds: float, **options) -> list[str]:
    """What a work of so many steps of so many seconds leaves in a log."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", log := io.StringIO())
        with progress_bar("fit", steps, **options) as bar:
            for _ in range(steps - options.get("done", 0)):
                clock[0] += seconds
                bar(note="loss 0.5")
    return log.getvalue().splitlines()


def test_quick_work_says_nothing(clock):
    assert lines(clock, 99, 0.1) == []


def test_a_line_says_how_far_it_is_and_what_is_left(clock):
    assert lines(clock, 30, 1.0) == ["fit: 10 of 30, loss 0.5, 20 s left", "fit: 30 done in 30 s"]
    resumed = lines(clock, 1000, 60.0, done=990)
    assert resumed[0] == "fit: 991 of 1,000, loss 0.5, 9 min left", "what was done before took no time now"


def test_a_day_is_no_flood(clock):
    found = lines(clock, 86_400, 1.0)
    assert 280 < len(found) < 300 and found[-1] == "fit: 86,400 done in 24.0 h"


def test_nothing_where_nothing_is_asked_for(clock):
    assert lines(clock, 30, 1.0, show=False) == []


def test_a_listener_is_told_instead_and_may_end_the_work(capsys):
    told = []

    def listen(*words):
        told.append(words)
        if words[1] == 2:
            raise KeyError("enough")

    with pytest.raises(KeyError), heard_by(listen), progress_bar("fit", 3) as bar:
        for _ in range(3):
            bar(note="loss 1")
    assert told == [("fit", 1, 3, "loss 1"), ("fit", 2, 3, "loss 1")]
    with progress_bar("fit", 3) as bar:
        bar()
    assert len(told) == 2 and capsys.readouterr().err == ""
