"""Adaptation measured as accuracy on drawn tasks, with the trained tiny CLIP. Slow: it trains PERL in earnest."""

import csv
from dataclasses import replace

import pytest
from PIL import Image

from perlclip.bench import run as performing
from perlclip.bench.store import Store
from perlclip.cli import demonstration as demo
from perlclip.methods.perl import Perl


@pytest.mark.slow
@pytest.mark.parametrize(("task", "base_gain"), [("faint_toys", 8.0)])
def test_perl_beats_zero_shot_on_base_and_keeps_novel(task, base_gain, tmp_path, monkeypatch, capsys):
    # A quarter of the shots, and no more than ten epochs of them; in this process, so that it holds.
    monkeypatch.setattr(demo, "SHOTS", 4)
    monkeypatch.setattr(demo, "cuda_cards", lambda device: ["one run at a time"])
    monkeypatch.setitem(Perl.recipes, "strong", replace(Perl.recipes["strong"], least_steps=0))
    demo.run_demo([task], tmp_path)
    record, zero = sorted(Store(tmp_path / "runs").records().complete, key=lambda found: found["run"]["method"])
    base, novel = (record["metrics"][half]["step_accuracy"] for half in ("base", "novel"))
    base_zero, novel_zero = (zero["metrics"][half]["accuracy"] for half in ("base", "novel"))
    assert base[-1] >= base_zero + base_gain
    assert novel[-1] >= novel_zero
    assert base[0] > base_zero and base[4] > base[0], "the center helps, and accuracy rises with the steps"
    assert demo.corrected_cases(record, zero), "some images are put right"
    row = next(row for row in csv.DictReader((tmp_path / "runs.csv").open()) if row["method"] == "perl")
    assert float(row["base_k4"]) == base[-1]

    # A run that is there is not done again; table and figure come from the files.
    (tmp_path / "demo.png").unlink()
    capsys.readouterr()
    monkeypatch.setattr(performing, "perform", None)
    demo.run_demo([task], tmp_path)
    assert f"| {base_zero:.1f} " in capsys.readouterr().out
    assert Image.open(tmp_path / "demo.png").width > 1000
