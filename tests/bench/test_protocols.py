"""Protocols as lists of runs, on the drawn and on the real sets, and trainings that several of them share."""

import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import perlclip
from perlclip.bench import run as perform
from perlclip.bench.machines import Machines
from perlclip.bench.protocols import ABLATIONS, PROTOCOLS, Benchmark, known_dataset, training_of
from perlclip.bench.run import list_fingerprint
from perlclip.bench.schedule import run_all, summary, units
from perlclip.bench.store import RECORD, Run, Store
from perlclip.data import DataSet, ImageSet
from perlclip.data.suites import SUITES
from perlclip.methods import Config, method_class
from tests.bench.suites import NAMES, load
from tests.bench.test_runs import grid, numbers, one_thread, weights  # noqa: F401 (a fixture)
from tests.cli.test_cli import fails, run
from tests.data.test_catalog import minis  # noqa: F401 (a fixture)

TRANSFER = ("cross-dataset", "domain-shift")


def fine(protocol: str, **changes) -> list[Run]:
    return grid(**{"suite": "fine", "protocol": protocol, "methods": ["perl"], "seeds": [1]} | changes)


# ---- which runs ----


def test_a_published_set_that_no_method_has_settings_for_is_trained_like_any_other():
    assert known_dataset("coop", "eurosat") == "eurosat"
    assert known_dataset("coop", "imagenet_v2") == known_dataset("toybox", "eurosat") == ""


@pytest.mark.parametrize("suite", ["toybox", "coop"])
def test_protocols_are_the_same_lists_on_both_suites(suite):
    sets = SUITES[suite]
    assert (len(sets.targets), len(sets.variants)) == (10, 4) and len(set(sets.names)) == 15
    count = {
        protocol: len(Benchmark(protocol=protocol, suite=suite, methods=["zero-shot", "perl", "mma"]).runs())
        for protocol in (*PROTOCOLS, "all")
    }
    assert count["base-to-novel"] == 11 * (1 + 3 + 3) and count["few-shot"] == 11 * (1 + 5 * 6)
    assert count["cross-dataset"] == count["domain-shift"] == 1 + 3 + 3
    assert count["all"] == 11 * 7 + 7 + 7


def test_what_is_tested():
    toybox = SUITES["toybox"]
    tests = {name: protocol.tests(toybox, "toybox") for name, protocol in PROTOCOLS.items()}
    assert [test.name for test in tests["base-to-novel"]] == ["base", "novel"]
    assert [test.name for test in tests["cross-dataset"]] == ["toybox", *toybox.targets]
    assert [test.name for test in tests["domain-shift"]] == ["toybox", *toybox.variants]
    assert [test.name for test in tests["few-shot"]] == ["all"]
    for name in PROTOCOLS:
        first, *others = tests[name]
        mixed = name == "generalised"  # new classes are on the list in either test
        assert first.novel == mixed and all(test.novel for test in others), "what was trained on comes first"
    assert {run.shots for run in Benchmark(protocol="few-shot", methods=["perl"]).runs()} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_an_ablation_shares_the_default_run_with_the_main_table(ablation):
    key, values = ABLATIONS[ablation]
    runs = Benchmark(protocol=ablation, datasets=["toybox"], seeds=[1]).runs()
    assert {one.protocol for one in runs} == {"base-to-novel"} and {one.method for one in runs} == {"perl"}
    assert [dict(one.settings).get(key) for one in runs].count(None) == 1 and len(runs) == len(values)
    assert set(Benchmark(methods=["perl"], datasets=["toybox"], seeds=[1]).runs()) <= set(runs)
    backbone = perlclip.load_backbone("tiny")
    for one in runs:
        perlclip.create_method("perl", backbone, **dict(one.settings))  # all of them exist


def test_perl_without_a_step_is_not_trained():
    """Its projectors get no gradient: it is zero-shot CLIP, evaluated once."""
    runs = fine("ablation-steps", datasets=["a"], methods=[], seeds=[1, 2])
    untrained = [one for one in runs if one.recipe == "none"]
    assert [one.settings for one in untrained] == [(("steps", 0),)] and len(runs) == 1 + 8 * 2
    assert untrained[0].shots == untrained[0].seed == 0


def test_every_variant_of_a_setting_that_is_the_default_is_one_run():
    default = fine("base-to-novel", datasets=["a"])
    assert fine("base-to-novel", datasets=["a"], settings={"perl": {"steps": 4, "anchor": 1.0}}) == default
    mmrl = dict(suite="coop", datasets=["eurosat"], methods=["mmrl"], seeds=[1], recipe="original", shots=[16])
    assert dict(Benchmark(**mmrl, settings={"mmrl": {"dim": 512}}).runs()[0].settings) == {"dim": 512}, (
        "not the recipe's"
    )
    assert Benchmark(**mmrl, settings={"mmrl": {"dim": 2048}}).runs()[0].settings == ()


@pytest.mark.parametrize(
    ("protocol", "special"),
    [
        ("base-to-novel", {}),
        ("cross-dataset", {name: "original-cross" for name in perlclip.list_methods() if name != "provp"}),
        ("domain-shift", {name: "original-cross" for name in perlclip.list_methods() if name != "provp"}),
        (
            "few-shot",
            dict.fromkeys(("coop", "kgcoop", "promptsrc", "provp", "tcp", "mmrl", "mmrl++"), "original-few-shot"),
        ),
    ],
)
def test_original_is_the_recipe_that_the_authors_have_for_the_protocol(protocol, special):
    runs = Benchmark(protocol=protocol, recipe="original").runs()
    used = {one.method: one.recipe for one in runs}
    assert used == {
        name: {"zero-shot": "none", "ridge": "fast", "gaussian": "fast", "perl": "fast"}.get(
            name, special.get(name, "original")
        )
        for name in perlclip.list_methods()
    }
    for one in runs:
        perform._recipe(one)  # all of them exist


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(protocol="ablation-stepps"), "did you mean 'ablation-steps'?"),
        (dict(protocol="ablation-rank", methods=["coop"]), "ablation-rank is about perl alone"),
        (dict(protocol="cross-dataset", datasets=["b"]), "cross-dataset trains on 'a' alone, got b"),
        (dict(protocol="base-to-novel", shots=[1, 2]), "base-to-novel takes one number of shots, got 1, 2"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(perlclip.PerlclipError, match=words.replace("?", r"\?")):
        fine(**changes)


def test_a_method_without_the_recipe_asked_for_is_refused(tmp_path, monkeypatch):
    """A trained method that has no recipe was run untrained."""
    for recipes, known in (({}, "none"), ({"slow": perlclip.Recipe()}, "slow")):
        monkeypatch.setattr(method_class("mma"), "recipes", recipes)
        said = fails(*bench("base-to-novel", tmp_path, "--methods", "mma"))
        assert f"unknown recipe of method 'mma': 'fast'; known: {known}" in said
    assert fine("base-to-novel", methods=["mma"], recipe="slow")[0].recipe == "slow"
    assert fine("base-to-novel", methods=["zero-shot"], recipe="slow")[0].recipe == "none", "nothing to train"


@pytest.mark.parametrize(
    ("suite", "protocol", "words"),
    [
        (dict(source=""), "cross-dataset", "suite 'own' has no source, which cross-dataset needs"),
        (dict(targets=()), "cross-dataset", "suite 'own' has no targets, which cross-dataset needs"),
        (dict(variants=()), "domain-shift", "suite 'own' has no variants, which domain-shift needs"),
        (dict(variants=()), "all", "suite 'own' has no variants, which domain-shift needs"),
        (dict(source="", targets=()), "few-shot", "suite 'own' has neither a source nor targets"),
    ],
)
def test_a_protocol_needs_the_roles_that_it_is_about(suite, protocol, words, monkeypatch):
    monkeypatch.setitem(SUITES, "own", replace(SUITES["fine"], name="own", **suite))
    with pytest.raises(perlclip.PerlclipError, match=words):
        fine(protocol, suite="own")


def test_a_suite_without_a_source_is_trained_set_by_set(monkeypatch):
    monkeypatch.setitem(SUITES, "own", replace(SUITES["fine"], name="own", source="", backbone="x/y"))
    runs = fine("base-to-novel", suite="own")
    assert [(one.dataset, one.backbone) for one in runs] == [("b", "x/y"), ("c", "x/y")]
    name = runs[0].name
    monkeypatch.setitem(SUITES, "own", replace(SUITES["own"], backbone="tiny"))
    assert runs[0].name == name != replace(runs[0], backbone="tiny").name, "whatever the suite's file says later"


def test_settings_of_a_published_set_are_not_for_others_of_that_name(monkeypatch):
    own = replace(SUITES["coop"], name="own", published=False, on_disk=False, backbone="tiny")
    monkeypatch.setitem(SUITES, "own", own)
    for suite, dim, rate in (("coop", 2048, 5.0), ("own", 512, 0.1)):
        mmrl, provp = (
            fine("base-to-novel", suite=suite, datasets=[name], methods=[method], recipe="original")[0]
            for name, method in (("eurosat", "mmrl"), ("imagenet", "provp"))
        )
        assert perform.plan(mmrl)["config"]["dim"] == dim and perform.plan(provp)["recipe"]["lr"] == rate


def test_a_setting_is_left_out_only_if_nothing_changes_without_it(monkeypatch):
    """A setting may have a default that depends on another."""

    @dataclass(frozen=True, kw_only=True)
    class Layers(Config):
        deep: bool = False
        layers: int | None = None

        def __post_init__(self) -> None:
            object.__setattr__(self, "layers", self.layers or (9 if self.deep else 3))

    monkeypatch.setattr(method_class("mma"), "config_class", Layers)

    def kept(**settings) -> dict:
        (one,) = fine("base-to-novel", datasets=["a"], methods=["mma"], settings={"mma": settings})
        return dict(one.settings)

    assert kept(layers=3, deep=False) == kept(layers=3) == kept() == {}
    assert kept(layers=9, deep=True) == kept(deep=True) == {"deep": True}
    assert kept(layers=3, deep=True) == {"layers": 3, "deep": True} and kept(layers=9) == {"layers": 9}


def test_names_of_the_real_suite_are_plain_with_its_usual_backbone():
    one = Benchmark(suite="coop", datasets=["dtd"], methods=["perl"], seeds=[1]).runs()[0]
    assert one.backbone == "openai/clip-vit-base-patch16"
    assert one.name == "base-to-novel/coop/dtd/perl-fast-16shot-seed1"
    assert replace(one, backbone="tiny").name.startswith(f"{one.name}-")


# ---- one training for several runs ----


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Store, list[Run], list[dict]]:
    """Cross-dataset, domain shift and few-shot on the source: one training."""
    store = Store(tmp_path_factory.mktemp("shared"))
    runs = [*fine("cross-dataset"), *fine("domain-shift"), *fine("few-shot", datasets=["a"])]
    return store, runs, run_all(runs, store)


@pytest.fixture
def copied(shared, tmp_path) -> Store:
    return Store(Path(shutil.copytree(shared[0].folder, tmp_path / "copy")))


def test_a_training_is_shared_and_said_to_be(shared, tmp_path):
    store, runs, records = shared
    assert [record["adapter_of"] for record in records] == [None, runs[0].name, runs[0].name]
    assert records[0]["seconds"]["fit"] > 0 == records[1]["seconds"]["fit"] == records[2]["seconds"]["fit"]
    assert len({json.dumps(record["fit"]) for record in records}) == 1 and records[1]["parameters"] == 1122
    assert len(list(store.folder.rglob("adapter_model.safetensors"))) == 1
    for one, record in zip(runs, records, strict=True):
        (alone,) = run_all([one], Store(tmp_path / one.protocol))
        assert numbers(record) == numbers(alone) and alone["adapter_of"] is None
    assert [list(record["metrics"]) for record in records] == [["a", "b", "c"], ["a", "d"], ["all"]]
    assert records[0]["metrics"]["a"] == records[1]["metrics"]["a"] == records[2]["metrics"]["all"]
    assert records[0]["tests"]["a"] == records[1]["tests"]["a"] == records[2]["tests"]["all"]
    assert len(set(records[0]["tests"].values())) == 3


def test_only_the_same_training_is_shared():
    one = fine("cross-dataset")[0]
    assert training_of(one) == training_of(replace(one, protocol="few-shot")) != training_of(replace(one, seed=2))
    assert training_of(one) != training_of(replace(one, protocol="base-to-novel")), "trained on half of the classes"
    runs = [*fine("all", seeds=[1, 2]), *fine("few-shot", shots=[4, 8], seeds=[1])]
    sizes = Counter(tuple(one.protocol for one in unit) for unit in units(runs, {}))
    assert sizes == {
        ("base-to-novel",): 6,
        ("cross-dataset", "domain-shift", "few-shot"): 1,
        ("cross-dataset", "domain-shift"): 1,
        ("few-shot",): 5,
    }
    done = {runs[0]: {}, fine("cross-dataset")[0]: {}}
    assert sum(map(len, units(runs, done))) == len(runs) - 2


@pytest.mark.parametrize("damage", ["adapter", "data", "stale"])
def test_an_adapter_that_does_not_hold_is_trained_again(shared, copied, damage):
    _, runs, records = shared
    home = copied.home(runs[0])
    (copied.home(runs[1]) / RECORD).unlink()
    if damage == "adapter":
        (home / "adapter_model.safetensors").write_bytes(b"")
    record = json.loads((home / RECORD).read_bytes())
    record |= {"data": {"fit": record["fit"] | {"data": "0"}}, "stale": {"config": {}}}.get(damage, {})
    (home / RECORD).write_text(json.dumps(record))
    (again,) = run_all([runs[1]], copied)
    assert again["adapter_of"] is None and again["seconds"]["fit"] > 0
    assert numbers(again) == numbers(records[1]) and weights(copied, runs[1])


@pytest.mark.parametrize("protocol", ["few-shot", "cross-dataset"])
def test_training_never_sees_test_or_validation_labels(shared, tmp_path, monkeypatch, protocol):
    """Other labels there: the same adapter, to the byte, and other results."""

    def poisoned(name: str, root: Path | None = None) -> DataSet:
        data = load(name)
        lies = replace(data.test, labels=[3 - label for label in data.test.labels])
        return replace(data, test=lies, val=lies)

    monkeypatch.setitem(SUITES, "fine", replace(SUITES["fine"], load=poisoned))
    (one,) = fine(protocol, datasets=["a"])
    (record,) = run_all([one], Store(tmp_path))
    store, runs, records = shared
    assert weights(Store(tmp_path), one) == weights(store, runs[0])
    assert record["metrics"] != records[[run.protocol for run in runs].index(protocol)]["metrics"]


def test_few_shot_trains_and_tests_all_classes_with_so_many_shots(tmp_path):
    runs = fine("few-shot", datasets=["a"], shots=[1, 2])
    records = run_all(runs, Store(tmp_path))
    assert [record["fit"]["images"] for record in records] == [4, 8]
    assert all(list(record["metrics"]["all"]["class_accuracy"]) == list(NAMES) for record in records)
    assert summary(records[0]).startswith("a perl 1-shot seed 1: all ")


# ---- what is tested, in the record ----


def some_images(**changes) -> ImageSet:
    images = [np.full((4, 4, 3), n, np.uint8) for n in range(3)]
    return ImageSet(**{"images": images, "labels": [0, 1, 0], "class_names": ("x", "y")} | changes)


def test_a_test_set_is_told_from_others_without_reading_its_files(tmp_path):
    def files(folder: str, sizes=(5, 6, 7)) -> ImageSet:
        paths = [tmp_path / folder / name for name in ("x/1.jpg", "y/2.jpg", "x/3.jpg")]
        for path, size in zip(paths, sizes, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(size))
        return some_images(images=[str(path) for path in paths])

    same = files("a")
    assert list_fingerprint(same) == list_fingerprint(files("elsewhere/b"))
    others = [same, files("c", (5, 6, 8)), same.select([0, 2, 1]), same.select([0, 1]), replace(same, template="{}")]
    others += [replace(same, labels=[0, 1, 1]), some_images(), some_images().select([2, 1, 0])]
    assert len({list_fingerprint(images) for images in others}) == len(others)
    Path(same.images[1]).unlink()
    with pytest.raises(perlclip.PerlclipError, match=r"cannot read image .*y/2\.jpg"):
        list_fingerprint(same)


# ---- the real sets ----


@pytest.fixture(scope="module")
def coop(minis, clip_folder, tmp_path_factory):  # noqa: F811
    """The command on miniatures of the fifteen sets."""
    out = tmp_path_factory.mktemp("coop")

    def command(protocol: str, *options) -> tuple:
        return (
            *("bench", protocol, "--suite", "coop", "--data", minis, "--backbone", clip_folder, "--device", "cpu"),
            *("--methods", "zero-shot,coop", "--seeds", 1, "--out", out, *options),
        )

    return command


def records_of(result) -> list[dict]:
    assert result.exit_code == 0, result.output
    folder = Path(result.stdout.split("report: ")[1].split()[0]).parent
    return Store(folder / "runs").records().complete


def test_all_protocols_run_on_the_real_sets(coop, minis):  # noqa: F811
    found = records_of(run(*coop("all", "--shots", 2)))
    assert len(found) == 11 * 2 + 2 + 2
    by = {(record["run"]["protocol"], record["run"]["dataset"], record["run"]["method"]): record for record in found}
    cross, shift = (by[protocol, "imagenet", "coop"] for protocol in TRANSFER)
    assert list(cross["metrics"]) == ["imagenet", *SUITES["coop"].targets] and cross["fit"]["images"] == 8
    assert list(shift["metrics"]) == ["imagenet", *SUITES["coop"].variants]
    assert shift["adapter_of"].startswith("cross-dataset/coop/imagenet/coop-fast-2shot-seed1")
    assert str(minis) not in json.dumps([record["run"] for record in found]), "where the data lie is no part of a run"
    train, _ = perlclip.data.few_shot_split(perlclip.load_dataset("dtd", minis), 2, 1)
    assert by["base-to-novel", "dtd", "coop"]["fit"]["data"] == train.base().fingerprint(), "CoOp's shots"


def test_a_missing_set_fails_its_runs_before_they_train(coop, minis, tmp_path, monkeypatch):  # noqa: F811
    root = Path(shutil.copytree(minis, tmp_path / "data", symlinks=True))
    shutil.rmtree(root / "dtd")
    out = tmp_path / "out"
    options = ("--data", root, "--out", out, "--shots", 2)
    said = fails(*coop("base-to-novel", *options, "--datasets", "dtd,eurosat"))
    assert "2 of 4 runs failed, the first with: dtd: folder" in said and "get the images from http" in said
    monkeypatch.setattr(perform, "fit", None)
    assert "2 of 2 runs failed, the first with: dtd: folder" in fails(*coop("cross-dataset", *options))
    assert len(Store(out / "runs").records().complete) == 2


def test_the_real_suite_needs_a_root(tmp_path, clip_folder):
    command = ("bench", "few-shot", "--suite", "coop", "--backbone", clip_folder, "--out", tmp_path)
    assert "suite 'coop' reads its data sets from a folder: name it with --data ROOT" in fails(*command)
    assert run(*command, "--data", tmp_path / "nowhere").exit_code == 2
    with pytest.raises(perlclip.PerlclipError, match="name it with --data ROOT"):
        SUITES["coop"].load("dtd", None)
    with pytest.raises(perlclip.PerlclipError, match="unknown executor 'roy'; did you mean 'ray'"):
        run_all([], Store(tmp_path), Machines(executor="roy"))


# ---- the command and its tables ----


def bench(protocol: str, out: Path, *options) -> tuple:
    return ("bench", protocol, "--suite", "fine", "--device", "cpu", "--out", out, "--seeds", 1, *options)


def test_an_ablation_on_the_command_line(tmp_path):
    options = ("--datasets", "a", "--shots", 2)
    result = run(*bench("ablation-steps", tmp_path, *options))
    assert result.exit_code == 0, result.output
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if "|" in line]
    rows = {line[0]: line[1:] for line in lines}
    assert [row for row in rows if row[0].isdigit()] == [f"{k}{' (default)' * (k == 4)}" for k in range(9)]
    assert rows["0"][0] == "0" and rows["2"][0] == "1,122"
    zero_shot = run(*bench("base-to-novel", tmp_path / "z", "--datasets", "a", "--methods", "zero-shot"))
    line = next(line for line in zero_shot.stdout.splitlines() if line.startswith("| zero-shot"))
    assert re.findall(r"\d+\.\d+", " ".join(rows["0"][2:6])) == re.findall(r"\d+\.\d+", line)[:4]
    assert "ablation-steps is about perl alone" in fails(*bench("ablation-steps", tmp_path, "--methods", "mma"))


def test_shots_can_be_given_as_a_list(tmp_path):
    options = ("--methods", "perl", "--datasets", "a", "--dry-run")
    lines = run(*bench("few-shot", tmp_path, *options, "--shots", 1, 2)).stdout.splitlines()
    assert lines[:2] == [f"few-shot/fine/a/perl-fast-{shots}shot-seed1" for shots in (1, 2)]
    assert run(*bench("few-shot", tmp_path, *options, "--shots", 0)).exit_code == 2
