"""Compiling, as far as it can be seen without a GPU: when something is recorded, and what happens when it cannot be.

What a recording computes is compared in `test_cuda.py`, where there is a card.
"""

import warnings

import pytest
import torch

import perlclip
from perlclip.backbone.accel import cuda_graphs as graphs
from perlclip.backbone.accel.cuda_graphs import Beside, Compiled, graph_size, is_on
from perlclip.data import load_images

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_on_for_cuda_and_off_elsewhere():
    assert [is_on(mode, CUDA) for mode in ("auto", "on", "off")] == [True, True, False]
    assert [is_on(mode, CPU) for mode in ("auto", "off")] == [False, False]
    with pytest.raises(perlclip.PerlclipError, match="compile='on' needs a CUDA device, not cpu"):
        is_on("on", CPU)
    with pytest.raises(perlclip.PerlclipError, match="unknown value of compile: 'yes'"):
        is_on("yes", CPU)


def test_a_shape_is_recorded_when_it_has_come_often_enough(tape):
    compiled = Compiled(lambda x: [2 * x], CUDA, after=3)
    small, large = torch.ones(2), torch.ones(5)
    for x in (small, large, small, small, small, large):
        torch.testing.assert_close(compiled(x)[0], 2 * x)
    assert (tape.made, tape.played) == (1, 2), "the large one has come twice only"
    compiled(large)
    assert (tape.made, tape.played) == (2, 3) and compiled.seconds > 0
    compiled.forget()
    for _ in range(3):
        compiled(small)
    assert tape.made == 3, "what was recorded before is not used any more"


def test_sizes_of_graphs_are_few():
    assert {graph_size(n) for n in range(1, 257)} == {1, 2, 4, 8, 16, 32, 64, *range(80, 257, 16)}
    assert {graph_size(n, coarse=True) for n in range(1, 257)} == {1, 2, 4, 8, 16, 32, 64, 128, 192, 256}
    assert all(graph_size(n) >= n for n in range(1, 257))


def test_nothing_is_recorded_on_a_cpu(tape):
    compiled = Compiled(lambda x: [x + 1], CPU, after=1)
    assert compiled(torch.zeros(1))[0].item() == 1 and (tape.made, compiled.seconds) == (0, 0.0)


def test_what_cannot_be_recorded_runs_as_it_is_with_one_warning(tape, monkeypatch):
    def fails(work, inputs, pool):
        if len(inputs[0]) == 2:
            return tape(work, inputs)
        raise RuntimeError("CUDA error: operation not permitted\nmore of it")

    monkeypatch.setattr(graphs, "Recorded", fails)
    compiled = Compiled(lambda x: [x + 1], CUDA, after=1)
    with pytest.warns(RuntimeWarning, match="not compiled, going on without: CUDA error: operation not permitted$"):
        assert compiled(torch.zeros(1))[0].item() == 1
    assert compiled.failed and compiled.on
    assert compiled(torch.zeros(2))[0].tolist() == [1, 1], "other shapes may be recorded"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no second one
        assert compiled(torch.zeros(1))[0].item() == 1


def test_an_error_of_the_work_itself_is_not_hidden(tape):
    def refuses(x):
        raise perlclip.PerlclipError("nothing reaches the loss")

    with pytest.raises(perlclip.PerlclipError, match="nothing reaches the loss"):
        Compiled(refuses, CUDA, after=1)(torch.zeros(1))


def test_work_beside_is_work_in_order_where_there_is_no_graph():
    with Beside(CPU) as side:
        x = torch.ones(3)
    side.join()
    assert x.sum() == 3


def test_fit_says_what_compiling_cost_and_refuses_nonsense(backbone, tree):
    images = load_images(tree)
    method = perlclip.create_method("perl", backbone)
    with pytest.raises(perlclip.PerlclipError, match="unknown value of compile: 'fast'"):
        perlclip.fit(method, images, compile="fast", progress=False)
    assert perlclip.fit(method, images, progress=False).compile_seconds == 0.0


def test_a_classifier_records_powers_of_two_and_forgets_old_weights(backbone, tree, tape):
    images = load_images(tree)
    method = perlclip.create_method("perl", backbone)
    plain, compiled = (perlclip.Classifier(method, images.class_names) for _ in range(2))
    compiled._compiled.on = True  # as on CUDA

    def check(*sizes):
        for size in sizes:
            want, got = (c.predict(images.images[:size], top_k=2) for c in (plain, compiled))
            for a, b in zip(want, got, strict=True):
                assert a.label == b.label and abs(a.probability - b.probability) < 1e-5

    check(1, 1, 1, 3, 4, 3)
    assert tape.made == 2, "sizes 1 and 4; 3 is 4 with one more"
    with torch.no_grad():
        method.projectors["vision"].up.bias.add_(1.0)
    check(1, 1)
    assert tape.made == 3
