"""What benchmarks claim of themselves."""

import torch

import perlclip
from benchmarks.stacked import Member, Setting, Stack, state_of
from tests.test_threads import pictures


def test_a_stack_takes_the_steps_of_fit(backbone):
    """Three PERLs in one batch, of two seeds, rates, losses and batch sizes: each as if trained alone."""
    depths = dict(vision_depth=9, text_depth=8)
    shots = pictures(3, 16, ("cat", "striped horse"))
    members = [
        Member(Setting(lr=3e-3, epochs=2, loss_scale=0.25, **depths), 1),
        Member(Setting(lr=1e-3, epochs=2, schedule="constant", batches=2, anchor=4.0, **depths), 1),
        Member(Setting(lr=3e-3, epochs=2, average=True, **depths), 2),
    ]
    stack = Stack(backbone, members, {1: shots, 2: shots}, [])
    stack.train()
    for i, (setting, seed) in enumerate((member.setting, member.seed) for member in members):
        given = dict(loss_scale=setting.loss_scale, anchor=setting.anchor, **depths)
        method = perlclip.create_method("perl", backbone, seed=seed, **given)
        recipe = perlclip.Recipe(**vars(setting.recipe) | {"batch_size": 4 * setting.batches})
        perlclip.fit(method, shots, recipe=recipe, seed=seed, head=False, thresholds=False, progress=False)
        found = state_of(stack, i)
        for name, p in method.named_parameters():
            torch.testing.assert_close(found[name], p.detach(), atol=2e-5, rtol=0)
