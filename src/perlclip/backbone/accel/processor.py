"""What torch does slowly on CPUs: frozen layers in float32, and the way back through attention in bfloat16.

* `FrozenLinear`   torch gives products of float32 to MKL, which on AMD's processors has half the speed of oneDNN, by
                   which torch makes its other products; here these are oneDNN's, too, on the way forth and back.
* `attended`       in bfloat16, `scaled_dot_product_attention`'s way back takes three times as long as the way forth
                   among 200 rows, and twelve times among a dozen; as plain matrix products, about as long. Rows that
                   are not trained, as the frozen ones in PERL's first refinement block, get no gradient and cost none.

Both are the same functions but for rounding. `benchmarks/processor.py` measures them.

Shapes: B sequences, N rows, k of them in front, H heads, d a head's width, D = H d, E = 3 D; X = B H.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

WORTH = 2**21  # multiplications from which on oneDNN's start is paid for
MATRIX = 2**21  # numbers of all attention matrices, up to which they are made: a batch of four on ViT-B/16


@cache
def has_onednn() -> bool:
    """Whether this torch and this processor have products of oneDNN's that are faster than MKL's, or as fast."""
    there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    fast = there and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return fast and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + b by oneDNN."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


class _Product(torch.autograd.Function):
    """The same for training what comes before: the layer itself is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return product(gradient, ctx.weight.t(), None), None, None


class FrozenLinear(nn.Linear):
    """A layer that is not trained."""

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        if not self._by_onednn(x):
            return super().forward(x)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return product(x, self.weight, self.bias)
        out: Tensor = _Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out

    def _by_onednn(self, x: Tensor) -> bool:
        return (
            x.device.type == "cpu"
            and x.dtype == self.weight.dtype == torch.float32
            and x.numel() * self.out_features >= WORTH
            and not (self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad))
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and has_onednn()
        )


def attended(qkv_BNE: Tensor, front_BkE: Tensor | None, heads: int, causal: bool) -> Tensor | None:
    """softmax(q kᵀ / √d) v of every head for training on a CPU, (B, k + N, D); None where torch's own is as good."""
    (B, N, _), k = qkv_BNE.shape, 0 if front_BkE is None else front_BkE.shape[1]
    if (
        qkv_BNE.device.type != "cpu"
        or qkv_BNE.dtype != torch.bfloat16
        or B * heads * (k + N) ** 2 > MATRIX
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    ):
        return None
    out: Tensor = _Attention.apply(qkv_BNE, front_BkE, heads, causal)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    """Forth as torch does it; back as the products

        o = P v    dv = Pᵀ do    dS = P (do vᵀ - do · o)    dq = dS k / √d    dk = dSᵀ q / √d
    """  # fmt: skip

    @staticmethod
    def forward(ctx: Any, qkv_BNE: Tensor, front_BkE: Tensor | None, heads: int, causal: bool) -> Tensor:
        ctx.front, ctx.all = 0 if front_BkE is None else front_BkE.shape[1], ctx.needs_input_grad[0]
        rows_BNE = qkv_BNE if front_BkE is None else torch.cat([front_BkE, qkv_BNE], 1)
        qkv_3BHNd = rows_BNE.view(*rows_BNE.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).contiguous()
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        o_BHNd, sums_BHN = flash(*qkv_3BHNd, is_causal=causal)
        ctx.save_for_backward(qkv_3BHNd, o_BHNd, sums_BHN)
        ctx.causal = causal
        out_BND: Tensor = o_BHNd.transpose(1, 2).flatten(2)
        return out_BND

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do_BND: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        qkv_3BHNd, o_BHNd, sums_BHN = ctx.saved_tensors
        _, B, H, N, d = qkv_3BHNd.shape
        q_XNd, k_XNd, v_XNd = qkv_3BHNd.flatten(1, 2)
        do_BHNd = do_BND.view(B, N, H, d).transpose(1, 2)
        do_XNd, along_XN1 = do_BHNd.reshape(B * H, N, d), (do_BHNd.float() * o_BHNd).sum(-1).reshape(-1, N, 1)
        # In bfloat16 the logarithm of P would be off by percents where attention is sharp.
        s_XNN = (q_XNd.float() @ k_XNd.float().mT).mul_(d**-0.5)
        if ctx.causal:
            s_XNN.masked_fill_(torch.ones(N, N, dtype=torch.bool).triu_(1), float("-inf"))
        p_XNN = s_XNN.sub_(sums_BHN.reshape(-1, N, 1)).exp_().to(q_XNd.dtype)

        def before_softmax(rows: slice, columns: slice) -> Tensor:
            """dS / √d at some rows and columns."""
            dp_XNN: Tensor = do_XNd[:, rows] @ v_XNd[:, columns].mT
            ds_XNN: Tensor = (dp_XNN - along_XN1[:, rows]).mul_(p_XNN[:, rows, columns]).mul_(d**-0.5)
            return ds_XNN.to(q_XNd.dtype)

        every = slice(None)
        own = every if ctx.all else slice(ctx.front)
        ds_XNk = before_softmax(every, own)
        ds_XkN = ds_XNk if ctx.all else before_softmax(own, every)
        found = ds_XkN @ k_XNd, ds_XNk.mT @ q_XNd, p_XNN[:, :, own].mT @ do_XNd
        d_BNE = torch.stack(found).view(3, B, H, -1, d).permute(1, 3, 0, 2, 4).flatten(2)
        return d_BNE[:, ctx.front :] if ctx.all else None, d_BNE[:, : ctx.front] if ctx.front else None, None, None
