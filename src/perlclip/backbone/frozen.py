"""What the frozen image tower makes of a batch, as a value: made once, passed on, dropped.

Methods begin at some depth of the frozen tower, and some compare with its answer. Whoever looks at the same images with
several methods, seeds or adapters passes one `FrozenImages` to all of them.

Shapes: B images, N rows (CLS and patches), D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from perlclip.backbone.tower import Tower


class FrozenImages:
    """Rows and pooled state of one batch of pixels, each computed when it is first asked for, never changed after.

    Nothing records a graph, unless gradients with respect to the pixels are wanted. Threads may share it: at worst, two
    of them compute the same tensor.
    """

    def __init__(self, tower: Tower, pixels: Tensor) -> None:
        self.tower, self.pixels = tower, pixels
        self.known: dict[int, Tensor] = {}  # rows after so many blocks, (B, N, D)
        self.pooled_BD: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.pixels.device

    def with_graph(self) -> torch.set_grad_enabled:
        """Whether frozen work records a graph: only for someone who wants the pixels' gradients."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.pixels.requires_grad)

    def rows(self, depth: int = 0) -> Tensor:
        """The sequence after `depth` blocks, (B, N, D)."""
        if depth not in self.known:
            with self.with_graph():
                before = max((d for d in tuple(self.known) if d < depth), default=None)
                x_BND = self.tower.embed(self.pixels) if before is None else self.known[before]
                self.known[depth] = self.tower.run(x_BND, before or 0, depth)
        return self.known[depth]

    def pooled(self, pool: Callable[[], Tensor] | None = None) -> Tensor:
        """The residual stream at CLS after the last block, (B, D).

        `pool` is a way to compute it that shares work with what its caller does next.
        """
        if self.pooled_BD is None:
            with self.with_graph():
                self.pooled_BD = pool() if pool else self._pool()
        return self.pooled_BD

    def _pool(self) -> Tensor:
        depth = max((d for d in tuple(self.known) if d < self.tower.depth), default=0)
        x_BND = self.rows(depth)
        return self.tower.pool(x_BND, cls_rows(x_BND), depth)


Images = Tensor | FrozenImages  # what methods take for images


def cls_rows(x_BND: Tensor) -> Tensor:
    """Row 0 of each sequence: where images are read out."""
    return torch.zeros(len(x_BND), dtype=torch.long, device=x_BND.device)
