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
step_kernels = pytest.importorskip("perlclip.backbone.accel.step_kernels")

# The interpreter knows no bfloat16.
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16, torch.float32]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def no_card(monkeypatch):
    """What a kernel asks of its card."""
    torch.manual_seed(0)  # some draws have gradients that float16 can hardly hold
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


def gradients_agree(found, wanted, mine, theirs, close: float) -> None:
    """The same gradient of a random sum of the results, for each of the inputs."""
    ups = [torch.randn_like(each).float() for each in found]
    got = torch.autograd.grad(sum((each.float() * up).sum() for each, up in zip(found, ups, strict=True)), mine)
    want = torch.autograd.grad(sum((each * up).sum() for each, up in zip(wanted, ups, strict=True)), theirs)
    for found_one, wanted_one in zip(got, want, strict=True):
        assert found_one.shape == wanted_one.shape and off(found_one, wanted_one) < close


@pytest.mark.parametrize(
    ("rows", "width", "rank"), [(5, 96, 1), (1, 768, 1), (131, 48, 3), (100, 48, 1), (7, 64, 17), (3, 768, 8)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thought_and_its_gradients(dtype, rows, width, rank):
    from perlclip.methods.perl import Projector

    phi = Projector(width, rank, "torch").to(DEVICE)
    torch.nn.init.normal_(phi.norm.weight)
    torch.nn.init.normal_(phi.norm.bias)
    h = torch.randn(rows, width, device=DEVICE, dtype=dtype).add_(3).requires_grad_()
    exact = h.detach().float().requires_grad_()
    for wide in (dtype, torch.float32):
        found, wanted = step_kernels.Think.apply(h, phi.numbers(), rank, phi.norm.eps, wide), phi(exact)
        assert found.dtype == wide and off(found, wanted) < CLOSE[wide]
        own = [h, *phi.parameters()]
        gradients_agree([found], [wanted], own, [exact, *phi.parameters()], CLOSE[dtype])


def test_gradients_of_thoughts_are_the_same_every_time():
    h, up, w = (torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((70, 48), (70, 2, 48), (241,)))

    def made():
        z = step_kernels.Think.apply(h, w, 1, 1e-5, torch.float32)
        return torch.autograd.grad(z, (h, w), up.detach()[:, 1])  # a part of longer rows

    assert all(torch.equal(one, other) for one, other in zip(made(), made(), strict=True))


@pytest.mark.parametrize("norm", [(width, dtype) for width in (96, 768) for dtype in DTYPES], indirect=True)
def test_rows_that_enter_a_sequence_and_their_gradient(norm):
    dtype, width = norm.weight.dtype, norm.weight.shape[0]
    parts = [torch.randn(3, rows, width, device=DEVICE, dtype=dtype).add_(2).requires_grad_() for rows in (2, 5)]
    exact = [each.detach().float().requires_grad_() for each in parts]
    found, wanted = step_kernels.Enter.apply(*parts, norm), (torch.cat(exact, 1), exact_norm(exact[0], norm))
    assert torch.equal(found[0], wanted[0].to(dtype)) and off(found[1], wanted[1]) < CLOSE[dtype]
    gradients_agree(found, wanted, parts, exact, CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [512, 96, 50])
def test_rows_at_unit_length_and_their_gradient(dtype, width):
    x = torch.randn(7, width, device=DEVICE, dtype=dtype)
    x[3] = 0
    mine, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
    found, wanted = step_kernels.Unit.apply(mine), F.normalize(theirs, dim=-1)
    assert found.dtype == torch.float32 and off(found, wanted) < 1e-6 and not found[3].any()
    kept = [0, 1, 2, 4, 5, 6]  # a row of zeros is multiplied by 1e12
    gradients_agree([found[kept]], [wanted[kept]], [mine], [theirs], CLOSE[dtype])


def read_plainly(x, y, read, qkv, heads, causal):
    """A whole attention, then the row."""
    q, k, v = heads_apart(F.linear(y, qkv.weight.float(), qkv.bias.float()), heads)
    each = torch.arange(len(x), device=DEVICE)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
    return x[each, read], attended[each, read]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "heads"), [(1, 32, 2), (9, 96, 3), (17, 48, 1), (40, 192, 12), (16, 384, 24)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_row_that_is_read_and_its_gradient(dtype, rows, width, heads, causal):
    qkv = torch.nn.Linear(width, 3 * width, device=DEVICE, dtype=dtype).requires_grad_(False)
    read = torch.tensor([0, rows - 1, rows // 2, 0, 1 % rows], device=DEVICE)
    x, y = (torch.randn(5, rows, width, device=DEVICE, dtype=dtype).mul_(2).requires_grad_() for _ in range(2))
    exact = [each.detach().float().requires_grad_() for each in (x, y)]
    found = step_kernels.Read.apply(x, y, read, qkv, heads, causal)
    wanted = read_plainly(*exact, read, qkv, heads, causal)
    assert torch.equal(found[0], wanted[0].to(dtype)) and off(found[1], wanted[1]) < CLOSE[dtype]
    gradients_agree(found, wanted, [x, y], exact, 2 * CLOSE[dtype])


@pytest.mark.parametrize("variant", ["shared", "step"])
def test_a_training_step_of_kernels_has_the_plain_ones_gradients(variant, monkeypatch):
    """All of them together, in both towers."""
    import perlclip
    from perlclip.backbone.accel import fused

    method = perlclip.create_method("perl", perlclip.load_backbone("tiny", device=DEVICE), steps=2, variant=variant)
    state = method.class_state(["cat", "a long name"])
    pixels = torch.randn(1, 3, *[method.backbone.preprocess.size] * 2, device=DEVICE)

    def gradients():
        loss = method.loss(pixels, torch.tensor([1], device=DEVICE), state)
        return [loss.detach(), *torch.autograd.grad(loss, list(method.parameters()))]

    taken, wanted = set(), gradients()
    monkeypatch.setattr(fused, "has_kernel", lambda name, x: taken.add(name) or True)
    for got, want in zip(gradients(), wanted, strict=True):
        assert off(got, want) < (1e-4 if DEVICE == "cpu" else 1e-2)  # cards round float32 before they multiply
    assert taken == {"think", "enter", "read", "unit", "add_norm", "add_norm_training", "attention"}
