"""Adaptation measured as accuracy on drawn tasks, with the trained tiny CLIP. Slow: it trains PERL in earnest."""

import csv
import json

import pytest
from PIL import Image

from perlclip import demo


@pytest.mark.slow
@pytest.mark.parametrize(("task", "base_gain"), [("faint_toys", 8.0), ("tiny_toys", 10.0)])
def test_perl_beats_zero_shot_on_base_and_keeps_novel(tiny, task, base_gain, tmp_path, monkeypatch, capsys):
    run = demo.Run(task=task, seed=1, modalities="both", recipe="extended")
    record = demo.perform(run, tiny)
    base, novel = record["base"], record["novel"]
    assert base[-1] >= base[0] + base_gain
    assert novel[-1] >= novel[0]
    assert base[1] > base[0] and base[4] >= base[1], "accuracy rises with the steps"
    assert record["corrected"], "some images are put right"

    # A run that is there is not done again; table and figure come from the files.
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / f"{run.name}.json").write_text(json.dumps(record))
    monkeypatch.setattr(demo, "perform", None)
    demo.run_all([run], tmp_path)
    assert f"| {base[0]:.1f} " in capsys.readouterr().out
    row = next(csv.DictReader((tmp_path / "table.csv").open()))
    assert float(row["base_k4"]) == pytest.approx(base[-1], abs=1e-3)
    assert Image.open(tmp_path / "demo.png").width > 1000
