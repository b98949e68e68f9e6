"""The report: numbers recomputed by hand, marks, the paper beside ours, intervals; its files: `test_report_files`."""

import csv
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean, mean, pstdev

import numpy as np
import pytest

import perlclip
from perlclip.bench.store import Store, failed_record
from perlclip.report.collect import Collected, collect
from perlclip.report.formats import latex, markdown
from perlclip.report.paper import METHODS, ratio, value
from perlclip.report.plots import looks, parameters_figure, shots_figure
from perlclip.report.sections import section
from perlclip.report.statistics import DRAWS, draws
from perlclip.report.tables import Cell, Column, Line, Table, beside, number
from perlclip.report.write import write_report
from tests.report.reports import (
    CLIP,
    NUMBERS,
    PARAMETERS,
    SETS,
    cells,
    damage,
    identity,
    labels,
    put,
    sections,
)


def harmonic(*accuracies: float) -> float:
    return harmonic_mean(accuracies)


# ---- numbers ----


def test_the_summary_has_means_spreads_both_averages_of_hm_and_the_difference_to_perl(store):
    (only,) = sections(store)
    table = only.summary
    assert labels(table) == ["zero-shot", "coop", "perl"], "zero-shot first, PERL last"
    perl, coop, zero = (cells(table, label) for label in ("perl", "coop", "zero-shot"))
    assert (perl["base"].value, perl["base"].spread) == (81, 1) and (perl["novel"].value, perl["novel"].spread) == (
        42,
        2,
    )
    hms = [
        mean([harmonic(70, 50), harmonic(90, 30)]),
        mean([harmonic(74, 54), harmonic(90, 34)]),
    ]
    assert perl["mean of HMs"].value == pytest.approx(mean([harmonic(72, 52), harmonic(90, 32)]))
    assert perl["mean of HMs"].spread == pytest.approx(pstdev(hms))
    assert perl["HM of means"].value == pytest.approx(harmonic(81, 42))
    assert zero["base"] == Cell(70.0), "one evaluation, no spread"
    assert coop["Δ HM to PERL"].value == pytest.approx(coop["mean of HMs"].value - perl["mean of HMs"].value)
    assert perl["Δ HM to PERL"].word == "reference"
    assert (coop["parameters"].value, coop["× PERL"].value) == (330, 0.33)


def test_sets_have_tables_of_their_own(store):
    hm, base, novel = sections(store)[0].sets
    assert [table.title for table in (hm, base, novel)] == [f"{m}, set by set" for m in ("HM", "Base", "Novel")]
    assert cells(hm, "perl")["a"].value == pytest.approx(harmonic(72, 52))
    assert cells(hm, "perl")["a"].spread == pytest.approx(pstdev([harmonic(70, 50), harmonic(74, 54)]))
    assert cells(base, "coop") == {"a": Cell(66.0, 1.0), "b": Cell(85.0, 0.0)}
    assert cells(novel, "zero-shot") == {"a": Cell(60.0), "b": Cell(40.0)}


def test_numbers_are_printed_to_be_read():
    def shown(value: float, kind: str) -> str:
        return number(Cell(value), Column("", kind))

    ratios = {
        817.4: "817×",
        101.1: "101×",
        0.327: "0.33×",
        1: "1×",
        5.52: "5.5×",
        9.7: "10×",
        0: "0×",
        12345: "12,345×",
    }
    assert {v: shown(v, "ratio") for v in ratios} == ratios
    assert [shown(v, "difference") for v in (1.234, -0.5, -0.001)] == ["+1.23", "−0.50", "0.00"]
    assert shown(4992256, "count") == "4,992,256" and number(Cell(15.0, span=(10, 20)), Column("", "count")) == "10–20"
    assert number(Cell(), Column("")) == "–"
    assert beside(Cell(1.0, 0.456, paper=value("base-to-novel", "fast", "perl", "average", "hm")), Column("")) == [
        "± 0.46",
        "(74.79†)",
    ]


def test_best_and_second_best_are_marked_and_what_reads_the_same_is_marked_the_same(store):
    row = sections(store)[0].summary.lines[0].row
    values = [(70.001, 9.0), (70.004, None), (69.0, 1.0), (68.0, 1.0), (69.0, 2.0)]
    lines = [Line(row, str(i), (1,), (Cell(a), Cell(b), Cell(a))) for i, (a, b) in enumerate(values)]
    table = Table("", "", "", "", (Column("a"), Column("b"), Column("n", "count")), tuple(lines))
    assert table.marks() == {
        (0, 0): "best", (1, 0): "best", (2, 0): "second", (4, 0): "second", (0, 1): "best", (4, 1): "second",
    }  # fmt: skip


def test_of_numbers_that_are_all_the_same_or_alone_none_is_best(store):
    row = sections(store)[0].summary.lines[0].row
    same = [Line(row, str(i), (1,), (Cell(70.0),)) for i in range(3)]
    for lines in (same, same[:1]):
        table = Table("x", "", "Same.", "", (Column("a"),), tuple(lines))
        assert table.marks() == {} and "bold" not in latex(table)


# ---- what stands in one table ----


def test_a_missing_run_is_a_dash_in_its_place_and_in_every_average_over_it(store):
    one = identity("base-to-novel", "b", "coop", 2)
    (Store(store).home(one) / "run.json").unlink()  # a failure does not replace it
    Store(store).write(one, failed_record(one, RuntimeError("no more\nmemory")))
    never = identity("base-to-novel", "c", "coop", 1)
    Store(store).write(never, failed_record(never, RuntimeError("lost")))
    (only,) = sections(store)
    assert cells(only.sets[1], "coop") == {"a": Cell(66.0, 1.0), "b": Cell(), "c": Cell()}
    assert all(cell.value is None for title, cell in cells(only.summary, "perl").items() if title in ("base", "novel"))
    (note,) = only.notes
    assert note.startswith("Missing: zero-shot on c; coop on b (seed 2); coop on c (seed 1, 2); perl on c (seed 1, 2).")


def test_different_conditions_are_never_averaged(store):
    put(store, identity("base-to-novel", "a", "perl", 1, precision="bfloat16"), {"base": 1, "novel": 1})
    put(store, identity("base-to-novel", "a", "perl", 1, shots=4), {"base": 2, "novel": 2})
    put(store, identity("base-to-novel", "a", "perl", 1, suite="other"), {"base": 3, "novel": 3})
    found = sections(store)
    assert [one.title.partition(" on ")[2] for one in found] == [
        "other, tiny in float32, 16 shots", "toybox, tiny in bfloat16, 16 shots", "toybox, tiny in float32, 16 shots",
        "toybox, tiny in float32, 4 shots",
    ]  # fmt: skip
    assert cells(found[2].summary, "perl")["base"].value == 81
    assert labels(found[3].summary) == ["zero-shot", "perl"], "what is untrained serves for all numbers of shots"
    assert cells(found[3].sets[1], "zero-shot")["b"].value == 80 and cells(found[3].sets[1], "perl")["b"].value is None


def test_other_weights_of_the_same_backbone_are_another_study(store, tmp_path):
    put(tmp_path / "new", identity("base-to-novel", "a", "perl", 1), {"base": 1, "novel": 1}, weights="x" * 64)
    first, second = sections(store, tmp_path / "new")
    assert second.title == "Base-to-novel on toybox, tiny (weights xxxxxxxx) in float32, 16 shots"
    assert first.summary.name != second.summary.name and cells(first.summary, "perl")["base"].value == 81


def test_recipes_are_rows_and_the_fast_one_is_the_reference(store):
    for seed in (1, 2):
        for dataset in "ab":
            one = identity("base-to-novel", dataset, "perl", seed, recipe="extended")
            put(store, one, {"base": 80, "novel": 60})
    (only,) = sections(store)
    assert labels(only.summary) == ["zero-shot", "coop", "perl", "perl (extended)"]
    assert cells(only.summary, "perl")["Δ HM to PERL"].word == "reference"
    assert "recipe fast unless a row names another" in only.sentences[0]


def test_the_same_run_twice_counts_once(store, tmp_path):
    put(tmp_path / "again", identity("base-to-novel", "a", "perl", 1), {"base": 10, "novel": 10})
    put(
        tmp_path / "again", identity("base-to-novel", "b", "perl", 1, settings=(("steps", 4),)), {"base": 9, "novel": 9}
    )
    found = collect([store, tmp_path / "again"])
    assert found.notes == ["2 records repeat a run (2 with other numbers); the first one counts."]
    assert cells(section(found.studies[0]).summary, "perl")["base"].value == 81


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r["predictions"]["base"]["last"].__setitem__(0, 99), "the answers of base do not give its accuracy"),
        (lambda r: r["predictions"]["base"]["last"].pop(), "the answers of base do not give its accuracy"),
        (lambda r: r["metrics"]["novel"].update(accuracy=float("nan")), "accuracy of novel is nan"),
        (lambda r: r["metrics"].clear(), "no metrics"),
        (lambda r: r["run"].pop("seed"), "KeyError('seed')"),
        (lambda r: r.pop("metrics"), "not a record of this format"),
    ],
)
def test_damaged_records_are_listed_and_not_used(store, change, why):
    damage(put(store, identity("base-to-novel", "c", "perl", 3), {"base": 100, "novel": 50}), change)
    found = collect([store])
    assert len(found.damaged) == 1 and why in found.damaged[0] and "c/perl" in found.damaged[0]
    assert len(found.complete) == len(NUMBERS) and found.studies[0].sets == ("a", "b")


def test_fields_that_older_records_lack_are_no_damage(store, tmp_path):
    path = put(store, identity("base-to-novel", "a", "perl", 1), {"base": 70, "novel": 50})
    damage(path, lambda record: record["predictions"].clear())
    found = collect([store])
    assert not found.damaged
    table = section(found.studies[0]).summary
    assert cells(table, "coop")["Δ HM to PERL"].value is not None and cells(table, "coop")["Δ HM to PERL"].span is None
    write_report([store], tmp_path / "out")


# ---- runs alone decide ----

STORED = Path(__file__).parents[1] / "stored" / "0.1.0"


def test_changed_defaults_do_not_relabel_stored_runs(tmp_path, monkeypatch):
    """A later version of PERL with other defaults: the report of old runs stays what 0.1.0 made of them."""
    from perlclip.methods.perl import PerlConfig

    changed = {**PerlConfig.__init__.__kwdefaults__, "steps": 2, "rank": 8}
    monkeypatch.setattr(PerlConfig.__init__, "__kwdefaults__", changed)
    assert PerlConfig().steps == 2
    monkeypatch.setattr(perlclip, "report", perlclip.report)  # put back afterwards, as the modules are
    for name in [name for name in sys.modules if name.startswith("perlclip.report")]:
        monkeypatch.delitem(sys.modules, name)
    importlib.import_module("perlclip.report.write").write_report([STORED / "store"], tmp_path)
    (table,) = (tmp_path / "tables").glob("*-summary.csv")
    ours, theirs = (list(csv.DictReader(path.open())) for path in (table, STORED / "summary.csv"))
    assert [list(row) for row in ours] == [list(row) for row in theirs]
    for row, old in zip(ours, theirs, strict=True):
        numbers = {key: float(text) for key, text in old.items() if "." in text}
        assert {key: float(row[key]) for key in numbers} == pytest.approx(numbers, rel=1e-12)
        assert {key: row[key] for key in old if key not in numbers} == {
            key: old[key] for key in old if key not in numbers
        }
    (table,) = (tmp_path / "tables").glob("*-ablation-steps-fast.csv")
    assert [row["label"] for row in csv.DictReader(table.open())] == ["2", "4 (default)"]


@pytest.mark.parametrize(
    ("settings", "config", "label"),
    [
        ({}, {}, "perl"),
        ({"steps": 4, "anchor": 1.0, "depth": 7}, {}, "perl"),
        ({"variant": "deep"}, {"depth": [3, 7, 11]}, "perl variant=deep"),
        ({"variant": "deep", "depth": [3, 7, 11]}, {}, "perl variant=deep"),
        ({"variant": "deep", "depth": 7}, {"depth": [3, 7, 11]}, "perl variant=deep"),  # as 0.1.0 took it
        ({"variant": "deep", "depth": 7}, {"depth": 7}, "perl depth=7;variant=deep"),
        ({"variant": "early", "depth": 0}, {}, "perl variant=early"),
        ({"depth": 0}, {}, "perl depth=0"),
    ],
)
def test_only_what_differs_from_the_paper_is_a_setting(tmp_path, settings, config, label):
    one = identity("base-to-novel", "a", "perl", settings=tuple(settings.items()))
    damage(put(tmp_path, one, {"base": 60, "novel": 60}), lambda record: record.update(config=config))
    (study,) = collect([tmp_path]).studies
    assert [row.label for row in study.rows] == [label]


def test_sets_are_in_the_order_of_their_suite_else_of_the_paper_else_of_their_names(tmp_path):
    def order(folder: str, names: list[str], **roles) -> tuple[str, ...]:
        for name in names:
            path = put(tmp_path / folder, identity("base-to-novel", name, "perl"), {"base": 60, "novel": 60})
            if roles:
                damage(path, lambda record: record.update(roles=roles))
        return collect([tmp_path / folder]).studies[0].sets

    assert order("paper", ["zebras", "apples", "dtd", "caltech101"]) == ("caltech101", "dtd", "apples", "zebras")
    own = {"source": "shop", "targets": ["zebras", "dtd", "apples"], "variants": ["shop_v2"]}
    assert order("own", ["apples", "dtd", "shop", "zebras"], **own) == ("shop", "zebras", "dtd", "apples")


def test_methods_that_the_paper_does_not_know_stand_before_perl(tmp_path, monkeypatch):
    monkeypatch.setitem(PARAMETERS, "anew", 5)
    for method in ("perl", "anew", "mmrl", "coop", "zero-shot"):
        put(tmp_path, identity("base-to-novel", "a", method), {"base": 60, "novel": 60})
    (only,) = sections(tmp_path)
    assert labels(only.summary) == ["zero-shot", "coop", "mmrl", "anew", "perl"]


# ---- bootstrap ----


def by_brute_force(found: Collected, method: str, reference: str) -> tuple[float, float]:
    """Image by image, draw by draw, seed by seed, from the records."""

    def accuracy(record, test, index):
        answers = record["predictions"][test]
        return 100 * mean(float(answers["last"][i] == answers["labels"][i]) for i in index)

    def hm(name, dataset, index):
        records = [r for r in found.complete if (r["run"]["method"], r["run"]["dataset"]) == (name, dataset)]
        return harmonic(*(mean(accuracy(r, test, index[dataset, test]) for r in records) for test in ("base", "novel")))

    drawn = {(d, t): np.concatenate(list(draws(f"{d}/{t}", 100))) for d in "ab" for t in ("base", "novel")}
    differences = []
    for b in range(DRAWS):
        index = {place: every[b] for place, every in drawn.items()}
        differences.append(mean(hm(method, d, index) - hm(reference, d, index) for d in "ab"))
    low, high = np.percentile(differences, (2.5, 97.5))
    return low, high


@pytest.mark.parametrize("method", ["coop", "zero-shot"])
def test_the_interval_is_that_of_a_plain_bootstrap(store, method, monkeypatch):
    monkeypatch.setattr("perlclip.report.statistics.DRAWS", 100)
    monkeypatch.setattr("tests.report.test_report.DRAWS", 100)
    monkeypatch.setattr("perlclip.report.statistics.BLOCK", 700)  # several blocks, the last one shorter
    found = collect([store])
    cell = cells(section(found.studies[0]).summary, method)["Δ HM to PERL"]
    assert cell.span == pytest.approx(by_brute_force(found, method, "perl"))
    assert cell.span[0] < cell.value < cell.span[1]


def test_the_same_answers_differ_by_nothing_and_other_images_cannot_be_paired(tmp_path):
    for method in ("perl", "mmrl"):  # names of equal length get equal answers
        put(tmp_path, identity("base-to-novel", "a", method), {"base": 70, "novel": 60})
    put(tmp_path, identity("base-to-novel", "a", "coop"), {"base": 70, "novel": 60}, images=50)
    (only,) = sections(tmp_path)
    table = only.summary
    assert only.notes == ["No answers to the same images as PERL's, so no interval: coop on a."]
    assert cells(table, "mmrl")["Δ HM to PERL"] == Cell(0.0, span=(0.0, 0.0))
    assert cells(table, "coop")["Δ HM to PERL"] == Cell(0.0, span=None)


def test_transfer_is_compared_by_the_mean_of_the_targets(tmp_path):
    for method, numbers in {"perl": (70, 50, 60), "coop": (72, 54, 66), "zero-shot": (60, 50, 55)}.items():
        put(
            tmp_path, identity("cross-dataset", "toybox", method), dict(zip(["toybox", "x", "y"], numbers, strict=True))
        )
    (only,) = sections(tmp_path)
    assert [column.title for column in only.summary.columns[2:]] == ["source", "mean of targets", "Δ to PERL"]
    coop = cells(only.summary, "coop")
    assert (coop["source"].value, coop["mean of targets"].value, coop["Δ to PERL"].value) == (72, 60, 5)
    assert coop["Δ to PERL"].span[0] < 5 < coop["Δ to PERL"].span[1]
    assert [column.title for column in only.sets[0].columns] == ["toybox", "x", "y"]


# ---- ablations and shots ----


def test_ablations_hold_the_default_on_the_same_sets(store):
    for seed in (1, 2):
        for setting in ({"depth": 11}, {"depth": 6}, {"depth": [3, 7]}, {"steps": 2}, {"modalities": "text"}):
            one = identity("base-to-novel", "a", "perl", seed, settings=tuple(setting.items()))
            put(store, one, {"base": 60, "novel": 60})
        both = identity("base-to-novel", "a", "perl", seed, settings=(("depth", 6), ("steps", 2)))
        put(store, both, {"base": 50, "novel": 50})
    (only,) = sections(store)
    tables = dict(only.ablations)
    assert list(tables) == ["depth", "steps", "modalities", ""]
    assert labels(tables["depth"]) == ["6", "7 (default)", "11", "3,7"] and tables["depth"].head == "J"
    assert cells(tables["depth"], "7 (default)")["base"] == Cell(72.0, 2.0), "only set a, which the others have"
    assert cells(tables["depth"], "6")["Δ HM to PERL"].value == pytest.approx(60 - harmonic(72, 52))
    assert "mean of 1 set (a)" in tables["depth"].title
    assert labels(tables["modalities"]) == ["text", "both (default)"]
    assert "depth=6;steps=2" in labels(tables[""])
    assert labels(only.summary) == ["zero-shot", "coop", "perl"], "the main table has the paper's settings only"


def test_perl_without_a_step_stands_among_the_steps(store):
    """It trains nothing, so its recipe is none; the curve over K begins with it all the same."""
    for seed in (1, 2):
        one = identity("base-to-novel", "a", "perl", seed, settings=(("steps", 2),))
        put(store, one, {"base": 60, "novel": 60})
    none = replace(identity("base-to-novel", "a", "perl", settings=(("steps", 0),)), recipe="none", shots=0, seed=0)
    put(store, none, {"base": 50, "novel": 50})
    (only,) = sections(store)
    tables = dict(only.ablations)
    assert list(tables) == ["steps"] and labels(tables["steps"]) == ["0", "2", "4 (default)"]


def test_there_is_a_report_without_perl_and_without_its_default(tmp_path):
    put(tmp_path / "zero", identity("base-to-novel", "a", "zero-shot"), {"base": 60, "novel": 60})
    put(tmp_path / "steps", identity("base-to-novel", "a", "perl", settings=(("steps", 2),)), {"base": 60, "novel": 60})
    (only,) = sections(tmp_path / "zero")
    assert cells(only.summary, "zero-shot")["Δ HM to PERL"] == Cell() and "Δ" not in " ".join(only.sentences)
    (only,) = sections(tmp_path / "steps")
    assert only.tables == [table for _, table in only.ablations] and labels(only.tables[0]) == ["2"]
    for name in ("zero", "steps"):
        write_report([tmp_path / name], tmp_path / "out")


def test_shots_are_columns_and_zero_shot_stands_in_all(tmp_path):
    put(tmp_path, identity("few-shot", "a", "zero-shot"), {"all": 40})
    for shots in (16, 1, 2):
        put(tmp_path, identity("few-shot", "a", "perl", shots=shots), {"all": 50 + shots})
    put(tmp_path, identity("few-shot", "a", "coop", shots=16), {"all": 60})
    (only,) = sections(tmp_path)
    perl, zero, coop = (cells(only.summary, label) for label in ("perl", "zero-shot", "coop"))
    assert list(perl) == ["parameters", "× PERL", "1 shot", "2 shots", "16 shots"]
    assert [perl[title].value for title in list(perl)[2:]] == [51, 52, 66]
    assert [zero[title].value for title in list(perl)[2:]] == [40, 40, 40]
    assert [coop[title].value for title in list(perl)[2:]] == [None, None, 60]


# ---- the paper's numbers ----


def test_the_papers_number_stands_beside_ours_and_is_flagged_when_far(real):
    (only,) = sections(real)
    perl, coop = cells(only.summary, "perl"), cells(only.summary, "coop")
    assert [perl[c].paper.printed for c in ("parameters", "base", "novel", "mean of HMs")] == [
        "6K",
        "73.97",
        "75.74",
        "74.79",
    ]
    assert (perl["base"].outside, perl["novel"].outside) == (False, True)
    assert perl["HM of means"].paper is None, "the paper's average is the mean of HMs"
    assert coop["base"].paper.printed == "70.73" and not coop["base"].outside, "one seed cannot tell"
    assert coop["Δ HM to PERL"].paper.printed == "-4.12"
    assert cells(only.sets[1], "perl")["dtd"].paper.printed == "59.69"
    assert "a single seed is not judged" in only.sentences[-1]


@pytest.mark.parametrize(("away", "outside"), [(1.9, False), (-1.9, False), (2.1, True), (-2.1, True)])
def test_the_limit_is_two_standard_deviations(away, outside):
    paper = value("base-to-novel", "fast", "perl", "average", "hm")
    assert Cell(paper.value + 0.5 * away, 0.5, paper=paper).outside is outside


def test_averages_over_some_of_the_papers_sets_have_no_number_beside_them(real):
    for folder in real.glob("base-to-novel/coop/dtd"):
        for path in folder.rglob("run.json"):
            path.unlink()
    (only,) = sections(real)
    assert cells(only.summary, "perl")["base"].paper is None
    assert cells(only.sets[1], "perl")["eurosat"].paper.printed == "67.25"


@pytest.mark.parametrize("fields", [{"suite": "toybox"}, {"backbone": "tiny"}, {"shots": 4}])
def test_under_other_conditions_there_is_no_paper(tmp_path, fields):
    one = identity("base-to-novel", "dtd", "perl", **{"suite": "coop", "backbone": CLIP} | fields)
    put(tmp_path, one, {"base": 50, "novel": 50})
    (only,) = sections(tmp_path)
    assert not any(cell.paper for table in only.tables for line in table.lines for cell in line.cells)
    assert "The paper has no numbers for these conditions" in only.sentences[-1]


def test_slips_are_listed_where_the_papers_numbers_are(real, store, tmp_path):
    write_report([real], tmp_path / "real-out")
    write_report([store], tmp_path / "toy-out")
    for name in ("report.md", "index.html"):
        assert "repeats the ImageNet cell of the MMRL row" in (tmp_path / "real-out" / name).read_text()
        assert "Slips" not in (tmp_path / "toy-out" / name).read_text()


def test_variants_have_the_papers_columns(store):
    for seed in (1, 2):
        for name in ("early", "layerstep"):
            one = identity("base-to-novel", "a", "perl", seed, settings=(("variant", name),))
            put(store, one, {"base": 60, "novel": 60})
    ((_, table),) = sections(store)[0].ablations
    titles = [column.title for column in table.columns]
    assert titles[:6] == ["parameters", "J", "skip early", "multi-depth", "layer-specific", "step-specific"]
    words = {line.label: [cell.word for cell in line.cells[1:6]] for line in table.lines}
    assert words == {
        "shared (default)": ["7", "yes", "no", "no", "no"],
        "early": ["0", "no", "no", "no", "no"],
        "layerstep": ["7,9,11", "yes", "yes", "yes", "yes"],
    }
    assert "| 7,9,11 | yes" in markdown(table) and "layerstep" in latex(table)


def test_the_ratio_to_perl_stands_beside_the_papers(real):
    (only,) = sections(real)
    coop = dict(zip([c.title for c in only.summary.columns], only.summary.texts()[0][1], strict=True))["× PERL"]
    assert coop.beside == ["(0.33×)"]
    printed = {m: ratio(value("base-to-novel", "fast", m, "average", "parameters")).printed for m in METHODS[1:]}
    assert [printed[m] for m in ("mmrl", "maple", "mmrl++", "mma", "tcp", "provp", "promptsrc", "cocoop", "perl")] == [
        "817", "583", "136", "113", "55", "25", "8", "6", "1",
    ]  # fmt: skip


@pytest.mark.parametrize(("away", "outside"), [(0.1, False), (-0.3, True)])
def test_what_is_not_trained_is_judged_without_a_spread(real, away, outside):
    for dataset in SETS[:11]:
        one = identity("base-to-novel", dataset, "zero-shot", suite="coop", backbone=CLIP)
        known = [value("base-to-novel", "fast", "zero-shot", dataset, half) for half in ("base", "novel")]
        put(real, one, {half: round(one.value) for half, one in zip(("base", "novel"), known, strict=True)})
    (only,) = sections(real)
    assert any(cell.outside for cell in cells(only.sets[1], "zero-shot").values())
    assert replace(cells(only.sets[1], "zero-shot")["dtd"], value=known_dtd() + away).outside is outside


def known_dtd() -> float:
    return value("base-to-novel", "fast", "zero-shot", "dtd", "base").value


# ---- figures ----


def test_every_row_of_a_figure_is_named_and_looks_different(store):
    """Also of as many as there are methods, and PERL by several recipes."""
    perl = sections(store)[0].summary.lines[-1].row
    names = [f"method {i}" for i in range(11)]
    perls = [perl, *(replace(perl, recipe=recipe) for recipe in ("extended", "original"))]
    rows = [replace(perl, method=name) for name in names] + perls
    parts = [(row, (Cell(100.0 * (i + 1)), Cell(70.0 + i, 0.4), Cell(75.0 - i))) for i, row in enumerate(rows)]
    lines = [Line(row, row.label, (1,), cells) for row, cells in parts]
    lines.append(Line(perl, "zero-shot", (), (Cell(0.0), Cell(69.0), Cell(68.0))))
    count = Column("parameters", "count")
    table = Table("", "", "", "", (count, Column("novel"), Column("base")), tuple(lines))
    shown = {tuple(look.get(key) for key in ("color", "marker", "markerfacecolor")) for *_, look in looks(table)}
    assert len(shown) == 15
    shots = replace(table, columns=(count, Column("1 shot"), Column("16 shots")))
    for drawing in (parameters_figure("one", table), shots_figure("two", shots)):
        text = drawing.svg.decode()
        assert all(text.count(f">{line.label}<") == 1 for line in lines), "each once, in the legend"
