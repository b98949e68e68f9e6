"""The Triton kernels against torch: on a GPU, or without one in Triton's interpreter.

    pip install triton && TRITON_INTERPRET=1 pytest tests/backbone/test_kernels.py

`make test` skips them where there is no GPU, as Triton is a gigabyte.
"""

import contextlib
import os
import types

import pytest
import torch
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs CUDA, or Triton and TRITON_INTERPRET=1", allow_module_level=True)

kernels = pytest.importorskip("perlclip.backbone.accel.kernels")

# The interpreter knows no bfloat16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    """What a kernel asks of its card."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        properties = types.SimpleNamespace(multi_processor_count=3)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def off(found, wanted) -> float:
    return ((found.float() - wanted).norm() / wanted.norm()).item()


@pytest.fixture
def norm(request):
    width, dtype = request.param
    norm = torch.nn.LayerNorm(width, device=DEVICE, dtype=dtype).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return norm


def exact_norm(x, norm):
    return F.layer_norm(x, norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)


@pytest.mark.parametrize("norm", [(width, dtype) for width in (48, 64, 100) for dtype in DTYPES], indirect=True)
def test_sum_and_norm(norm):
    dtype, width = norm.weight.dtype, norm.weight.shape[0]
    x, a = (torch.randn(4, 9, width, device=DEVICE, dtype=dtype) for _ in range(2))
    for rows in (slice(None), slice(2, None)):  # also a part of longer sequences
        total, y = kernels.add_norm(x[:, rows], a[:, rows], norm)
        assert torch.equal(total, x[:, rows] + a[:, rows])
        assert off(y, exact_norm(total.float(), norm)) < CLOSE[dtype]
    flat, y_flat = kernels.add_norm(x.flatten(0, 1), a.flatten(0, 1), norm)
    assert torch.equal(flat, (x + a).flatten(0, 1)) and y_flat.shape == flat.shape


@pytest.mark.parametrize("norm", [(48, dtype) for dtype in DTYPES], indirect=True)
def test_gradient_of_sum_and_norm(norm):
    dtype = norm.weight.dtype
    x, a, up, down = (torch.randn(4, 9, 48, device=DEVICE, dtype=dtype) for _ in range(4))
    mine = [tensor.clone().requires_grad_() for tensor in (x, a)]
    total, y = kernels.AddNorm.apply(*mine, norm)
    got = torch.autograd.grad((total * up).sum() + (y * down).sum(), mine)
    theirs = [tensor.float().requires_grad_() for tensor in (x, a)]
    plain = theirs[0] + theirs[1]
    want = torch.autograd.grad((plain * up.float()).sum() + (exact_norm(plain, norm) * down.float()).sum(), theirs)
    for found, wanted in zip(got, want, strict=True):
        assert off(found, wanted) < CLOSE[dtype]


@pytest.mark.parametrize("rows", [300, 128 * 8 + 1])
def test_product_with_activation(rows):
    linear = torch.nn.Linear(128, 512, device=DEVICE, dtype=torch.float16).requires_grad_(False)
    y = torch.randn(rows, 128, device=DEVICE, dtype=torch.float16)
    want = F.silu(F.linear(y.float(), linear.weight.float(), linear.bias.float()))
    found = kernels.linear_silu(y[None], linear)
    assert found.shape == (1, rows, 512) and off(found[0], want) < CLOSE[torch.float16]
