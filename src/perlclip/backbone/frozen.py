"""What the frozen image tower makes of a batch, as a value: made once, passed on, dropped.

Methods begin at some depth of the frozen tower, and some compare with its answer. Whoever looks at the same images with
several methods, seeds or adapters passes one `FrozenImages` to all of them.

Shapes: B images, N rows (CLS and patches), D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from perlclip.backbone.lens import PLAIN, Lens
from perlclip.backbone.tower import Tower


class FrozenImages:
    """Rows and pooled state of one batch of pixels, each computed when it is first asked for, never changed after.

    The tower looks at the pixels through a lens, if there is one, or at what that has `shown` of them already. Nothing
    records a graph, unless gradients with respect to the pixels are wanted. Threads may share it: at worst, two of them
    compute the same tensor.
    """

    def __init__(self, tower: Tower, pixels: Tensor, lens: Lens | None = None, shown: Tensor | None = None) -> None:
        self.tower, self.pixels, self.lens, self._shown = tower, pixels, lens, shown
        self.known: dict[int, Tensor] = {}  # rows after so many blocks, (B, N, D)
        self.middles: dict[int, Tensor] = {}  # what is read after so many blocks, (B, F)
        self.pooled_BD: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def device(self) -> torch.device:
        """Where the pixels are."""
        return self.pixels.device

    @property
    def lens_name(self) -> str:
        """That of the lens, or `plain`."""
        return self.lens.name if self.lens else PLAIN

    @property
    def shown(self) -> Tensor:
        """The pixels as the tower sees them."""
        if self._shown is not None:
            return self._shown
        return self.lens(self.pixels) if self.lens else self.pixels

    def with_graph(self) -> torch.set_grad_enabled:
        """Whether frozen work records a graph: only for someone who wants the pixels' gradients."""
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.pixels.requires_grad)

    def rows(self, depth: int = 0) -> Tensor:
        """The sequence after `depth` blocks, (B, N, D)."""
        if not self._serves(self.known.get(depth)):
            before = self._deepest(depth)
            with self.with_graph():
                x_BND = self.tower.embed(self.shown) if before is None else self.known[before]
                self.known[depth] = self.tower.run(x_BND, before or 0, depth)
        return self.known[depth]

    def middle(self, depth: int, *wanted: int | None) -> Tensor:
        """What the sequence says after `depth` blocks, (B, F): CLS, where there is one, and the mean of the patches.

        Both at unit length and side by side, all of it at unit length again, in float32. To gradients the lengths are
        constants: a row times its gradient is then what it contributes, where else it would be 0 for CLS. Ask for it
        before the pooled state, which then goes on from here; rows from before that will be `wanted`, too, are kept on
        the way.
        """
        if not self._serves(self.middles.get(depth)):
            for before in sorted(each for each in wanted if each is not None and each < depth):
                self.rows(before)
            x_BND, starts = self.rows(depth), self.tower.starts
            with self.with_graph():
                parts = [x_BND[:, i].float() for i in range(starts)] + [x_BND[:, starts:].mean(1, dtype=torch.float32)]
                units = [part_BD / part_BD.detach().norm(dim=-1, keepdim=True).clamp(min=1e-12) for part_BD in parts]
                self.middles[depth] = torch.cat(units, -1) / len(parts) ** 0.5
        return self.middles[depth]

    def pooled(self, pool: Callable[[], Tensor] | None = None, start: int = 0) -> Tensor:
        """The residual stream at CLS after the last block, (B, D).

        `pool` is a way to compute it from block `start` on that shares work with what its caller does next.
        """
        if not self._serves(self.pooled_BD):
            depth = self._deepest(self.tower.depth) or 0
            with self.with_graph():
                self.pooled_BD = pool() if pool and depth <= start else self._pool(self.rows(depth), depth)
        assert self.pooled_BD is not None
        return self.pooled_BD

    def _pool(self, x_BND: Tensor, depth: int) -> Tensor:
        return self.tower.pool(x_BND, cls_rows(x_BND), depth)

    def _deepest(self, depth: int) -> int | None:
        """The depth below this one from which to go on."""
        return max((d for d, x_BND in tuple(self.known.items()) if d < depth and self._serves(x_BND)), default=None)

    def _serves(self, tensor: Tensor | None) -> bool:
        """Whether what was made before can be used now: with gradients on, it may lack the graph that is wanted."""
        if tensor is None or not torch.is_grad_enabled():
            return tensor is not None
        return not tensor.is_inference() and tensor.requires_grad == self.pixels.requires_grad


Images = Tensor | FrozenImages  # what methods take for images


def cls_rows(x_BND: Tensor) -> Tensor:
    """Row 0 of each sequence: where images are read out."""
    return torch.zeros(len(x_BND), dtype=torch.long, device=x_BND.device)
