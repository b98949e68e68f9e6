"""Products and attention of CPUs against torch's own."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone.accel import processor
from perlclip.backbone.accel.fused import attention
from perlclip.backbone.accel.processor import FrozenLinear, has_onednn

needs_onednn = pytest.mark.skipif(not has_onednn(), reason="no products of oneDNN's that are worth it here")


def layer(inputs: int, outputs: int, bias: bool = True) -> FrozenLinear:
    return FrozenLinear(inputs, outputs, bias=bias).requires_grad_(False)


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300, 96), (4, 66, 96), (1, 300, 96)])
def test_a_frozen_layer_is_the_plain_one_forth_and_back(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = layer(96, 128, bias), torch.randn(shape, requires_grad=True)
    made = []
    plain = processor.product
    monkeypatch.setattr(processor, "product", lambda *given: made.append(given) or plain(*given))
    out = linear(x)
    along = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, along)
    assert len(made) == 2  # by oneDNN, both ways
    wanted = F.linear(x, linear.weight, linear.bias)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, x, along)[0], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(linear(x), wanted, atol=1e-5, rtol=1e-5)


@needs_onednn
@pytest.mark.parametrize("case", ["few rows", "half precision", "trained", "autocast"])
def test_other_layers_are_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "product", lambda *_: pytest.fail("by oneDNN"))
    linear, x = layer(96, 128), torch.randn(2 if case == "few rows" else 300, 96)
    if case == "half precision":
        linear, x = linear.bfloat16(), x.bfloat16()
    linear.requires_grad_(case == "trained")
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        out = linear(x)
    if case == "trained":
        out.sum().backward()
        assert linear.weight.grad is not None


def plain(qkv_BNE: Tensor, heads: int, causal: bool) -> Tensor:
    B, N, _ = qkv_BNE.shape
    q, k, v = qkv_BNE.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("front", "own"), [(0, True), (3, False), (3, True), (1, False)])
@pytest.mark.parametrize("rows", [1, 9, 60])
@pytest.mark.parametrize("sharp", [1.0, 2.0])
def test_the_way_back_through_attention_is_as_near_to_the_truth_as_torchs(
    sharp: float, rows: int, front: int, own: bool, causal: bool
) -> None:
    B, heads, d = 3, 2, 16
    generator = torch.Generator().manual_seed(rows + front)
    turned = torch.cat([torch.full((2 * heads * d,), sharp), torch.ones(heads * d)])  # queries and keys
    given = [(turned * torch.randn(B, n, 3 * heads * d, generator=generator)).bfloat16() for n in (rows, front)]
    along_BND = torch.randn(B, front + rows, heads * d, generator=generator).bfloat16()
    wanted = [own, front > 0]

    def gradients(dtype: torch.dtype, by_us: bool) -> tuple[Tensor, list[Tensor]]:
        own_BNE, front_BkE = (t.to(dtype).requires_grad_(w) for t, w in zip(given, wanted, strict=True))
        if by_us:
            used = front_BkE if front else None
            out = attention(own_BNE, heads, causal, nn.Linear(1, 1), used)
            assert isinstance(out, Tensor) and out.grad_fn is not None and "_Attention" in out.grad_fn.name()
        else:
            out = plain(torch.cat([front_BkE, own_BNE], 1), heads, causal)
        asked = [t for t, w in zip((own_BNE, front_BkE), wanted, strict=True) if w]
        return out, list(torch.autograd.grad(out, asked, along_BND.to(dtype)))

    truth, ours, torchs = (
        gradients(*how) for how in ((torch.float64, False), (torch.bfloat16, True), (torch.bfloat16, False))
    )
    torch.testing.assert_close(ours[0], torchs[0])
    for mine, theirs, true in zip(ours[1], torchs[1], truth[1], strict=True):
        errors = [((each.double() - true).norm() / true.norm().clamp(min=1e-3)).item() for each in (mine, theirs)]
        assert errors[0] < max(2 * errors[1], 0.006)


def test_frozen_rows_get_no_gradient_and_large_batches_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    own_BNE = torch.randn(2, 5, 3 * 32).bfloat16()
    front_BkE = torch.randn(2, 1, 3 * 32).bfloat16().requires_grad_()
    out = processor.attended(own_BNE, front_BkE, 2, False)
    assert out is not None
    out.float().sum().backward()
    assert own_BNE.grad is None and front_BkE.grad is not None and front_BkE.grad.shape == front_BkE.shape
    monkeypatch.setattr(processor, "MATRIX", 2 * 2 * 6**2 - 1)
    assert processor.attended(own_BNE, front_BkE, 2, False) is None
    assert processor.attended(own_BNE.float(), front_BkE.float(), 2, False) is None
