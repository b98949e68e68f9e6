"""Two steps of a transformer block that need only one pass over memory.

`add_norm` and, where nobody asks for gradients, `linear_silu` are on CUDA and in half precision the kernels of
`kernels.py`, elsewhere plain torch: same function, one rounding less. Starting such a kernel costs more than starting
torch's own, so that small inputs are worth it only on their way into a CUDA graph, where starting is free.
"""

import warnings
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.backbone.accel.cuda_graphs import recording
from perlclip.errors import first_line

LARGE = 2**23  # numbers: 10,000 rows of ViT-B/16
TILES = 4096  # rows from which on our matrix product beats cuBLAS' with an activation behind it


def add_norm(x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + a, and its norm."""
    if has_kernels(x):
        from perlclip.backbone.accel import kernels

        if not wants_gradient(x, a):
            return kernels.add_norm(x, a, norm)
        if not norm.weight.requires_grad:
            out: tuple[Tensor, Tensor] = kernels.AddNorm.apply(x, a, norm)  # type: ignore[no-untyped-call]
            return out
    total = x + a
    return total, norm(total)


def linear_silu(y: Tensor, linear: nn.Linear) -> Tensor:
    """silu(W y + b)."""
    if has_kernels(y) and not wants_gradient(y) and y.numel() >= TILES * y.shape[-1]:
        from perlclip.backbone.accel import kernels

        if kernels.can_multiply(linear):
            return kernels.linear_silu(y, linear)
    return F.silu(linear(y))


def wants_gradient(*tensors: Tensor) -> bool:
    """Whether autograd records what is done with these."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def has_kernels(x: Tensor) -> bool:
    """Whether this is a half-precision tensor on CUDA, outside autocast, for which a kernel pays."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and (x.numel() >= LARGE or recording())
        and not torch.is_autocast_enabled("cuda")
        and _kernels_work(x.device)
    )


@cache
def _kernels_work(device: torch.device) -> bool:
    """Triton may be absent, or present without the compiler that it needs: try it once."""
    try:
        from perlclip.backbone.accel import kernels

        with torch.no_grad(), torch.inference_mode(False):
            x = torch.ones(1, 1, 16, device=device, dtype=torch.bfloat16)
            kernels.add_norm(x, x, nn.LayerNorm(16, device=device, dtype=torch.bfloat16))
    except Exception as error:
        sentence = f"fused kernels do not work here, going on without: {first_line(error)}"
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
        return False
    return True
