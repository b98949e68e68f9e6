"""What benchmarks claim of themselves."""

from dataclasses import replace

import torch

import perlclip
from benchmarks import new_classes
from benchmarks.everyone import Table, collect
from benchmarks.new_classes import alone, among, rows
from benchmarks.stacked import Member, Setting, Stack, state_of
from benchmarks.strong import split
from perlclip.adapters.folder import Adapter
from perlclip.bench.store import Run, Store, complete_record
from perlclip.data.loading import fixed_views
from perlclip.data.toybox import load_toybox
from perlclip.heads.answering import Answering
from perlclip.training.shots import center_of
from tests.common import UNSEEN, gaussian_head, loud
from tests.test_threads import pictures


def test_a_stack_takes_the_steps_of_fit(backbone):
    """Three PERLs in one batch, of two seeds, rates, losses and batch sizes: each as if trained alone."""
    depths = dict(vision_depth=9, text_depth=8)
    shots = pictures(3, 16, ("cat", "striped horse"))
    members = [
        Member(Setting(lr=3e-3, epochs=2, loss_scale=0.25, **depths), 1),
        Member(Setting(lr=1e-3, epochs=2, schedule="constant", batches=2, anchor=4.0, **depths), 1),
        Member(Setting(lr=3e-3, epochs=2, average=True, center=0.5, **depths), 2),
    ]
    stack = Stack(backbone, members, {1: shots, 2: shots}, [])
    stack.train()
    for i, (setting, seed) in enumerate((member.setting, member.seed) for member in members):
        given = dict(
            loss_scale=setting.loss_scale, anchor=setting.anchor, center=0.75, loss_center=setting.center, **depths
        )
        method = perlclip.create_method("perl", backbone, seed=seed, **given)
        recipe = perlclip.Recipe(**vars(setting.recipe) | {"batch_size": 4 * setting.batches})
        perlclip.fit(method, shots, recipe=recipe, seed=seed, head=False, thresholds=False, progress=False)
        found = state_of(stack, i)
        for name, p in method.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), atol=2e-5, rtol=0)


def test_one_look_at_images_answers_for_every_rule_and_list(monkeypatch):
    """As an adapter with that rule does, asked for itself; the rule that it was made with among them."""
    tiny, data = perlclip.load_backbone("tiny", device="cpu"), load_toybox("tiny_toys")
    few = replace(data, train=data.train.select(range(0, len(data.train), 24)), val=data.val.select([]))
    method = loud(perlclip.create_method("perl", tiny, readout="mean", center=0.75)).eval()
    shots = split(few, 1, 2)
    method.take_center(center_of(method, shots["train"]))
    head = gaussian_head(tiny, shots["train"].class_names, unseen=replace(UNSEEN, gained=(0.0, 1.0, 2.0, 2.0, 2.0)))
    adapter = Adapter(method=method, class_names=head.class_names, template=data.train.template, head=head)
    monkeypatch.setattr(new_classes, "WEIGHTS", (0.0, 0.5))
    found = {(kind, rule): halves for kind, rule, *halves in rows(adapter, few, 1, 2)}
    assert len(found) == 3 + 3
    asked = {"base": shots["base"], "novel": shots["novel"]}
    pixels = {half: next(fixed_views(images, tiny.preprocess, 64, tiny.device))[0] for half, images in asked.items()}
    lists = {"new classes": shots["novel"].classes, "all classes": few.train.classes}
    states = {kind: method.class_state(classes, novel=True) for kind, classes in lists.items()}
    for (kind, rule), halves in found.items():
        unseen = (alone if kind == "new classes" else among)(head.unseen)[rule]
        answering = Answering(method, states[kind], replace(head, unseen=unseen))
        for half, accuracy in zip(("base", "novel"), halves, strict=True):
            shift = len(head.class_names) if (kind, half) == ("all classes", "novel") else 0
            labels_N = torch.tensor([int(label) + shift for label in asked[half].labels])
            right_N = answering.logits(pixels[half]).argmax(-1) == labels_N
            assert accuracy is None or accuracy == 100 * right_N.double().mean().item(), (kind, rule, half)
    assert len({novel for (kind, _), (_, novel) in found.items() if kind == "new classes"}) > 1, "rules differ"


def test_a_table_has_the_seconds_of_the_training_whose_adapter_a_row_took(tmp_path):
    """Without those of a head that it does not have; what the file had of other runs stays."""
    headed = Run(
        protocol="base-to-novel", suite="toybox", dataset="tiny_toys", method="perl", recipe="strong", shots=16, seed=1,
        head=True,
    )  # fmt: skip
    plain, clip = replace(headed, head=False), replace(headed, method="zero-shot", recipe="none", head=False, seed=0)
    store, out = Store(tmp_path / "runs"), tmp_path / "table.csv"
    for run, seconds, taken in (
        (headed, {"fit": 8.0, "head": 3.0, "eval": 1.0}, None),
        (plain, {"fit": 0.0, "eval": 1.0}, headed.name),
        (replace(plain, dataset="gray_toys"), {"fit": 0.0, "eval": 1.0}, "gone"),
        (clip, {"fit": 0.0, "eval": 1.0}, None),
    ):
        rest = dict(backbone="", recipe={}, config={}, parameters=7, predictions={}, seconds=seconds, adapter_of=taken)
        store.write(run, complete_record(run, metrics={"base": {"accuracy": 50.0}}, **rest))
    out.write_text(
        "set,shots,seed,row,test,accuracy,numbers,seconds\nold,16,1,mma original,base-to-novel base,70.0,5,2.5\n"
    )
    for _ in range(2):  # and again, over itself
        collect([tmp_path / "runs"], out, few_shot=False)
    assert Table(out).seconds == {
        "perl strong + head": [11.0], "perl strong": [8.0], "zero-shot": [0.0], "mma original": [2.5],
    }  # fmt: skip
    assert len(out.read_text().splitlines()) == 6


def test_rows_are_compared_by_the_seeds_that_both_have(tmp_path):
    """One with five seeds and one with three; tables of means have seeds 1 to 3 of either."""
    path = tmp_path / "table.csv"
    lines = [f"a,16,{seed},long,base-to-novel base,{50 + seed},5,1.0" for seed in range(1, 6)]
    lines += [f"a,16,{seed},short,base-to-novel base,{40 + 2 * seed},5,1.0" for seed in range(1, 4)]
    lines += ["a,0,0,zero-shot,base-to-novel base,30,0,0.0"]
    path.write_text("\n".join(["set,shots,seed,row,test,accuracy,numbers,seconds", *lines, ""]))
    table, test = Table(path), "base-to-novel base"
    assert table.gains("long", "short", test) == {"a": 8.0} and table.by_set("long", test) == {"a": 52.0}
    assert table.gains("long", "zero-shot", test) == {"a": 23.0}, "which has no seeds: all five count"
