"""Steps of a transformer block that need only one pass over memory, and small parts of a training step in one kernel.

`add_norm`, `attention` among few rows and, where nobody asks for gradients, `linear_silu` are on CUDA and in half
precision the kernels of `kernels.py`, elsewhere plain torch: same function, one rounding less. `think`, `enter`,
`read_row` and `unit` are those of `step_kernels.py` where gradients are asked for. Starting such a kernel costs more
than starting torch's own, so that small inputs are worth it only on the way into a CUDA graph, where starting is free.
"""

import warnings
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone.accel.cuda_graphs import recording
from perlclip.backbone.accel.eight import FLOAT8, Linear8, Rows8
from perlclip.backbone.accel.processor import attended
from perlclip.errors import first_line

LARGE = 2**23  # numbers: 10,000 rows of ViT-B/16
SHORT = 64  # rows of a sequence up to which one program of ours does all of a head
TILES = 4096  # rows from which on our matrix product beats cuBLAS' with an activation behind it


def add_norm(x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor | Rows8]:
    """x + a, and its norm; for a product of float8 in that, where there is a kernel for it."""
    train = wants_gradient(x, a)
    if getattr(norm, "form", None) == FLOAT8 and not torch.is_grad_enabled() and has_kernel("eight", x):
        from perlclip.backbone.accel import kernels

        return kernels.add_norm8(x, a, norm)
    if has_kernel("add_norm_training" if train else "add_norm", x) and not (train and norm.weight.requires_grad):
        from perlclip.backbone.accel import kernels

        if not train:
            return kernels.add_norm(x, a, norm)
        out: tuple[Tensor, Tensor] = kernels.AddNorm.apply(x, a, norm)  # type: ignore[no-untyped-call]
        return out
    total = x + a
    return total, norm(total)


def attention(
    qkv_BNE: Tensor, heads: int, causal: bool, out: nn.Linear, front_BkE: Tensor | None = None
) -> Tensor | Rows8:
    """softmax(q kᵀ / √d) v of every head, (B, N, D), of queries, keys and values side by side, as `out` wants it.

    Those of the first k rows may be apart from the others', which then are not trained.
    """
    (B, N, E), k = qkv_BNE.shape, 0 if front_BkE is None else front_BkE.shape[1]
    d = E // 3 // heads
    if d in (16, 32, 64, 128):
        if isinstance(out, Linear8) and out.into_K is not None and not (torch.is_grad_enabled() or causal or k):
            if has_kernel("eight", qkv_BNE):
                from perlclip.backbone.accel import kernels

                return kernels.attention8(qkv_BNE, heads, out.into_K)
        elif k + N <= SHORT and not (k and wants_gradient(qkv_BNE)) and has_kernel("attention", qkv_BNE):
            from perlclip.backbone.accel import kernels

            short: Tensor = kernels.ShortAttention.apply(qkv_BNE, front_BkE, heads, causal)  # type: ignore[no-untyped-call]
            return short
    if wants_gradient(qkv_BNE, *([] if front_BkE is None else [front_BkE])):
        found = attended(qkv_BNE, front_BkE, heads, causal)
        if found is not None:
            return found
    if front_BkE is not None:
        qkv_BNE = torch.cat([front_BkE, qkv_BNE], 1)
    # Taken apart before they are turned: on the way back they are put together where they lie.
    q_BHNd, k_BHNd, v_BHNd = (part.transpose(1, 2) for part in qkv_BNE.view(B, k + N, 3, heads, d).unbind(2))
    return F.scaled_dot_product_attention(q_BHNd, k_BHNd, v_BHNd, is_causal=causal).transpose(1, 2).flatten(2)


def linear_silu(y: Tensor | Rows8, linear: nn.Linear) -> Tensor | Rows8:
    """silu(W y + b)."""
    if isinstance(y, Rows8):
        assert isinstance(linear, Linear8)
        from perlclip.backbone.accel import kernels

        return kernels.linear_silu8(y, linear)
    if not wants_gradient(y) and y.numel() >= TILES * y.shape[-1] and has_kernel("linear_silu", y):
        from perlclip.backbone.accel import kernels

        if kernels.can_multiply(linear):
            return kernels.linear_silu(y, linear)
    return F.silu(linear(y))


def enter(front_BkD: Tensor, own_BND: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """Rows before those of a sequence, and the norm of these rows."""
    if wants_gradient(front_BkD, own_BND) and not norm.weight.requires_grad and has_kernel("enter", front_BkD):
        from perlclip.backbone.accel import step_kernels

        out: tuple[Tensor, Tensor] = step_kernels.Enter.apply(front_BkD, own_BND, norm)  # type: ignore[no-untyped-call]
        return out
    return torch.cat([front_BkD, own_BND], 1), norm(front_BkD)


def unit(x: Tensor) -> Tensor:
    """Rows at unit length, in float32."""
    if torch.is_grad_enabled() and has_kernel("unit", x):
        from perlclip.backbone.accel import step_kernels

        v: Tensor = step_kernels.Unit.apply(x)  # type: ignore[no-untyped-call]
        return v
    return F.normalize(x.float(), dim=-1)


def read_row(
    x_BND: Tensor, y_BND: Tensor, read_B: Tensor, qkv: nn.Linear, heads: int, causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Row `read_B[b]` of x, and its attention among the rows of y, (B, D) each; None where no kernel does it."""
    if not wants_gradient(x_BND, y_BND) or qkv.weight.requires_grad or not has_kernel("read", y_BND):
        return None
    from perlclip.backbone.accel import step_kernels

    out: tuple[Tensor, Tensor] = step_kernels.Read.apply(x_BND, y_BND, read_B, qkv, heads, causal)  # type: ignore[no-untyped-call]
    return out


def can_think(h_BD: Tensor, weight: Tensor) -> bool:
    """Whether `think` has a kernel for this state and a projector with this weight."""
    return wants_gradient(weight) and weight.dtype == torch.float32 and has_kernel("think", h_BD)


def think(h_BD: Tensor, w_P: Tensor, rank: int, eps: float, dtype: torch.dtype) -> Tensor:
    """W2 GELU(W1 LN(h) + b1) + b2 in float32, rounded to `dtype`; all parameters are in one row."""
    from perlclip.backbone.accel import step_kernels

    z_BD: Tensor = step_kernels.Think.apply(h_BD, w_P, rank, eps, dtype)  # type: ignore[no-untyped-call]
    return z_BD


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records what is done with these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def has_kernel(name: str, x: Tensor) -> bool:
    """Whether this is a half-precision tensor on CUDA, outside autocast, for which a kernel pays and works."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and (x.numel() >= LARGE or recording())
        and not torch.is_autocast_enabled("cuda")
        and works(name, x.device)
    )


@cache
def works(name: str, device: torch.device) -> bool:
    """Triton may be absent, or present without the compiler or the card that a kernel needs: each is tried once."""
    try:
        from perlclip.backbone.accel import kernels

        with torch.inference_mode(False), torch.no_grad():
            kernels.PROBES[name](device)
    except Exception as error:
        sentence = f"the fused kernel {name} does not work here, going on without: {first_line(error)}"
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        return False
    return True
