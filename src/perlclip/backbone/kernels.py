"""Triton kernels behind `fused.py`; imported only on CUDA, as only its builds of torch bring Triton."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, import-not-found"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.3
    TensorDescriptor = None

TILE: dict[str, Any] = dict(BM=128, BN=256, BK=64, GROUP=8, HALVES=False, num_warps=8, num_stages=3)


@triton.jit
def _add_norm(x_ptr, a_ptr, weight_ptr, bias_ptr, sum_ptr, y_ptr, D, N, stride_b, stride_n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    x = tl.load(x_ptr + (row // N).to(tl.int64) * stride_b + (row % N) * stride_n + columns, mask=inside, other=0.0)
    here = row.to(tl.int64) * D + columns
    a = tl.load(a_ptr + here, mask=inside, other=0.0)
    total = (x.to(tl.float32) + a.to(tl.float32)).to(x.dtype)
    tl.store(sum_ptr + here, total, mask=inside)
    total = total.to(tl.float32)
    centred = tl.where(inside, total - tl.sum(total) / D, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / D + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + here, (centred * scale * weight + bias).to(x.dtype), mask=inside)


def add_norm(x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + a and its norm, a row a program; x may be a part of longer sequences."""
    D = x.shape[-1]
    if x.ndim != 3 or x.stride(-1) != 1:
        x = x.reshape(1, -1, D)
    total = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    y = torch.empty_like(total)
    block = triton.next_power_of_2(D)
    _add_norm[(a.numel() // D,)](
        x, a.contiguous(), norm.weight, norm.bias, total, y, D, x.shape[1], x.stride(0), x.stride(1), norm.eps,
        BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip
    return total, y


@triton.jit
def _linear_silu(
    y_desc, w_desc, bias_ptr, out_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, HALVES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A persistent product: each program takes tile after tile, in groups of rows that share the weights in cache."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first = tile // (GROUP * tiles_n) * GROUP
        rows = min(tiles_m - first, GROUP)
        m = (first + tile % (GROUP * tiles_n) % rows) * BM
        n = tile % (GROUP * tiles_n) // rows * BN
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(y_desc.load([m, k]), w_desc.load([n, k]).T, total)
        total += tl.load(bias_ptr + n + tl.arange(0, BN))[None, :].to(tl.float32)
        total = total * tl.sigmoid(total)
        if HALVES:  # less shared memory for the way out, more for the way in
            left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
            out_desc.store([m, n], left.to(bias_ptr.dtype.element_ty))
            out_desc.store([m, n + BN // 2], right.to(bias_ptr.dtype.element_ty))
        else:
            out_desc.store([m, n], total.to(bias_ptr.dtype.element_ty))


def can_multiply(linear: nn.Linear) -> bool:
    """Whether `linear_silu` takes this layer: whole tiles of it, and a card with Hopper's copy engine."""
    N, K = linear.weight.shape
    hopper = torch.cuda.get_device_capability(linear.weight.device) >= (9, 0)
    return TensorDescriptor is not None and hopper and N % TILE["BN"] == 0 and K % TILE["BK"] == 0


def linear_silu(y: Tensor, linear: nn.Linear, tile: dict[str, Any] = TILE) -> Tensor:
    """silu(W y + b): a matrix product with the activation before its result is written."""
    y_MK = y.reshape(-1, y.shape[-1])
    (M, K), N = y_MK.shape, len(linear.weight)
    out_MN = y.new_empty(M, N)
    BM, BN, BK = tile["BM"], tile["BN"], tile["BK"]
    programs = torch.cuda.get_device_properties(y.device).multi_processor_count
    _linear_silu[(programs,)](
        TensorDescriptor.from_tensor(y_MK, [BM, BK]),
        TensorDescriptor.from_tensor(linear.weight, [BN, BK]),
        linear.bias,
        TensorDescriptor.from_tensor(out_MN, [BM, BN // 2 if tile["HALVES"] else BN]),
        M, N, K, PROGRAMS=programs, **tile,
    )  # fmt: skip
    return out_MN.view(*y.shape[:-1], N)
