"""Triton kernels behind `fused.py`; imported only on CUDA, as only its builds of torch bring Triton."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, import-not-found"
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from perlclip.backbone.accel import step_kernels
from perlclip.backbone.accel.eight import FLOAT8, Linear8, Rows8, multiply

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # before Triton 3.3
    TensorDescriptor = None

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LANES = 512  # numbers of a row for each warp
LOG2E = 1.4426950408889634  # cards have an instruction for powers of 2
ROWS8: dict[str, int] = dict(BLOCK=64, num_warps=4, num_stages=3)
TILE: dict[str, int] = dict(BM=128, BN=256, BK=64, GROUP=8, num_warps=8, num_stages=4)
TILE8: dict[str, int] = dict(BM=128, BN=256, BK=128, GROUP=8, num_warps=8, num_stages=3)


@triton.jit
def _add_norm(
    x_ptr, a_ptr, weight_ptr, bias_ptr, sum_ptr, y_ptr, scale_ptr, length_ptr, D, N, stride_b, stride_n, eps,
    BLOCK: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
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
    y = centred * scale * weight + bias
    if EIGHT:
        most = tl.maximum(tl.max(tl.abs(y)), 1e-12)
        tl.store(y_ptr + here, (y * (448.0 / most)).to(tl.float8e4nv), mask=inside)
        tl.store(scale_ptr + row, most / 448.0)
        tl.store(length_ptr + row, tl.sqrt(tl.sum(y * y)))
    else:
        tl.store(y_ptr + here, y.to(x.dtype), mask=inside)


@triton.jit
def _add_norm_backward(total_ptr, weight_ptr, d_total_ptr, d_y_ptr, out_ptr, D, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    here = tl.program_id(0).to(tl.int64) * D + columns
    total = tl.load(total_ptr + here, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, total - tl.sum(total) / D, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / D + eps)
    normed = centred * scale
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    d_normed = tl.load(d_y_ptr + here, mask=inside, other=0.0).to(tl.float32) * weight
    d_total = tl.load(d_total_ptr + here, mask=inside, other=0.0)
    through = (d_normed - tl.sum(d_normed) / D - normed * (tl.sum(d_normed * normed) / D)) * scale
    tl.store(out_ptr + here, (d_total.to(tl.float32) + through).to(d_total.dtype), mask=inside)


class AddNorm(torch.autograd.Function):
    """`add_norm` for training; the norm is frozen, so that the gradient of both summands is all there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        total, y = add_norm(x, a, norm)
        ctx.save_for_backward(total)
        ctx.norm = norm
        return total, y

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
        (total,) = ctx.saved_tensors
        D, norm, out = total.shape[-1], ctx.norm, torch.empty_like(total)
        block = triton.next_power_of_2(D)
        with torch.cuda.device(total.device):
            _add_norm_backward[(total.numel() // D,)](
                total, norm.weight, d_total.contiguous(), d_y.contiguous(), out, D, norm.eps,
                BLOCK=block, num_warps=max(1, block // LANES),
            )  # fmt: skip
        return out, out, None


def add_norm(x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + a and its norm, a row a program; x may be a part of longer sequences."""
    total, y, _, _ = _sum_and_norm(x, a, norm, a.dtype)
    return total, y


def add_norm8(x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Rows8]:
    """The same, and the norm's rows in float8."""
    total, y, scale, length = _sum_and_norm(x, a, norm, FLOAT8)
    return total, Rows8(y, scale, length)


def _sum_and_norm(x: Tensor, a: Tensor, norm: nn.LayerNorm, form: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    D, eight = x.shape[-1], form == FLOAT8
    if x.ndim != 3 or x.stride(-1) != 1:
        x = x.reshape(1, -1, D)
    total = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    y = torch.empty_like(total, dtype=form)
    scale, length = torch.empty(2, *a.shape[:-1], dtype=torch.float32, device=a.device) if eight else (total, total)
    block = triton.next_power_of_2(D)
    with torch.cuda.device(x.device):
        _add_norm[(a.numel() // D,)](
            x, a.contiguous(), norm.weight, norm.bias, total, y, scale, length, D, x.shape[1], x.stride(0),
            x.stride(1), norm.eps, BLOCK=block, EIGHT=eight, num_warps=max(1, block // LANES),
        )  # fmt: skip
    return total, y, scale, length


@triton.jit
def _load_rows(own_ptr, own_stride, front_ptr, b, row, column, k, N, E: tl.constexpr, FRONT: tl.constexpr):
    """Some numbers of rows 0..N-1 of sequence b, the first k of which are in another place."""
    here = own_ptr + b * own_stride + (row[:, None] - k) * E + column[None, :]
    found = tl.load(here, mask=((row >= k) & (row < N))[:, None], other=0.0)
    if FRONT:
        here = front_ptr + (b * k + row[:, None]) * E + column[None, :]
        found += tl.load(here, mask=(row < k)[:, None], other=0.0)
    return found


@triton.jit
def _load_qkv(own_ptr, own_stride, front_ptr, b, row, column, k, N, D: tl.constexpr, FRONT: tl.constexpr):
    """Queries, keys and values of one head."""
    q = _load_rows(own_ptr, own_stride, front_ptr, b, row, column, k, N, 3 * D, FRONT)
    key = _load_rows(own_ptr, own_stride, front_ptr, b, row, D + column, k, N, 3 * D, FRONT)
    v = _load_rows(own_ptr, own_stride, front_ptr, b, row, 2 * D + column, k, N, 3 * D, FRONT)
    return q, key, v


@triton.jit
def _attention_weights(q, key, row, N, scale, CAUSAL: tl.constexpr):
    """softmax(q kᵀ · scale ln 2) of all rows of one head."""
    hidden = row[None, :] >= N
    if CAUSAL:
        hidden |= row[None, :] > row[:, None]
    scores = tl.where(hidden, float("-inf"), tl.dot(q, key.T) * scale)
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _short_attention(
    own_ptr, own_stride, front_ptr, out_ptr, k, N, scale,
    H: tl.constexpr, d: tl.constexpr, BLOCK: tl.constexpr, FRONT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """All rows of one head of a short sequence."""
    b, h, D = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, H * d
    row, column = tl.arange(0, BLOCK), h * d + tl.arange(0, d)
    q, key, v = _load_qkv(own_ptr, own_stride, front_ptr, b, row, column, k, N, H * d, FRONT)
    out = tl.dot(_attention_weights(q, key, row, N, scale, CAUSAL).to(v.dtype), v)
    here = out_ptr + (b * N + row[:, None]) * D + column[None, :]
    tl.store(here, out.to(v.dtype), mask=(row < N)[:, None])


@triton.jit
def _short_attention_backward(
    own_ptr, own_stride, front_ptr, d_out_ptr, into_ptr, k, N, rows, scale,
    H: tl.constexpr, d: tl.constexpr, BLOCK: tl.constexpr, FRONT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, keys and values of the first `rows` rows: of all, or of those in front."""
    b, h, D = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H, H * d
    row, column = tl.arange(0, BLOCK), h * d + tl.arange(0, d)
    q, key, v = _load_qkv(own_ptr, own_stride, front_ptr, b, row, column, k, N, H * d, FRONT)
    here = d_out_ptr + (b * N + row[:, None]) * D + column[None, :]
    d_out = tl.load(here, mask=(row < N)[:, None], other=0.0)
    p = _attention_weights(q, key, row, N, scale, CAUSAL)
    d_p = tl.dot(d_out, v.T)
    d_s = (p * (d_p - tl.sum(d_p * p, 1)[:, None]) * (scale * 0.6931471805599453)).to(q.dtype)
    into = into_ptr + (b * rows + row[:, None]) * (3 * D) + column[None, :]
    inside = (row < rows)[:, None]
    tl.store(into, tl.dot(d_s, key).to(q.dtype), mask=inside)
    tl.store(into + D, tl.dot(d_s.T, q).to(q.dtype), mask=inside)
    tl.store(into + 2 * D, tl.dot(p.to(q.dtype).T, d_out).to(q.dtype), mask=inside)


class ShortAttention(torch.autograd.Function):
    """Attention within sequences of few rows; those of `front_BkE` come first, and then they alone are trained."""

    @staticmethod
    def forward(ctx: Any, qkv_BNE: Tensor, front_BkE: Tensor | None, heads: int, causal: bool) -> Tensor:
        ctx.save_for_backward(qkv_BNE, front_BkE)
        ctx.heads, ctx.causal = heads, causal
        B, N, E = qkv_BNE.shape
        N += 0 if front_BkE is None else front_BkE.shape[1]
        out = torch.empty(B, N, E // 3, dtype=qkv_BNE.dtype, device=qkv_BNE.device)
        _on_short_sequences(_short_attention, qkv_BNE, front_BkE, heads, causal, out)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        qkv_BNE, front_BkE = ctx.saved_tensors
        into = torch.empty_like(qkv_BNE if front_BkE is None else front_BkE, memory_format=torch.contiguous_format)
        _on_short_sequences(
            _short_attention_backward, qkv_BNE, front_BkE, ctx.heads, ctx.causal, d_out.contiguous(), into
        )
        return (into, None, None, None) if front_BkE is None else (None, into, None, None)


def _on_short_sequences(
    kernel: Any, qkv: Tensor, front: Tensor | None, heads: int, causal: bool, *more: Tensor
) -> None:
    (B, N, E), k = qkv.shape, 0 if front is None else front.shape[1]
    assert qkv.stride(1) == E and qkv.stride(2) == 1
    d, front = E // 3 // heads, qkv if front is None else front.contiguous()
    block = max(16, triton.next_power_of_2(k + N))
    rows = [tensor.shape[1] for tensor in more[1:]]
    with torch.cuda.device(qkv.device):
        kernel[(B * heads,)](
            qkv, qkv.stride(0), front, *more, k, k + N, *rows, d**-0.5 * LOG2E,
            H=heads, d=d, BLOCK=block, FRONT=k > 0, CAUSAL=causal, num_warps=max(1, block // 16),
        )  # fmt: skip


@triton.jit
def _weigh_values(
    q, key_ptr, row, N, scale, most, total, out, E: tl.constexpr, D: tl.constexpr, d: tl.constexpr, WHOLE: tl.constexpr
):
    """What a block of keys adds to the mean of values so far, which is weighed again by the largest score so far."""
    here = key_ptr + row[:, None] * E + tl.arange(0, d)[None, :]
    if WHOLE:
        k, v = tl.load(here), tl.load(here + D)
    else:
        k, v = tl.load(here, mask=row[:, None] < N, other=0.0), tl.load(here + D, mask=row[:, None] < N, other=0.0)
    scores = tl.dot(q, k.T) * scale
    if not WHOLE:
        scores = tl.where(row[None, :] < N, scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    p, before = tl.exp2(scores - now[:, None]), tl.exp2(most - now)
    return now, total * before + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, out * before[:, None])


@triton.jit
def _attend8(
    qkv_ptr, into_ptr, out_ptr, first, N, scale,
    D: tl.constexpr, d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """BM rows of one head of one sequence, from `first` on: keys in whole blocks, and the rest of them."""
    E: tl.constexpr = 3 * D
    row, column = first + tl.arange(0, BM), tl.arange(0, d)
    q = tl.load(qkv_ptr + row[:, None] * E + column[None, :], mask=row[:, None] < N, other=0.0)
    most, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    out = tl.zeros((BM, d), tl.float32)
    whole = N // BN * BN
    for key in range(0, whole, BN):
        most, total, out = _weigh_values(
            q, qkv_ptr + D, key + tl.arange(0, BN), N, scale, most, total, out, E, D, d, True
        )
    if REST > 0:
        most, total, out = _weigh_values(
            q, qkv_ptr + D, whole + tl.arange(0, REST), N, scale, most, total, out, E, D, d, False
        )
    out *= tl.load(into_ptr + column)[None, :] / total[:, None]
    tl.store(out_ptr + row[:, None] * D + column[None, :], out.to(tl.float8e4nv), mask=row[:, None] < N)


@triton.jit
def _attention8(
    qkv_ptr, stride_b, into_ptr, out_ptr, N, scale,
    H: tl.constexpr, d: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """197 rows are three blocks and a few: those that are left over are a program with a smaller block."""
    tile, h, b, D = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64), H * d
    qkv_ptr += b * stride_b + h * d
    out_ptr += b * N * D + h * d
    if (tile + 1) * BLOCK <= N:
        _attend8(qkv_ptr, into_ptr + h * d, out_ptr, tile * BLOCK, N, scale, H * d, d, BLOCK, BLOCK, REST)
    elif REST > 0:
        _attend8(qkv_ptr, into_ptr + h * d, out_ptr, tile * BLOCK, N, scale, H * d, d, REST, BLOCK, REST)


def attention8(qkv_BNE: Tensor, heads: int, into_D: Tensor) -> Rows8:
    """Attention whose result is in float8, each column multiplied by its `into`, so that rows need no scale."""
    B, N, E = qkv_BNE.shape
    assert qkv_BNE.stride(1) == E and qkv_BNE.stride(2) == 1
    d, left = E // 3 // heads, N % ROWS8["BLOCK"]
    rest = max(16, triton.next_power_of_2(left)) if left else 0
    out = torch.empty(B, N, E // 3, dtype=FLOAT8, device=qkv_BNE.device)
    with torch.cuda.device(qkv_BNE.device):
        _attention8[(triton.cdiv(N, ROWS8["BLOCK"]), heads, B)](
            qkv_BNE, qkv_BNE.stride(0), into_D, out, N, d**-0.5 * LOG2E, H=heads, d=d, REST=rest, **ROWS8
        )
    return Rows8(out, torch.ones(B, N, device=out.device))


@triton.jit
def _corner(tile, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Where a tile begins; tiles go in groups of rows that share the weights in cache."""
    first = tile // (GROUP * tiles_n) * GROUP
    rows = min(tiles_m - first, GROUP)
    return (first + tile % (GROUP * tiles_n) % rows) * BM, tile % (GROUP * tiles_n) // rows * BN


@triton.jit
def _linear_silu(
    y_desc, w_desc, bias_ptr, out_desc, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """A persistent product: each program takes tile after tile."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = _corner(tile, tiles_m, tiles_n, BM, BN, GROUP)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            total = tl.dot(y_desc.load([m, k]), w_desc.load([n, k]).T, total)
        total += tl.load(bias_ptr + n + tl.arange(0, BN))[None, :].to(tl.float32)
        total = total * tl.sigmoid(total)
        # In halves: less shared memory for the way out, more for the way in.
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        out_desc.store([m, n], left.to(bias_ptr.dtype.element_ty))
        out_desc.store([m, n + BN // 2], right.to(bias_ptr.dtype.element_ty))


def can_multiply(linear: nn.Linear) -> bool:
    """Whether `linear_silu` takes this layer: whole tiles of it, and a card with Hopper's copy engine."""
    N, K = linear.weight.shape
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(linear.weight.device)[0] == 9
    return TensorDescriptor is not None and hopper and N % TILE["BN"] == 0 and K % TILE["BK"] == 0


def linear_silu(y: Tensor, linear: nn.Linear) -> Tensor:
    """silu(W y + b): a matrix product with the activation before its result is written."""
    y_MK = y.reshape(-1, y.shape[-1])
    (M, K), N = y_MK.shape, len(linear.weight)
    out_MN = y.new_empty(M, N)
    BM, BN, BK = TILE["BM"], TILE["BN"], TILE["BK"]
    programs = torch.cuda.get_device_properties(y.device).multi_processor_count
    with torch.cuda.device(y.device):
        _linear_silu[(programs,)](
            TensorDescriptor.from_tensor(y_MK, [BM, BK]),
            TensorDescriptor.from_tensor(linear.weight, [BN, BK]),
            linear.bias,
            TensorDescriptor.from_tensor(out_MN, [BM, BN // 2]),
            M, N, K, PROGRAMS=programs, **TILE,
        )  # fmt: skip
    return out_MN.view(*y.shape[:-1], N)


@triton.jit
def _tanh(x):
    """To eleven bits, which is more than float8 has; two numbers by one instruction, as a card makes few of them."""
    if INTERPRETED:
        return 2 * tl.sigmoid(2 * x) - 1
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 two;
        .reg .b16 low, high;
        cvt.rn.f16x2.f32 two, $3, $2;
        tanh.approx.f16x2 two, two;
        mov.b32 {low, high}, two;
        cvt.f32.f16 $0, low;
        cvt.f32.f16 $1, high;
        }""",
        "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _linear_silu8(
    y_desc, w_desc, row_ptr, length_ptr, column_ptr, bias_ptr, out_desc, scale_ptr, most_weight, most_bias, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """As `_linear_silu`, of float8 and in float8, by a scale that a row has before its numbers are known."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = _corner(tile, tiles_m, tiles_n, BM, BN, GROUP)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):  # what lies outside is read as 0 and not written
            total = tl.dot(y_desc.load([m, k]), w_desc.load([n, k]).T, total)
        row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
        total *= tl.load(row_ptr + row, mask=row < M, other=0.0)[:, None]
        total *= tl.load(column_ptr + column, mask=column < N, other=0.0)[None, :]
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0)[None, :].to(tl.float32)
        scale = (tl.load(length_ptr + row, mask=row < M, other=1.0) * most_weight + most_bias) / 448.0
        if n == 0:
            tl.store(scale_ptr + row, scale, mask=row < M)
        total = (total + total * _tanh(0.5 * total)) * (0.5 / scale)[:, None]  # silu(x) = x (1 + tanh(x / 2)) / 2
        left, right = tl.split(tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1)))
        out_desc.store([m, n], left.to(tl.float8e4nv))
        out_desc.store([m, n + BN // 2], right.to(tl.float8e4nv))


def can_multiply8(linear: Linear8) -> bool:
    """Whether `linear_silu8` takes this layer: rows that the copy engine can read, and a card that has one."""
    hopper = torch.version.hip is None and torch.cuda.get_device_capability(linear.weight.device) >= (9, 0)
    aligned = linear.in_features % 16 == linear.out_features % 16 == 0
    return TensorDescriptor is not None and hopper and aligned and linear.bias is not None


def linear_silu8(y: Rows8, linear: Linear8) -> Rows8:
    """silu(W y + b) of rows in float8, in float8.

    A row's scale must be known before its numbers are: it comes from what they can be at most, some eight times what
    they are, which costs a format with an exponent nothing.
    """
    assert y.length is not None
    scale, weight = torch.empty_like(y.length), linear.weight8
    out = torch.empty(*y.shape[:-1], linear.out_features, dtype=FLOAT8, device=y.values.device)
    y_MK, out_MN = y.values.flatten(0, -2), out.flatten(0, -2)
    BM, BN, BK = TILE8["BM"], TILE8["BN"], TILE8["BK"]
    programs = torch.cuda.get_device_properties(y_MK.device).multi_processor_count
    with torch.cuda.device(y_MK.device):
        _linear_silu8[(programs,)](
            TensorDescriptor.from_tensor(y_MK, [BM, BK]),
            TensorDescriptor.from_tensor(weight.values, [BN, BK]),
            y.scale, y.length, weight.scale, linear.bias,
            TensorDescriptor.from_tensor(out_MN, [BM, BN // 2]),
            scale, *linear.bound, len(y_MK), *weight.shape, PROGRAMS=programs, **TILE8,
        )  # fmt: skip
    return Rows8(out, scale)


def _probe_add_norm(device: torch.device) -> None:
    x = torch.ones(1, 1, 16, device=device, dtype=torch.bfloat16)
    add_norm(x, x, nn.LayerNorm(16, device=device, dtype=torch.bfloat16))


def _probe_training(device: torch.device) -> None:
    x = torch.ones(1, 1, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    norm = nn.LayerNorm(16, device=device, dtype=torch.bfloat16).requires_grad_(False)
    with torch.enable_grad():
        total, y = AddNorm.apply(x, x, norm)
        torch.autograd.grad((total + y).sum(), x)


def _probe_attention(device: torch.device) -> None:
    qkv = torch.ones(1, 3, 48, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad(ShortAttention.apply(qkv, None, 1, True).sum(), qkv)


def _probe_linear(device: torch.device) -> None:
    linear = nn.Linear(TILE["BK"], TILE["BN"], device=device, dtype=torch.bfloat16)
    if can_multiply(linear):
        linear_silu(torch.ones(TILE["BM"], TILE["BK"], device=device, dtype=torch.bfloat16), linear)


def _probe_eight(device: torch.device) -> None:
    x = torch.ones(1, 16, 64, device=device, dtype=torch.bfloat16)
    norm = nn.LayerNorm(64, device=device, dtype=torch.bfloat16)
    linear = Linear8(nn.Linear(64, 64, device=device, dtype=torch.bfloat16).requires_grad_(False), FLOAT8)
    if not can_multiply8(linear):
        raise ValueError("the card has no copy engine")
    multiply(linear_silu8(add_norm8(x, x, norm)[1], linear), linear)
    multiply(attention8(x.repeat(1, 1, 3), 1, torch.ones(64, device=device)), linear)


# One small use of each kernel, to see that it compiles and runs on a card.
PROBES = {
    "attention": _probe_attention,
    "add_norm": _probe_add_norm,
    "add_norm_training": _probe_training,
    "linear_silu": _probe_linear,
    "eight": _probe_eight,
    **step_kernels.PROBES,
}
