"""What `perlclip analyze STORE` found, taken into the report."""

import base64
import csv
import re
from pathlib import Path

import pytest

from perlclip.report.write import write_report
from tests.cli.test_cli import fails
from tests.report.reports import BASE, NOVEL, analysis_files, damage, identity, markdown_tables, put


@pytest.fixture
def store(tmp_path) -> Path:
    put(tmp_path / "runs", identity("base-to-novel", "a", "perl"), {"base": 70, "novel": 50})
    return tmp_path / "runs"


def test_an_analysis_becomes_a_section(store, tmp_path):
    write_report([store], tmp_path / "out", analysis=[analysis_files(tmp_path / "analysis")])
    text = (tmp_path / "out" / "report.md").read_text()
    section = text.split("## Dynamics of iterative reasoning\n")[1]
    assert "PERL's runs: fast, 16 shots, tiny." in section and "the rest of up to 50 images" in section
    (table,) = markdown_tables(section)
    assert table[0] == ["setting", "sets", "metric", "k = 0", "k = 1", "k = 2"]
    assert table[2:] == [
        [BASE, "2", "accuracy, %", "55", "55.12", "55"], [BASE, "2", "Brier score", "0.555", "0.555", "0.555"],
        [NOVEL, "1", "accuracy, %", "40", "41", "–"], [NOVEL, "1", "Brier score", "0.8", "0.7", "–"],
    ]  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "out" / "tables" / "dynamics.csv").open()))
    assert len(rows) == 2 * (3 + 3 + 3 + 2 + 2)
    found = {(r["setting"], r["dataset"], r["metric"], r["step"]): (r["mean"], r["low"], r["high"]) for r in rows}
    assert found[BASE, "a", "accuracy", "1"] == ("61.2345", "60.9845", "61.4845")
    assert found[BASE, "mean", "accuracy", "1"][0] == "55.11725"


def test_the_figures_of_an_analysis_are_taken_over_and_single_sets_folded(store, tmp_path):
    source = analysis_files(tmp_path / "analysis")
    write_report([store], tmp_path / "out", analysis=[source])
    text, page = ((tmp_path / "out" / name).read_text() for name in ("report.md", "index.html"))
    for path in (*source.glob("*.png"), *source.glob("*.svg")):
        assert (tmp_path / "out" / "figures" / f"dynamics-{path.name}").read_bytes() == path.read_bytes()
    open_page, folded_page = page.split("<details><summary>Set by set: 2 figures</summary>")
    folded_text = "".join(re.findall(r"<details>.*?</details>", text, re.DOTALL))
    for path in source.glob("*.svg"):
        encoded, folded = base64.b64encode(path.read_bytes()).decode(), path.stem != "settings"
        assert (encoded in open_page, encoded in folded_page.split("</details>")[0]) == (not folded, folded)
        link = f"](figures/dynamics-{path.stem}.png)"
        assert link in text and (link in folded_text) is folded
    for written in (folded_text, folded_page):
        assert f"{BASE}, set by set (2 data sets)." in written and f"{NOVEL}, set by set (1 data set)." in written


def test_the_table_of_an_analysis_can_be_sorted(store, tmp_path):
    write_report([store], tmp_path / "out", analysis=[analysis_files(tmp_path / "analysis")])
    page = (tmp_path / "out" / "index.html").read_text().split('<section id="dynamics">')[1]
    assert page.count("<th scope=col><button type=button>") == 6
    assert '<td data-v="55.12">55.12</td>' in page and page.count("<td>–</td>") == 2, "what is missing stays last"


def test_several_analyses_are_told_apart(store, tmp_path):
    folders = [analysis_files(tmp_path / name, (f"{name}, 16 shots, tiny",)) for name in ("fast", "extended")]
    write_report([store], tmp_path / "out", analysis=folders)
    page = (tmp_path / "out" / "index.html").read_text()
    for name, title in (("dynamics", "fast"), ("dynamics-2", "extended")):
        title = f"Dynamics of iterative reasoning: {title}, 16 shots, tiny"
        assert f'<a href="#{name}">{title}</a>' in page and f'<section id="{name}">\n<h2>{title}</h2>' in page
        assert f"## {title}\n" in (tmp_path / "out" / "report.md").read_text()
        assert (tmp_path / "out" / "figures" / f"{name}-settings.png").exists()
        assert (tmp_path / "out" / "tables" / f"{name}.tex").exists()


def rewrite(folder: Path, change) -> None:
    damage(folder / "settings.json", change)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: (folder / "settings.json").unlink(), "holds no analysis of a store: there is no settings.json"),
        (lambda folder: (folder / "settings.json").write_text('{"averages"'), "settings.json is damaged or of another"),
        (lambda folder: (folder / "settings.json").write_text("[1]"), "settings.json is damaged or of another version"),
        (lambda folder: rewrite(folder, lambda n: n.pop("metrics")), "settings.json is damaged or of another version"),
        (lambda folder: rewrite(folder, lambda n: n["sets"].pop(BASE)), "settings.json is damaged or of another"),
        (lambda folder: rewrite(folder, lambda n: n["sets"][BASE].clear()), "settings.json is damaged or of another"),
        (lambda folder: rewrite(folder, lambda n: n["averages"].clear()), "settings.json is damaged or of another"),
        (
            lambda folder: rewrite(folder, lambda n: n["sets"][BASE]["b"]["brier"]["low"].pop()),
            "settings.json is damaged or of another version",
        ),
        (
            lambda folder: rewrite(folder, lambda n: n["averages"][BASE]["brier"].update(mean=["x"] * 3)),
            "settings.json is damaged or of another version",
        ),
        (lambda folder: (folder / "settings.svg").unlink(), "settings.svg is missing or damaged"),
        (lambda folder: (folder / "settings.png").write_bytes(b""), "settings.png is missing or damaged"),
    ],
)
def test_a_broken_analysis_is_refused_before_anything_is_written(store, tmp_path, harm, sentence):
    folder = analysis_files(tmp_path / "analysis")
    harm(folder)
    assert sentence in fails("report", store, "--analysis", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_analysis_is_one_sentence(store, tmp_path):
    assert "nowhere holds no analysis of a store" in fails(
        "report", store, "--analysis", tmp_path / "nowhere", "--out", tmp_path / "out"
    )
