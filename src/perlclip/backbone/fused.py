"""Two steps of a transformer block that need only one pass over memory where nobody asks for gradients.

`add_norm` and `linear_silu` are plain torch, and on CUDA, in half precision and without a graph, the kernels of
`kernels.py`: same function, one rounding less. Starting such a kernel costs more than torch's own, so that small inputs
are worth it only on their way into a CUDA graph, where starting is free.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perlclip.graphs import recording

LARGE = 2**23  # numbers: 10,000 rows of ViT-B/16
TILES = 4096  # rows from which on our matrix product beats cuBLAS' with an activation behind it


def add_norm(x: Tensor, a: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x + a, and its norm."""
    if has_kernels(x, a):
        from perlclip.backbone import kernels

        return kernels.add_norm(x, a, norm)
    total = x + a
    return total, norm(total)


def linear_silu(y: Tensor, linear: nn.Linear) -> Tensor:
    """silu(W y + b)."""
    if has_kernels(y) and y.numel() >= TILES * y.shape[-1]:
        from perlclip.backbone import kernels

        if kernels.can_multiply(linear):
            return kernels.linear_silu(y, linear)
    return F.silu(linear(y))


def has_kernels(*tensors: Tensor) -> bool:
    """Whether these are half-precision tensors on CUDA, outside autograd and autocast, and a kernel would pay."""
    first = tensors[0]
    return (
        first.is_cuda
        and first.dtype in (torch.bfloat16, torch.float16)
        and (first.numel() >= LARGE or recording())
        and not torch.is_autocast_enabled("cuda")
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and _has_triton()
    )


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()
