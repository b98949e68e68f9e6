"""What benchmarks claim of themselves."""

from dataclasses import replace

import torch

import perlclip
from benchmarks.everyone import Table, collect
from benchmarks.stacked import Member, Setting, Stack, state_of
from perlclip.bench.store import Run, Store, complete_record
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
