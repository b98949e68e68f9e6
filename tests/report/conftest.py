"""Two stores of runs that reports are made of."""

from pathlib import Path

import pytest

from perlclip.report.paper import value
from tests.report.reports import CLIP, NUMBERS, SETS, identity, put


@pytest.fixture
def store(tmp_path) -> Path:
    for (method, dataset, seed), (base, novel) in NUMBERS.items():
        put(tmp_path / "runs", identity("base-to-novel", dataset, method, seed), {"base": base, "novel": novel})
    return tmp_path / "runs"


@pytest.fixture
def real(tmp_path) -> Path:
    """Suite coop: base accuracies of the paper rounded up, novel ones ten points below it; three seeds."""
    for dataset in SETS[:11]:
        for seed, shift in ((1, -1), (2, 0), (3, 1)):
            one = identity("base-to-novel", dataset, "perl", seed, suite="coop", backbone=CLIP)
            base, novel = (value("base-to-novel", "fast", "perl", dataset, half).value for half in ("base", "novel"))
            put(tmp_path / "real", one, {"base": min(100, round(base) + shift), "novel": round(novel) - 10 + shift})
        one = identity("base-to-novel", dataset, "coop", 1, suite="coop", backbone=CLIP)
        put(tmp_path / "real", one, {"base": 30, "novel": 30})
    return tmp_path / "real"
