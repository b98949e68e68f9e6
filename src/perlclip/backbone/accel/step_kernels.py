"""Triton kernels of what a training step does beside its blocks: thoughts, their entrance, the row read, unit vectors.

There torch starts some twenty kernels of a few microseconds each, forward and back, that wait for each other; here they
are one to four. Frozen weights have no gradients. Sums over rows go in a fixed order: a seed gives the same numbers.
Numbers of rows and sequences are not compiled in: they change from step to step.

Shapes: B sequences, N rows, D width, H heads, d = D / H, P parameters of a projector of rank R.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, import-not-found"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F


@triton.jit
def _norm_row(x, inside, D, eps):
    """A row normed, its mean, and what it is multiplied by."""
    mean = tl.sum(x) / D
    centred = tl.where(inside, x - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred) / D + eps)
    return centred * scale, mean, scale


@triton.jit
def _gelu(a):
    """GELU and its slope."""
    below = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
    return a * below, below + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)


@triton.jit
def _hidden(w_ptr, y, rank, column, D, R):
    """Some of the hidden numbers of a projector before GELU, and the weights before and behind them.

    Its parameters lie in one row: the norm's gain (D) and bias (D), down (R, D) and bias (R), up (D, R) and bias (D).
    """
    inside = (rank < R)[:, None] & (column < D)[None, :]
    down = tl.load(w_ptr + (2 + rank[:, None]) * D + column[None, :], mask=inside, other=0.0)
    bias = tl.load(w_ptr + (2 + R) * D + rank, mask=rank < R, other=0.0)
    up = tl.load(w_ptr + (2 + R) * D + R + column[None, :] * R + rank[:, None], mask=inside, other=0.0)
    return tl.sum(down * y[None, :], 1) + bias, down, up


@triton.jit
def _think(h_ptr, w_ptr, z_ptr, D, R, eps, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    """The thought of one row: up GELU(down LN(h))."""
    column = tl.arange(0, BLOCK)
    inside = column < D
    here = tl.program_id(0).to(tl.int64) * D + column
    h = tl.load(h_ptr + here, mask=inside, other=0.0).to(tl.float32)
    normed, _mean, _scale = _norm_row(h, inside, D, eps)
    gain = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = normed * gain + tl.load(w_ptr + D + column, mask=inside, other=0.0)
    z = tl.load(w_ptr + (2 + 2 * R) * D + R + column, mask=inside, other=0.0)
    for first in range(0, R, RANKS):
        a, _down, up = _hidden(w_ptr, y, first + tl.arange(0, RANKS), column, D, R)
        g, _slope = _gelu(a)
        z += tl.sum(g[:, None] * up, 0)
    tl.store(z_ptr + here, z.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _think_back(h_ptr, w_ptr, d_z_ptr, stride, d_h_ptr, kept_ptr, D, R, eps, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    """The gradient of one row, and what those of the parameters are made of: mean, scale, GELUs, their gradients."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    h = tl.load(h_ptr + row * D + column, mask=inside, other=0.0).to(tl.float32)
    d_z = tl.load(d_z_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    normed, mean, scale = _norm_row(h, inside, D, eps)
    gain = tl.load(w_ptr + column, mask=inside, other=0.0)
    y = normed * gain + tl.load(w_ptr + D + column, mask=inside, other=0.0)
    kept_ptr += row * (2 + 2 * R)
    d_y = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, R, RANKS):
        rank = first + tl.arange(0, RANKS)
        a, down, up = _hidden(w_ptr, y, rank, column, D, R)
        g, slope = _gelu(a)
        d_a = tl.sum(d_z[None, :] * up, 1) * slope
        d_y += tl.sum(d_a[:, None] * down, 0)
        tl.store(kept_ptr + 2 + rank, g, mask=rank < R)
        tl.store(kept_ptr + 2 + R + rank, d_a, mask=rank < R)
    tl.store(kept_ptr, mean)
    tl.store(kept_ptr + 1, scale)
    d_normed = d_y * gain
    d_h = (d_normed - tl.sum(d_normed) / D - normed * (tl.sum(d_normed * normed) / D)) * scale
    tl.store(d_h_ptr + row * D + column, d_h.to(d_h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["B"])
def _think_back_weights(
    h_ptr, w_ptr, d_z_ptr, stride, kept_ptr, d_w_ptr, B, D, R, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gradient of the parameters of some columns, summed over all rows.

    Of y = n gain + bias and d_y = Σ_r d_a_r down_r follows that all of them come from Σ_b d_a n, Σ_b d_a and Σ_b g d_z.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < D
    gain = tl.load(w_ptr + column, mask=inside, other=0.0)
    bias = tl.load(w_ptr + D + column, mask=inside, other=0.0)
    d_gain, d_bias = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    d_up_bias = tl.zeros((COLUMNS,), tl.float32)
    for r in range(0, R):
        along, d_up = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
        sums = tl.zeros((ROWS,), tl.float32)
        d_up_bias = tl.zeros((COLUMNS,), tl.float32)  # the same for each r
        for first in range(0, B, ROWS):
            row = first + tl.arange(0, ROWS)
            there, kept = row < B, kept_ptr + row * (2 + 2 * R)
            mean = tl.load(kept, mask=there, other=0.0)
            scale = tl.load(kept + 1, mask=there, other=0.0)
            g = tl.load(kept + 2 + r, mask=there, other=0.0)
            d_a = tl.load(kept + 2 + R + r, mask=there, other=0.0)
            both = there[:, None] & inside[None, :]
            h = tl.load(h_ptr + row[:, None] * D + column[None, :], mask=both, other=0.0).to(tl.float32)
            d_z = tl.load(d_z_ptr + row[:, None] * stride + column[None, :], mask=both, other=0.0).to(tl.float32)
            along += tl.sum((d_a * scale)[:, None] * (h - mean[:, None]), 0)
            d_up += tl.sum(g[:, None] * d_z, 0)
            d_up_bias += tl.sum(d_z, 0)
            sums += d_a
        total = tl.sum(sums)
        down = tl.load(w_ptr + (2 + r) * D + column, mask=inside, other=0.0)
        d_gain += down * along
        d_bias += down * total
        tl.store(d_w_ptr + (2 + r) * D + column, gain * along + bias * total, mask=inside)
        tl.store(d_w_ptr + (2 + R) * D + R + column * R + r, d_up, mask=inside)
        if tl.program_id(0) == 0:
            tl.store(d_w_ptr + (2 + R) * D + r, total)
    tl.store(d_w_ptr + column, d_gain, mask=inside)
    tl.store(d_w_ptr + D + column, d_bias, mask=inside)
    tl.store(d_w_ptr + (2 + 2 * R) * D + R + column, d_up_bias, mask=inside)


class Think(torch.autograd.Function):
    """up GELU(down LN(h)) in float32, of the parameters in one row, as `dtype`."""

    @staticmethod
    def forward(ctx: Any, h_BD: Tensor, w_P: Tensor, rank: int, eps: float, dtype: torch.dtype) -> Tensor:
        h_BD = h_BD.contiguous()
        ctx.save_for_backward(h_BD, w_P)
        ctx.rank, ctx.eps = rank, eps
        z_BD = torch.empty_like(h_BD, dtype=dtype)
        with torch.cuda.device(h_BD.device):
            _think[(len(h_BD),)](h_BD, w_P, z_BD, h_BD.shape[1], rank, eps, **_row(h_BD, rank))
        return z_BD

    @staticmethod
    def backward(ctx: Any, d_z: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        (h_BD, w_P), R = ctx.saved_tensors, ctx.rank
        d_z = d_z if d_z.stride(1) == 1 else d_z.contiguous()  # of a part of the front rows, mostly
        (B, D), d_h, d_w = h_BD.shape, torch.empty_like(h_BD), torch.empty_like(w_P)
        kept = torch.empty(B, 2 + 2 * R, device=h_BD.device)
        rows, columns = min(128, max(16, triton.next_power_of_2(B))), 32
        with torch.cuda.device(h_BD.device):
            _think_back[(B,)](h_BD, w_P, d_z, d_z.stride(0), d_h, kept, D, R, ctx.eps, **_row(h_BD, R))
            _think_back_weights[(triton.cdiv(D, columns),)](
                h_BD, w_P, d_z, d_z.stride(0), kept, d_w, B, D, R, ROWS=rows, COLUMNS=columns, num_warps=4
            )
        return (d_h if ctx.needs_input_grad[0] else None), d_w, None, None, None


def _row(h_BD: Tensor, rank: int) -> dict[str, int]:
    """How a program takes a row of the state and a few of the hidden numbers."""
    block, ranks = triton.next_power_of_2(h_BD.shape[1]), min(4, triton.next_power_of_2(rank))
    return dict(BLOCK=block, RANKS=ranks, num_warps=min(8, max(1, block * ranks // 256)))


@triton.jit(do_not_specialize=["N", "k"])
def _enter(front_ptr, own_ptr, gain_ptr, bias_ptr, x_ptr, y_ptr, N, k, D, eps, BLOCK: tl.constexpr):
    """One row of a sequence whose first k come from elsewhere; of those also the norm."""
    b, n = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N
    column = tl.arange(0, BLOCK)
    inside = column < D
    here = (b * k + n) * D + column
    new = tl.where(n < k, D, 0)  # numbers of this row that come from the front
    x = tl.load(own_ptr + (b * (N - k) + n - k) * D + column, mask=inside & (column >= new), other=0.0)
    x += tl.load(front_ptr + here, mask=column < new, other=0.0)
    tl.store(x_ptr + (b * N + n) * D + column, x, mask=inside)
    if n < k:
        normed, _mean, _scale = _norm_row(x.to(tl.float32), inside, D, eps)
        gain = tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
        y = normed * gain + tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + here, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["N", "k"])
def _enter_back(front_ptr, gain_ptr, d_x_ptr, d_y_ptr, d_front_ptr, N, k, D, eps, BLOCK: tl.constexpr):
    """The gradient of one of the k rows: its own, and through its norm."""
    b, n = (tl.program_id(0) // k).to(tl.int64), tl.program_id(0) % k
    column = tl.arange(0, BLOCK)
    inside = column < D
    here = (b * k + n) * D + column
    front = tl.load(front_ptr + here, mask=inside, other=0.0).to(tl.float32)
    normed, _mean, scale = _norm_row(front, inside, D, eps)
    d_normed = tl.load(d_y_ptr + here, mask=inside, other=0.0).to(tl.float32)
    d_normed *= tl.load(gain_ptr + column, mask=inside, other=0.0).to(tl.float32)
    through = (d_normed - tl.sum(d_normed) / D - normed * (tl.sum(d_normed * normed) / D)) * scale
    d_x = tl.load(d_x_ptr + (b * N + n) * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_front_ptr + here, (d_x + through).to(d_front_ptr.dtype.element_ty), mask=inside)


class Enter(torch.autograd.Function):
    """Rows put before those of a sequence, (B, k + N, D), and their norm, (B, k, D); the norm is frozen."""

    @staticmethod
    def forward(ctx: Any, front_BkD: Tensor, own_BND: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        front_BkD, own_BND, (B, k, D) = front_BkD.contiguous(), own_BND.contiguous(), front_BkD.shape
        N = k + own_BND.shape[1]
        ctx.save_for_backward(front_BkD)
        ctx.norm = norm
        x_BND, y_BkD = own_BND.new_empty(B, N, D), torch.empty_like(front_BkD)
        with torch.cuda.device(x_BND.device):
            _enter[(B * N,)](
                front_BkD, own_BND, norm.weight, norm.bias, x_BND, y_BkD, N, k, D, norm.eps, **_whole_row(x_BND)
            )
        return x_BND, y_BkD

    @staticmethod
    def backward(ctx: Any, d_x: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (front,) = ctx.saved_tensors
        (B, k, D), d_front, d_x = front.shape, torch.empty_like(front), d_x.contiguous()
        with torch.cuda.device(front.device):
            _enter_back[(B * k,)](
                front, ctx.norm.weight, d_x, d_y.contiguous(), d_front, d_x.shape[1], k, D, ctx.norm.eps,
                **_whole_row(front),
            )  # fmt: skip
        return d_front, (d_x[:, k:] if ctx.needs_input_grad[1] else None), None


@triton.jit
def _unit(x_ptr, v_ptr, D, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    here, inside = tl.program_id(0).to(tl.int64) * D + column, column < D
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(v_ptr + here, x / tl.maximum(tl.sqrt(tl.sum(x * x)), eps), mask=inside)


@triton.jit
def _unit_back(x_ptr, d_v_ptr, d_x_ptr, D, eps, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    here, inside = tl.program_id(0).to(tl.int64) * D + column, column < D
    x = tl.load(x_ptr + here, mask=inside, other=0.0).to(tl.float32)
    d_v = tl.load(d_v_ptr + here, mask=inside, other=0.0)
    length = tl.sqrt(tl.sum(x * x))
    divisor = tl.maximum(length, eps)
    along = tl.where(length >= eps, tl.sum(d_v * x) / (divisor * divisor), 0.0)
    tl.store(d_x_ptr + here, ((d_v - x * along) / divisor).to(d_x_ptr.dtype.element_ty), mask=inside)


class Unit(torch.autograd.Function):
    """Rows at unit length, in float32; as `F.normalize` does it."""

    EPS = 1e-12

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x, D = x.contiguous(), x.shape[-1]
        ctx.save_for_backward(x)
        v = torch.empty_like(x, dtype=torch.float32)
        with torch.cuda.device(x.device):
            _unit[(x.numel() // D,)](x, v, D, Unit.EPS, **_whole_row(x))
        return v

    @staticmethod
    def backward(ctx: Any, d_v: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x, D = torch.empty_like(x), x.shape[-1]
        with torch.cuda.device(x.device):
            _unit_back[(x.numel() // D,)](x, d_v.contiguous(), d_x, D, Unit.EPS, **_whole_row(x))
        return d_x


def _whole_row(x: Tensor) -> dict[str, int]:
    block = triton.next_power_of_2(x.shape[-1])
    return dict(BLOCK=block, num_warps=min(8, max(1, block // 256)))


@triton.jit(do_not_specialize=["N"])
def _pick(x_ptr, y_ptr, read_ptr, x_row_ptr, y_row_ptr, N, D, BLOCK: tl.constexpr):
    """One row of two sequences."""
    b, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < D
    here = (b * N + tl.load(read_ptr + b)) * D + column
    tl.store(x_row_ptr + b * D + column, tl.load(x_ptr + here, mask=inside, other=0.0), mask=inside)
    tl.store(y_row_ptr + b * D + column, tl.load(y_ptr + here, mask=inside, other=0.0), mask=inside)


@triton.jit(do_not_specialize=["B", "N"])
def _scores(
    u_ptr, y_ptr, s_ptr, B, N, D, scale,
    H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """scale u·y of all heads with some rows of a sequence."""
    b, head, row = tl.program_id(1).to(tl.int64), tl.arange(0, HEADS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s = tl.zeros((HEADS, ROWS), tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        s += tl.dot(_vectors(u_ptr, head, b, column, B, D, H), tl.trans(_some_rows(y_ptr, b, row, column, N, D)))
    here = (b * H + head[:, None]) * N + row[None, :]
    tl.store(s_ptr + here, s * scale, mask=(head < H)[:, None] & (row < N)[None, :])


@triton.jit
def _vectors(u_ptr, head, b, column, B, D, H):
    """One of each head, (H, B, D) in memory."""
    both = (head < H)[:, None] & (column < D)[None, :]
    return tl.load(u_ptr + (head[:, None] * B + b) * D + column[None, :], mask=both, other=0.0)


@triton.jit
def _some_rows(y_ptr, b, row, column, N, D):
    both = (row < N)[:, None] & (column < D)[None, :]
    return tl.load(y_ptr + (b * N + row[:, None]) * D + column[None, :], mask=both, other=0.0)


@triton.jit
def _seen(read_ptr, b, N, CAUSAL: tl.constexpr):
    """How many rows the one that is read sees."""
    if CAUSAL:
        seen = tl.load(read_ptr + b).to(tl.int32) + 1
    else:
        seen = N
    return seen


@triton.jit(do_not_specialize=["B", "N"])
def _mix(
    s_ptr, y_ptr, read_ptr, m_ptr, log_ptr, B, N, D,
    H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """softmax(s) y of all heads, some columns of it, and the logarithm of the softmax's sum."""
    b, head = tl.program_id(1).to(tl.int64), tl.arange(0, HEADS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    seen = _seen(read_ptr, b, N, CAUSAL)
    most, total = tl.full((HEADS,), -1e30, tl.float32), tl.zeros((HEADS,), tl.float32)
    m = tl.zeros((HEADS, COLUMNS), tl.float32)
    for first in range(0, seen, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (head < H)[:, None] & (row < seen)[None, :]
        s = tl.load(s_ptr + (b * H + head[:, None]) * N + row[None, :], mask=there, other=float("-inf"))
        now = tl.maximum(most, tl.max(s, 1))
        p, before = tl.exp(s - now[:, None]), tl.exp(most - now)
        total = total * before + tl.sum(p, 1)
        y = _some_rows(y_ptr, b, row, column, N, D)
        m = m * before[:, None] + tl.dot(p.to(y.dtype), y)
        most = now
    total = tl.where(head < H, total, 1.0)
    both = (head < H)[:, None] & (column < D)[None, :]
    here = (head[:, None] * B + b) * D + column[None, :]
    tl.store(m_ptr + here, (m / total[:, None]).to(m_ptr.dtype.element_ty), mask=both)
    if tl.program_id(0) == 0:
        tl.store(log_ptr + head * B + b, most + tl.log(total), mask=head < H)


@triton.jit(do_not_specialize=["B", "N"])
def _scores_back(
    u_ptr, y_ptr, read_ptr, m_ptr, log_ptr, d_m_ptr, p_ptr, d_s_ptr, B, N, D, scale,
    H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Of some rows of a sequence the weight that each head gives them, and the gradient of their score."""
    b, head, row = tl.program_id(1).to(tl.int64), tl.arange(0, HEADS), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    s, d_p = tl.zeros((HEADS, ROWS), tl.float32), tl.zeros((HEADS, ROWS), tl.float32)
    mean = tl.zeros((HEADS,), tl.float32)
    for first in range(0, D, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        y, d_m = tl.trans(_some_rows(y_ptr, b, row, column, N, D)), _vectors(d_m_ptr, head, b, column, B, D, H)
        s += tl.dot(_vectors(u_ptr, head, b, column, B, D, H), y)
        d_p += tl.dot(d_m, y)
        mean += tl.sum(_vectors(m_ptr, head, b, column, B, D, H).to(tl.float32) * d_m.to(tl.float32), 1)
    log = tl.load(log_ptr + head * B + b, mask=head < H, other=0.0)
    there = (head < H)[:, None] & (row < _seen(read_ptr, b, N, CAUSAL))[None, :]
    p = tl.where(there, tl.exp(s * scale - log[:, None]), 0.0)
    d_s = p * (d_p - mean[:, None]) * scale
    here, both = (b * H + head[:, None]) * N + row[None, :], (head < H)[:, None] & (row < N)[None, :]
    tl.store(p_ptr + here, p.to(p_ptr.dtype.element_ty), mask=both)
    tl.store(d_s_ptr + here, d_s.to(d_s_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["B", "N"])
def _mix_back(
    d_s_ptr, y_ptr, d_u_ptr, B, N, D,
    H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient of u, some columns of it."""
    b, head = tl.program_id(1).to(tl.int64), tl.arange(0, HEADS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    d_u = tl.zeros((HEADS, COLUMNS), tl.float32)
    for first in range(0, N, ROWS):
        row = first + tl.arange(0, ROWS)
        there = (head < H)[:, None] & (row < N)[None, :]
        d_s = tl.load(d_s_ptr + (b * H + head[:, None]) * N + row[None, :], mask=there, other=0.0)
        d_u += tl.dot(d_s, _some_rows(y_ptr, b, row, column, N, D))
    both = (head < H)[:, None] & (column < D)[None, :]
    tl.store(d_u_ptr + (head[:, None] * B + b) * D + column[None, :], d_u.to(d_u_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["B", "N"])
def _spread_back(
    u_ptr, d_m_ptr, p_ptr, d_s_ptr, read_ptr, d_x_row_ptr, d_y_row_ptr, d_x_ptr, d_y_ptr, B, N, D,
    H: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The gradients of some rows of a sequence: by being seen by all heads, and by being the row that is read."""
    b, head = tl.program_id(2).to(tl.int64), tl.arange(0, HEADS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    read, inside = tl.load(read_ptr + b).to(tl.int32), column < D
    if CAUSAL:
        seen = row <= read
    else:
        seen = row < N
    weights, many = seen[:, None] & (head < H)[None, :], (head < H)[:, None] & inside[None, :]
    weight = (b * H + head[None, :]) * N + row[:, None]
    p = tl.load(p_ptr + weight, mask=weights, other=0.0)
    d_s = tl.load(d_s_ptr + weight, mask=weights, other=0.0)
    vector = (head[:, None] * B + b) * D + column[None, :]
    d_m = tl.load(d_m_ptr + vector, mask=many, other=0.0)
    u = tl.load(u_ptr + vector, mask=many, other=0.0)
    own = (row == read)[:, None]
    d_x_row = tl.load(d_x_row_ptr + b * D + column, mask=inside, other=0.0).to(tl.float32)
    d_y_row = tl.load(d_y_row_ptr + b * D + column, mask=inside, other=0.0).to(tl.float32)
    d_x = tl.where(own, d_x_row[None, :], 0.0)
    d_y = tl.dot(p, d_m) + tl.dot(d_s, u) + tl.where(own, d_y_row[None, :], 0.0)
    here, both = (b * N + row[:, None]) * D + column[None, :], (row < N)[:, None] & inside[None, :]
    tl.store(d_x_ptr + here, d_x.to(d_x_ptr.dtype.element_ty), mask=both)
    tl.store(d_y_ptr + here, d_y.to(d_y_ptr.dtype.element_ty), mask=both)


class Read(torch.autograd.Function):
    """Of each sequence, row `read_B[b]` of x, and what its attention among the rows of y gives, before the projection.

    Keys and values are not formed, as in `Block.read`; the weights are frozen.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BND: Tensor, y_BND: Tensor, read_B: Tensor, qkv: nn.Linear, heads: int, causal: bool
    ) -> tuple[Tensor, Tensor]:
        x_BND, y_BND, (B, N, D), H = x_BND.contiguous(), y_BND.contiguous(), y_BND.shape, heads
        read_B = read_B.contiguous()
        (wq_DD, wk_HdD, wv_HdD), (bq_D, _, bv_D) = _split(qkv, H), qkv.bias.chunk(3)
        x_BD, y_BD = torch.empty(B, D, dtype=x_BND.dtype, device=x_BND.device), y_BND.new_empty(B, D)
        m_HBD, log_HB = y_BND.new_empty(H, B, D), torch.empty(H, B, device=y_BND.device)
        s_BHN, a_BHd = torch.empty(B, H, N, device=y_BND.device), y_BND.new_empty(B, H, D // H)
        by_row, by_column = _tiles(y_BND, H)
        with torch.cuda.device(y_BND.device):
            _pick[(B,)](x_BND, y_BND, read_B, x_BD, y_BD, N, D, **_whole_row(y_BND))
            q_BHd = F.linear(y_BD, wq_DD, bq_D).view(B, H, -1)
            u_HBD = torch.bmm(q_BHd.transpose(0, 1), wk_HdD)
            _scores[(triton.cdiv(N, by_row["ROWS"]), B)](u_HBD, y_BND, s_BHN, B, N, D, (D // H) ** -0.5, **by_row)
            _mix[(triton.cdiv(D, by_column["COLUMNS"]), B)](
                s_BHN, y_BND, read_B, m_HBD, log_HB, B, N, D, CAUSAL=causal, **by_column
            )
        torch.bmm(m_HBD, wv_HdD.transpose(1, 2), out=a_BHd.transpose(0, 1))
        ctx.save_for_backward(y_BND, read_B, u_HBD, m_HBD, log_HB)
        ctx.qkv, ctx.causal, ctx.x_dtype = qkv, causal, x_BND.dtype
        return x_BD, a_BHd.view(B, D).add_(bv_D)

    @staticmethod
    def backward(ctx: Any, d_x_BD: Tensor, d_a_BD: Tensor) -> tuple[Tensor | None, ...]:
        y_BND, read_B, u_HBD, m_HBD, log_HB = ctx.saved_tensors
        (B, N, D), H, causal = y_BND.shape, len(u_HBD), ctx.causal
        wq_DD, wk_HdD, wv_HdD = _split(ctx.qkv, H)
        d_m_HBD = torch.bmm(d_a_BD.reshape(B, H, -1).transpose(0, 1), wv_HdD)
        p_BHN, d_s_BHN = (y_BND.new_empty(B, H, N) for _ in range(2))
        d_u_HBD, d_q_BHd = torch.empty_like(u_HBD), y_BND.new_empty(B, H, D // H)
        d_x_BND, d_y_BND = torch.empty_like(y_BND, dtype=ctx.x_dtype), torch.empty_like(y_BND)
        by_row, by_column = _tiles(y_BND, H)
        with torch.cuda.device(y_BND.device):
            _scores_back[(triton.cdiv(N, by_row["ROWS"]), B)](
                u_HBD, y_BND, read_B, m_HBD, log_HB, d_m_HBD, p_BHN, d_s_BHN, B, N, D, (D // H) ** -0.5,
                CAUSAL=causal, **by_row,
            )  # fmt: skip
            _mix_back[(triton.cdiv(D, by_column["COLUMNS"]), B)](d_s_BHN, y_BND, d_u_HBD, B, N, D, **by_column)
            torch.bmm(d_u_HBD, wk_HdD.transpose(1, 2), out=d_q_BHd.transpose(0, 1))
            d_y_BD = d_q_BHd.view(B, D) @ wq_DD
            _spread_back[(triton.cdiv(N, by_row["ROWS"]), triton.cdiv(D, by_row["COLUMNS"]), B)](
                u_HBD, d_m_HBD, p_BHN, d_s_BHN, read_B, d_x_BD.contiguous(), d_y_BD, d_x_BND, d_y_BND, B, N, D,
                CAUSAL=causal, **by_row,
            )  # fmt: skip
        return d_x_BND, d_y_BND, None, None, None, None


def _split(qkv: nn.Linear, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    wq_DD, wk_DD, wv_DD = qkv.weight.chunk(3)
    return wq_DD, wk_DD.view(heads, -1, wk_DD.shape[1]), wv_DD.view(heads, -1, wv_DD.shape[1])


def _tiles(y_BND: Tensor, heads: int) -> tuple[dict[str, int], dict[str, int]]:
    """How programs take rows of a sequence: a few and all columns of them, or all and a few columns; all heads."""
    _, N, D = y_BND.shape
    rows, columns = min(64, max(16, triton.next_power_of_2(N))), min(128, max(16, triton.next_power_of_2(D)))
    both = dict(H=heads, HEADS=max(16, triton.next_power_of_2(heads)), num_warps=4)
    return dict(ROWS=min(16, rows), COLUMNS=columns, **both), dict(ROWS=rows, COLUMNS=min(64, columns), **both)


def _probe_think(device: torch.device) -> None:
    h = torch.ones(2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = torch.ones(5 * 16 + 1, device=device, requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad(Think.apply(h, w, 1, 1e-5, h.dtype).sum(), (h, w))


def _probe_enter(device: torch.device) -> None:
    front = torch.ones(1, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    norm = nn.LayerNorm(16, device=device, dtype=torch.bfloat16).requires_grad_(False)
    with torch.enable_grad():
        x, y = Enter.apply(front, front.detach(), norm)
        torch.autograd.grad(x.sum() + y.sum(), front)


def _probe_unit(device: torch.device) -> None:
    x = torch.ones(2, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        torch.autograd.grad(Unit.apply(x).sum(), x)


def _probe_read(device: torch.device) -> None:
    x = torch.ones(1, 3, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
    qkv = nn.Linear(32, 96, device=device, dtype=torch.bfloat16).requires_grad_(False)
    read = torch.zeros(1, dtype=torch.long, device=device)
    with torch.enable_grad():
        row, attended = Read.apply(x, x, read, qkv, 2, True)
        torch.autograd.grad((row + attended).sum(), x)


PROBES = {"think": _probe_think, "enter": _probe_enter, "unit": _probe_unit, "read": _probe_read}
