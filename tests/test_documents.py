"""Every table of a document is what its results make of it, and the one command makes all of them."""

import re

import pytest

from perlclip.bench.machines import Machines
from perlclip.bench.protocols import ABLATIONS
from scripts import documents
from scripts.documents import BLOCK, DOCUMENTS, TABLES, generated
from scripts.results import GRIDS, STAGES, Job

BLOCKS = [(path, *found) for path in DOCUMENTS for found in BLOCK.findall(path.read_text("utf-8"))]


@pytest.mark.parametrize(("path", "name", "text"), BLOCKS, ids=[f"{path.name}-{name}" for path, name, _ in BLOCKS])
def test_a_table_is_what_its_results_make_of_it(path, name, text):
    made = generated(name)
    if made is None:
        pytest.skip("its results are not there yet: python -m scripts.results")
    assert text.strip() == made.strip(), "python -m scripts.documents writes it"


def test_every_table_stands_in_a_document():
    assert {name for _, name, _ in BLOCKS} == set(TABLES)
    marks = sum(len(re.findall("<!--", path.read_text("utf-8"))) for path in DOCUMENTS)
    assert marks == 2 * len(BLOCKS), "a mark without its other half, or something left to be filled in"


def test_a_number_that_was_changed_by_hand_is_put_right():
    (path,) = {path for path, name, _ in BLOCKS if name == "methods"}
    text = path.read_text("utf-8")
    assert documents.renewed(text) == text
    changed = re.sub(r"(\| tcp \| [\d,]+ \|) \d\d\.", r"\1 99.", text)
    assert changed != text and documents.renewed(changed) == text


def test_the_one_command_has_all_that_the_paper_ablates(tmp_path):
    benched = {(grid.protocol, grid.recipe) for grid in GRIDS}
    for name in set(ABLATIONS) - {"ablation-depth-both"}:
        assert {(name, "fast"), (name, "extended")} <= benched
    assert list(STAGES) == ["runs", "dynamics", "report", "adaptive", "depth", "demo", "tables"]
    job = Job(out=tmp_path, docs=tmp_path, machines=Machines(), seeds=(1,), datasets=("tiny_toys",))
    runs = job.runs()
    settings = {run.settings for run in runs if run.method == "perl" and run.recipe == "fast"}
    assert {(("vision_depth", j),) for j in (5, 6, 8, 9, 10, 11)} <= settings and () in settings
    assert {(("steps", k),) for k in (1, 2, 3, 5, 6, 7, 8)} <= settings
    assert {run.dataset for run in runs} == {"tiny_toys"}
