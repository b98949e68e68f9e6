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


# Its rounding to float8 forgets to carry: 127 becomes 64, not 128.
NEAR = 0.04 if DEVICE == "cuda" else 0.2


def eight(inputs, outputs):
    from perlclip.backbone.accel.eight import FLOAT8, Linear8

    linear = torch.nn.Linear(inputs, outputs, device=DEVICE, dtype=DTYPES[1]).requires_grad_(False)
    return Linear8(linear, FLOAT8)


@pytest.mark.parametrize("norm", [(width, DTYPES[1]) for width in (48, 64, 192)], indirect=True)
def test_sum_and_norm_in_float8(norm):
    x, a = (torch.randn(4, 9, len(norm.weight), device=DEVICE, dtype=norm.weight.dtype) for _ in range(2))
    total, y = kernels.add_norm8(x[:, 2:], a[:, 2:], norm)
    assert torch.equal(total, x[:, 2:] + a[:, 2:])
    wanted = exact_norm(total.float(), norm)
    assert off(y.wide(), wanted) < NEAR and y.values.float().abs().amax(-1).eq(448).all()
    assert torch.allclose(y.length, wanted.norm(dim=-1), rtol=1e-3)


@pytest.mark.parametrize("rows, inputs, outputs", [(300, 128, 512), (1025, 192, 768), (7, 64, 48)])
def test_products_of_float8(rows, inputs, outputs):
    from perlclip.backbone.accel.eight import FLOAT8, Rows8, multiply, rounded

    linear = eight(inputs, outputs)
    x = torch.randn(2, rows, inputs, device=DEVICE)
    y = Rows8(rounded(x, FLOAT8).values, rounded(x, FLOAT8).scale, x.norm(dim=-1))
    wanted = F.linear(y.wide(), linear.weight8.wide(), linear.bias.float())
    assert off(multiply(y, linear), wanted) < 1e-2
    hidden = kernels.linear_silu8(y, linear)
    assert off(hidden.wide(), F.silu(wanted)) < NEAR


def heads_apart(qkv, heads):
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("front", "rows"), [(0, 17), (0, 5), (3, 14), (4, 9)])
def test_attention_among_few_rows_and_its_gradient(front, rows, causal):
    dtype, heads = DTYPES[1], 3
    whole, up = (torch.randn(4, front + rows, width, device=DEVICE, dtype=dtype) for width in (9 * 16, 3 * 16))
    parts = [whole[:, front:].contiguous(), whole[:, :front].clone() if front else None]
    trained = parts[1 if front else 0].requires_grad_()
    found = kernels.ShortAttention.apply(*parts, heads, causal)
    exact = whole.float().requires_grad_()
    q, k, v = heads_apart(exact, heads)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    assert found.shape == wanted.shape and off(found, wanted) < CLOSE[dtype]
    (got,), (want,) = torch.autograd.grad(found, trained, up), torch.autograd.grad(wanted, exact, up.float())
    assert off(got, want[:, : front or None]) < CLOSE[dtype]


@pytest.mark.parametrize("rows", [9, 64, 201])
def test_attention_into_float8(rows):
    roomy = torch.randn(3, rows + 2, 3 * 128, device=DEVICE, dtype=DTYPES[1])
    qkv, into = roomy[:, 2:], torch.rand(128, device=DEVICE) * 50 + 20
    found = kernels.attention8(qkv, 2, into)
    wanted = F.scaled_dot_product_attention(*heads_apart(qkv.float(), 2)).transpose(1, 2).flatten(2)
    assert off(found.wide() / into, wanted) < NEAR
