"""Matrix products of numbers of 8 bits: weights are rounded once, with a scale for each output, rows when they come.

`float8` (e4m3) is for CUDA from Hopper on, `int8` for CPUs. Only the image tower's large products are made so, and only
where nobody asks for gradients: `Linear8` keeps the layer as it was for the rest. Norms, softmax, residual rows, the
last block and the texts are in more bits.

    W ≈ scale_N · W8,   y ≈ scale_M · y8,   W y + b ≈ scale_M scale_N (W8 y8) + b

Whole numbers are evenly spread, so a row of int8 goes from its least to its largest number and has a place for 0:

    y ≈ scale_M · (y8 + zero_M),   W y + b ≈ scale_M scale_N (W8 y8) + scale_M zero_M Σ W_N + b

A row of float8 comes from the kernel that made it (`fused`); other rows are few and are multiplied as they are. Rows of
int8 are made here. Where it is known before what a column can be at most, rows come divided by that, and need no scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FLOAT8, INT8 = torch.float8_e4m3fn, torch.int8
LARGEST = {FLOAT8: 448.0, INT8: 127.0}
PIECE = 128  # rows of int8 that are scaled at a time
SLACK = 1 + 2**-4  # by which a rounded row may be longer than it was


@dataclass(frozen=True)
class Rows8:
    """Rows of 8 bits a number, the scale of each, its length before it was rounded, and what stands for 0."""

    values: Tensor  # (..., D)
    scale: Tensor  # (...), float32
    length: Tensor | None = None  # (...), float32
    zero: Tensor | None = None  # (...), float32; None is 0 for all

    @property
    def shape(self) -> torch.Size:
        """That of the rows."""
        return self.values.shape

    def wide(self) -> Tensor:
        """As float32 again."""
        values = self.values.float()
        return (values if self.zero is None else values + self.zero[..., None]) * self.scale[..., None]


def rounded(x: Tensor, form: torch.dtype) -> Rows8:
    """The nearest numbers of 8 bits to each row's, where its largest is the largest there is."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12).div_(LARGEST[form])
    values = x / scale
    return Rows8((values.round_() if form == INT8 else values).to(form), scale[..., 0])


def rounded_between(x: Tensor) -> Rows8:
    """Rows of int8, 255 steps from each one's least number to its largest."""
    x = x.float()
    # One after the other: `aminmax` of rows takes 15 times as long.
    low, high = x.amin(-1, keepdim=True).clamp_(max=0), x.amax(-1, keepdim=True).clamp_(min=0)
    scale = (high - low).div_(255).clamp_(min=1e-12)
    zero = (low / scale).round_().add_(128)
    values = (x / scale).round_().sub_(zero).clamp_(-128, 127)
    return Rows8(values.to(INT8), scale[..., 0], zero=zero[..., 0])


class Linear8(nn.Linear):
    """A frozen layer whose product is one of 8 bits, where it is asked for rows of those or makes them itself."""

    into_K: Tensor | None = None  # by which rows that need no scale are multiplied when they are made

    def __init__(self, linear: nn.Linear, form: torch.dtype, columns_K: Tensor | None = None) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.form = form
        weight_NK = linear.weight.detach()
        if columns_K is not None:
            self.into_K = LARGEST[form] / (SLACK**2 * columns_K)
            weight_NK = weight_NK.float() / self.into_K
        self.weight8 = rounded(weight_NK, form)
        self.sums_N = self.weight8.wide().sum(-1)
        # No output is larger than the first of these times the length of a row, plus the second (Cauchy and Schwarz).
        most_bias = 0.0 if self.bias is None else float(self.bias.detach().abs().max())
        self.bound = SLACK * float(self.weight8.wide().norm(dim=-1).max()), most_bias

    def forward(self, x: Tensor | Rows8) -> Tensor:
        """W x + b, in the number format of the weights before they were rounded."""
        if isinstance(x, Rows8):
            return multiply(x, self)
        if torch.is_grad_enabled() or self.form == FLOAT8:
            return super().forward(x)
        return multiply(rounded_between(x), self)


def multiply(rows: Rows8, linear: Linear8) -> Tensor:
    """W y + b of rows of 8 bits."""
    y_MK = rows.values.flatten(0, -2)
    scale_M1, weight = rows.scale.reshape(-1, 1), linear.weight8
    if y_MK.is_cuda:
        out_MN = torch._scaled_mm(
            y_MK, weight.values.t(), scale_M1, weight.scale[None], bias=linear.bias, out_dtype=linear.weight.dtype,
            use_fast_accum=True,
        )  # fmt: skip
    elif linear.form == INT8:
        products_MN = torch._int_mm(y_MK, weight.values.t())
        out_MN = torch.empty_like(products_MN, dtype=linear.weight.dtype)
        bias_N = torch.zeros_like(linear.sums_N) if linear.bias is None else linear.bias.float()
        zero_M1 = torch.zeros_like(scale_M1) if rows.zero is None else rows.zero.reshape(-1, 1)
        # A few rows at a time stay near the processor: from one pass to the next, all of them would not.
        for i in range(0, len(y_MK), PIECE):
            piece = slice(i, i + PIECE)
            beside_PN = torch.addmm(bias_N, scale_M1[piece] * zero_M1[piece], linear.sums_N[None])
            own_PN = products_MN[piece].float().mul_(scale_M1[piece])
            out_MN[piece] = torch.addcmul(beside_PN, own_PN, weight.scale)
    else:
        wide_MN = F.linear(y_MK.float() * scale_M1, weight.wide())
        out_MN = (wide_MN if linear.bias is None else wide_MN + linear.bias.float()).to(linear.weight.dtype)
    return out_MN.view(*rows.shape[:-1], -1)
