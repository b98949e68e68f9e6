"""Which kernels are used: each one is tried by itself before it is."""

import sys
import types

import pytest
import torch

from perlclip.backbone.accel import fused


def test_each_kernel_is_probed_by_itself(monkeypatch):
    """Only one of them used to be: a card on which another fails would have stopped in the middle of a training."""

    def fails(device):
        raise RuntimeError("no such instruction\nmore about it")

    probed = types.SimpleNamespace(PROBES={"add_norm": lambda device: None, "linear_silu": fails})
    monkeypatch.setitem(sys.modules, "perlclip.backbone.accel.kernels", probed)
    monkeypatch.setattr("perlclip.backbone.accel.kernels", probed, raising=False)
    fused.works.cache_clear()
    device = torch.device("cpu")
    assert fused.works("add_norm", device)
    with pytest.warns(RuntimeWarning, match="the fused kernel linear_silu does not work here.*no such instruction$"):
        assert not fused.works("linear_silu", device)
    fused.works.cache_clear()
