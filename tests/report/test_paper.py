"""The paper's numbers: averages, HMs and gaps are recomputed, and exactly the listed slips deviate."""

from collections import Counter, defaultdict
from dataclasses import replace
from statistics import harmonic_mean, mean

import pytest

import perlclip
from perlclip.methods.perl import INITS, MODALITIES, VARIANTS
from perlclip.report.paper import DEPTHS, METHODS, SETS, WORDS, Published, published, slips, value

ELEVEN = SETS[:11]  # ImageNet first
TARGETS = {"cross-dataset": ELEVEN[1:], "domain-shift": SETS[11:]}
ROUNDING = 0.015  # of the printed numbers that go in (0.01 at most) and of the one that comes out


def cell(row: Published, dataset: str, metric: str) -> float | None:
    found = value(row.protocol, row.recipe, row.method, dataset, metric, row.settings)
    return found and found.value


def average(row: Published, metric: str) -> float | None:
    """Mean over the data sets; None for ablations, of which the paper prints only averages."""
    cells = [cell(row, dataset, metric) for dataset in TARGETS.get(row.protocol, ELEVEN)]
    return None if None in cells else mean(cells)


def recomputed(row: Published) -> float | None:
    """What the other cells say this one should be; None where they say nothing."""
    if row.metric in ("delta", "delta_hm"):
        metric = "hm" if row.metric == "delta_hm" else "accuracy"
        return average(row, metric) - average(replace(row, method="perl", recipe="fast"), metric)
    if row.dataset == "average":
        return average(row, row.metric) if row.metric != "parameters" else None
    if row.metric == "hm":
        return harmonic_mean([cell(row, row.dataset, "base"), cell(row, row.dataset, "novel")])
    return None


def first_printed(row: Published) -> str:
    """The same quantity where it is printed first; both transfer protocols test one model on ImageNet."""
    protocols = ["cross-dataset"] * (row.protocol == "domain-shift" and row.dataset == "imagenet") + [row.protocol]
    found = (value(p, row.recipe, row.method, row.dataset, row.metric, row.settings) for p in protocols)
    return next(first.printed for first in found if first)


def key(row) -> tuple[str, ...]:
    return row.table, row.method, row.settings, row.dataset, row.metric, row.printed


def deviations() -> dict[tuple[str, ...], float]:
    """Cells that are not what others make them, or are printed differently elsewhere, with what they should be."""
    found = {}
    for row in published():
        want = recomputed(row)
        if want is not None and abs(row.value - want) > ROUNDING:
            found[key(row)] = want
        elif row.printed != first_printed(row):
            found[key(row)] = float(first_printed(row))
    return found


def repeats() -> list[list[Published]]:
    """Cells of one table with the same base and novel accuracy, which chance does not bring about."""
    printed = {key(row)[:5]: row.printed for row in published()}
    pairs = defaultdict(list)
    for row in published():
        if row.metric == "base" and row.dataset != "average":
            pairs[row.table, row.printed, printed[(*key(row)[:4], "novel")]].append(row)
    return [rows for rows in pairs.values() if len(rows) > 1]


def too_high() -> set[tuple[str, ...]]:
    """Average HMs above the HM of the average base and novel; a mean of HMs cannot be, for HM is concave."""
    found = set()
    for row in published():
        if row.metric == "hm" and row.dataset == "average" and average(row, "hm") is None:
            bound = harmonic_mean([cell(row, "average", "base"), cell(row, "average", "novel")])
            if row.value > bound + ROUNDING:
                found.add(key(row))
    return found


def test_exactly_the_listed_slips_deviate():
    listed = {key(slip): float(slip.expected) for slip in slips() if slip.expected}
    assert listed == pytest.approx(deviations(), abs=0.0051)


def test_slips_without_a_better_number_are_repeats_or_impossible():
    listed = {key(slip) for slip in slips() if not slip.expected}
    assert too_high() == {("ablation_reasoning", "perl", "variant=step", "average", "hm", "74.93")}
    cells = {k[:4] for k in listed - too_high()}
    extended = {c for c in cells if c[0] == "base2new_extended"}
    assert {c[1:] for c in cells - extended} == {c[1:] for c in extended}  # and the HMs the main table repeats
    assert len(extended) == len(repeats()) == 2
    for rows in repeats():
        assert sum(key(row)[:4] in extended for row in rows) == 1
    assert listed - too_high() == {
        key(row) for row in published() if key(row)[:4] in cells and row.metric in ("base", "novel", "hm")
    }


def test_slips_are_printed_as_listed_once():
    keys = [key(slip) for slip in slips()]
    assert len(set(keys)) == len(keys) == 50
    assert set(keys) <= {key(row) for row in published()}
    assert all(slip.why for slip in slips())


def test_appendix_d_mixes_two_averages():
    """Competitors have the HM of the average base and novel, PERL the mean of HMs, as all have in the main table."""
    table = [row for row in published() if row.table == "base2new_default_competitors" and row.dataset == "average"]
    rows = defaultdict(dict)
    for row in table:
        rows[row.method][row.metric] = row.value
    for method, row in rows.items():
        of_means = harmonic_mean([row["base"], row["novel"]])
        assert (abs(row["hm"] - of_means) < ROUNDING) == (method != "perl")


def test_number_of_cells():
    assert Counter(row.table for row in published()) == {
        "base2new_1": 12 * 16 - 1,  # PERL has no gap to itself
        "cross_dataset_1": 11 * 14 - 1,
        "ablation_reasoning": 6 * 4,
        "ablation_v_t_b": 3 * 4,
        "base2new_extended": 12 * 38 - 1,
        "base2new_default_competitors": 12 * 38 - 1,
        "cross_dataset_default_competitors": 10 * 14 - 1,
        "ood": 10 * 6,
        "text": 29,
    }
    assert len({(row.table, row.protocol, *key(row)[1:5]) for row in published()}) == len(published())


def test_names_are_ours_and_all_are_there():
    assert {row.method for row in published()} == set(METHODS) <= set(perlclip.list_methods())
    assert {row.dataset for row in published()} == {*SETS, "average"} and set(SETS) == set(perlclip.dataset_names())
    assert set(WORDS) == {*VARIANTS, *MODALITIES, *INITS} and DEPTHS.keys() == VARIANTS.keys()
    known = {"modalities": set(MODALITIES), "variant": set(VARIANTS)}
    for row in published():
        if row.settings:
            name, _, setting = row.settings.partition("=")
            assert row.method == "perl" and setting in known[name]
    assert {row.recipe for row in published() if row.method == "perl"} == {"fast"}


@pytest.mark.parametrize(
    ("where", "printed", "table"),
    [
        (("base-to-novel", "fast", "perl", "average", "hm"), "74.79", "base2new_1"),
        (("base-to-novel", "fast", "perl", "eurosat", "novel"), "72.25", "base2new_extended"),
        (("base-to-novel", "fast", "mmrl++", "average", "hm"), "73.07", "base2new_1"),
        (("base-to-novel", "fast", "mma", "average", "delta_hm"), "+0.44", "base2new_1"),
        (("base-to-novel", "original", "coop", "dtd", "novel"), "41.18", "base2new_default_competitors"),
        (("base-to-novel", "fast", "perl", "average", "hm", "variant=layerstep"), "76.37", "ablation_reasoning"),
        (("base-to-novel", "fast", "perl", "average", "base", "modalities=text"), "73.07", "ablation_v_t_b"),
        (("base-to-novel", "fast", "zero-shot", "fgvc_aircraft", "hm"), "31.09", "base2new_1"),
        (("base-to-novel", "original", "zero-shot", "average", "novel"), "74.35", "base2new_1"),
        (("cross-dataset", "fast", "promptsrc", "ucf101", "accuracy"), "58.50", "cross_dataset_1"),
        (("cross-dataset", "original", "tcp", "average", "delta"), "+0.73", "cross_dataset_default_competitors"),
        (("domain-shift", "fast", "perl", "imagenet_sketch", "accuracy"), "48.75", "ood"),
        (("domain-shift", "fast", "zero-shot", "imagenet_a", "accuracy"), "47.77", "ood"),
    ],
)
def test_cells_read_by_eye(where, printed, table):
    found = value(*where)
    assert found is not None and (found.printed, found.table) == (printed, table)


def test_cells_that_no_other_cell_checks():
    """The source accuracies of the fast transfer table, and the ablations."""
    source = [r.printed for r in published() if r.table == "cross_dataset_1" and r.dataset == "imagenet"]
    assert " ".join(source) == "72.03 71.87 70.53 71.33 65.23 68.90 70.40 70.30 67.38 70.30 70.25"
    rows = defaultdict(list)
    for row in published():
        if row.table.startswith("ablation") and row.settings:
            rows[row.settings].append(row.printed)
    assert {settings: " ".join(row) for settings, row in rows.items()} == {
        "variant=early": "6K 68.91 62.43 65.15",
        "variant=deep": "6K 75.70 73.66 74.52",
        "variant=step": "32K 74.30 75.28 74.93",
        "variant=layer": "26K 75.58 74.83 75.09",
        "variant=layerstep": "83K 77.17 75.74 76.37",
        "modalities=vision": "4K 69.50 74.31 71.72",
        "modalities=text": "3K 73.07 75.10 74.02",
    }


def test_parameters_and_gaps_are_numbers():
    assert value("base-to-novel", "fast", "mmrl", "average", "parameters").value == 4_900_000
    assert value("base-to-novel", "fast", "perl", "average", "parameters").value == 6000
    assert value("base-to-novel", "fast", "tcp", "average", "delta_hm").value == -7.99


@pytest.mark.parametrize(
    "where",
    [
        ("base-to-novel", "original", "perl", "average", "hm"),
        ("cross-dataset", "original", "provp", "average", "accuracy"),
        ("domain-shift", "fast", "coop", "average", "accuracy"),
        ("base-to-novel", "fast", "perl", "eurosat", "hm", "variant=deep"),
    ],
)
def test_what_the_paper_does_not_print_is_none(where):
    assert value(*where) is None
