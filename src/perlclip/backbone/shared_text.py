"""Class texts that begin alike.

Under the causal mask a row depends only on the rows before it. The rows that all classes have in common, SOS, learned
prompts, "a photo of a", are therefore the same for all of them in every block: they are computed once, as one
sequence, and each class's own rows attend to them. Exact, and with short names most of the text tower's work.

Shapes: C classes, P shared rows, M own rows (cut after the longest EOS), n prompt rows, D width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perlclip.backbone.tower import Tower
from perlclip.errors import PerlclipError


@dataclass(frozen=True)
class SharedText:
    """The rows of C class texts between two blocks of the text tower."""

    tower: Tower
    prefix_1PD: Tensor
    own_CMD: Tensor
    eos_C: Tensor  # the row read out, counted within the class's own

    def __len__(self) -> int:
        return len(self.eos_C)

    def __getitem__(self, classes: slice) -> "SharedText":
        return replace(self, own_CMD=self.own_CMD[classes], eos_C=self.eos_C[classes])

    @classmethod
    def embed(cls, tower: Tower, ids_CN: Tensor, eos_C: Tensor) -> "SharedText":
        """Split token rows at the first position where two classes differ; every EOS is a class's own."""
        alike_N = (ids_CN == ids_CN[:1]).all(0)
        P = min(int(alike_N.int().cumprod(0).sum()), int(eos_C.min()))
        return cls(tower, tower.embed(ids_CN[:1, :P]), tower.embed(ids_CN[:, P:], P), eos_C - P)

    def put(self, rows_nD: Tensor) -> "SharedText":
        """Replace the n rows behind SOS."""
        if self.prefix_1PD.shape[1] <= rows_nD.shape[-2]:
            raise PerlclipError(f"the class texts do not share the {rows_nD.shape[-2]} words that are to be replaced")
        return replace(
            self, prefix_1PD=_join(self.prefix_1PD[:, :1], rows_nD, self.prefix_1PD[:, 1 + rows_nD.shape[-2] :])
        )

    def put_words(self, rows_nD: Tensor) -> "SharedText":
        """The same at the tower's entrance: vectors in the place of words, to which positions are added."""
        position = self.tower.embed.position
        assert isinstance(position, Tensor)
        return self.put(rows_nD + position[1 : 1 + rows_nD.shape[-2]])

    def put_own(self, rows_CnD: Tensor) -> "SharedText":
        """Replace the n rows behind SOS by others for each class: only SOS is shared from here on."""
        C, n, _ = rows_CnD.shape
        rest_CrD = self.prefix_1PD[:, 1 + n :].expand(C, -1, -1)
        own_CMD = torch.cat([rows_CnD.to(self.own_CMD.dtype), rest_CrD, self.own_CMD], 1)
        return replace(
            self, prefix_1PD=self.prefix_1PD[:, :1], own_CMD=own_CMD, eos_C=self.eos_C + n + rest_CrD.shape[1]
        )

    def insert(self, rows_nD: Tensor) -> "SharedText":
        """Put new rows behind SOS; the words move on."""
        return replace(self, prefix_1PD=_join(self.prefix_1PD[:, :1], rows_nD, self.prefix_1PD[:, 1:]))

    def repeat(self, times: int) -> "SharedText":
        """The same classes several times over, to be given prefixes of their own: `put` then takes (times, n, D)."""
        return replace(self, own_CMD=self.own_CMD.repeat(times, 1, 1), eos_C=self.eos_C.repeat(times))

    def whole(self) -> Tensor:
        """Every class's rows, the shared ones before its own: (C, P + M, D)."""
        return torch.cat([self.prefix_1PD.expand(len(self), -1, -1), self.own_CMD], 1)

    def block(self, i: int) -> "SharedText":
        """Block i at every row."""
        prefix_1PD, own_CMD = self.tower.both(i, self.prefix_1PD, self.own_CMD)
        return replace(self, prefix_1PD=prefix_1PD, own_CMD=own_CMD)

    def run(self, start: int, stop: int) -> "SharedText":
        """Blocks start..stop-1 at every row."""
        text = self
        for i in range(start, stop):
            text = text.block(i)
        return text

    def pool(self, start: int = 0, before: "Callable[[int, SharedText], SharedText] | None" = None) -> Tensor:
        """Blocks start..L, read at EOS: (C, D). `before(i, text)` may change the rows that enter block i."""
        text, last = self, self.tower.depth - 1
        for i in range(start, last + 1):
            text = before(i, text) if before else text
            text = text.block(i) if i < last else text
        return self.tower.read(text.own_CMD, text.eos_C, text.prefix_1PD)


def _join(before_1aD: Tensor, rows_AnD: Tensor, after_1bD: Tensor) -> Tensor:
    """One sequence, or one for each of A sets of rows."""
    rows_AnD = rows_AnD if rows_AnD.ndim == 3 else rows_AnD[None]
    A = len(rows_AnD)
    return torch.cat([before_1aD.expand(A, -1, -1), rows_AnD.to(before_1aD.dtype), after_1bD.expand(A, -1, -1)], 1)
