"""Class texts that begin alike.

Under a causal mask a row depends only on the rows before it. The rows that all classes have in common, SOS, learned
prompts, "a photo of a", are therefore the same for all of them in every block: they are computed once, as one
sequence, and each class's own rows attend to them. Exact, and with short names most of the text tower's work.

Without a causal mask, every row depends on all others: nothing is shared, and all rows are each class's own.

Shapes: C classes, P shared rows, M own rows, n prompt rows, D width; A sets of rows, each for C / A of the classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perlclip.backbone.tower import Beside, Tower
from perlclip.errors import PerlclipError


@dataclass(frozen=True)
class SharedText:
    """The rows of C class texts between two blocks of the text tower."""

    tower: Tower
    prefix_1PD: Tensor
    own_CMD: Tensor
    eos_C: Tensor  # the row read out, counted within the class's own
    words: int  # rows that begin all sentences alike, SOS among them

    def __len__(self) -> int:
        return len(self.eos_C)

    def __getitem__(self, classes: slice) -> "SharedText":
        return replace(self, own_CMD=self.own_CMD[classes], eos_C=self.eos_C[classes])

    @classmethod
    def embed(cls, tower: Tower, ids_CN: Tensor, eos_C: Tensor) -> "SharedText":
        """Split token rows at the first position where two classes differ; every EOS is a class's own."""
        alike_N = (ids_CN == ids_CN[:1]).all(0)
        words = min(int(alike_N.int().cumprod(0).sum()), int(eos_C.min()))
        P = words if tower.causal else 0
        return cls(tower, tower.embed(ids_CN[:1, :P]), tower.embed(ids_CN[:, P:], P), eos_C - P, words)

    def put(self, rows_nD: Tensor) -> "SharedText":
        """Replace the n rows behind SOS."""
        n = rows_nD.shape[-2]
        if self.words < self.tower.starts + n:
            raise PerlclipError(f"the class texts do not share the {n} words that are to be replaced")
        if not self.tower.causal:
            return self._put_own(_each(rows_nD, len(self)))
        first = self.tower.starts
        return replace(self, prefix_1PD=_join(self.prefix_1PD[:, :first], rows_nD, self.prefix_1PD[:, first + n :]))

    def put_words(self, rows_nD: Tensor) -> "SharedText":
        """The same at the tower's entrance: vectors in the place of words, to which positions are added."""
        position, first = self.tower.embed.position, self.tower.starts
        assert isinstance(position, Tensor)
        return self.put(rows_nD + position[first : first + rows_nD.shape[-2]])

    def put_own(self, rows_CnD: Tensor) -> "SharedText":
        """Replace the n rows behind SOS by others for each class: only SOS is shared from here on."""
        if not self.tower.causal:
            return self._put_own(rows_CnD)
        C, n, _ = rows_CnD.shape
        first = self.tower.starts
        rest_CrD = self.prefix_1PD[:, first + n :].expand(C, -1, -1)
        own_CMD = torch.cat([rows_CnD.to(self.own_CMD.dtype), rest_CrD, self.own_CMD], 1)
        return replace(
            self, prefix_1PD=self.prefix_1PD[:, :first], own_CMD=own_CMD, eos_C=self.eos_C + n + rest_CrD.shape[1]
        )

    def _put_own(self, rows_CnD: Tensor) -> "SharedText":
        first = self.tower.starts
        behind_CrD = self.own_CMD[:, first + rows_CnD.shape[1] :]
        own_CMD = torch.cat([self.own_CMD[:, :first], rows_CnD.to(self.own_CMD.dtype), behind_CrD], 1)
        return replace(self, own_CMD=own_CMD)

    def insert(self, rows_nD: Tensor) -> "SharedText":
        """Put new rows behind SOS; the words move on."""
        first = self.tower.starts
        prefix_1PD = _join(self.prefix_1PD[:, :first], rows_nD, self.prefix_1PD[:, first:])
        return replace(self, prefix_1PD=prefix_1PD, words=self.words + rows_nD.shape[-2])

    def repeat(self, times: int) -> "SharedText":
        """The same classes several times over, to be given prefixes of their own: `put` then takes (times, n, D)."""
        return replace(self, own_CMD=self.own_CMD.repeat(times, 1, 1), eos_C=self.eos_C.repeat(times))

    def whole(self) -> Tensor:
        """Every class's rows, the shared ones before its own: (C, P + M, D)."""
        return torch.cat([self.prefix_1PD.expand(len(self), -1, -1), self.own_CMD], 1)

    def block(self, i: int) -> "SharedText":
        """Block i at every row."""
        if not self.tower.causal:
            return replace(self, own_CMD=self.tower.block(i, self.own_CMD))
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
        return text.read()

    def read(self, beside: Beside | None = None) -> Tensor:
        """The last block at EOS, (C, D); `beside` makes what is added to it of its input there."""
        context = self.prefix_1PD if self.tower.causal else None
        if beside is None:
            return self.tower.read(self.own_CMD, self.eos_C, context)
        x_CD = self.own_CMD[torch.arange(len(self), device=self.eos_C.device), self.eos_C]
        return self.tower.read(self.own_CMD, self.eos_C, context) + beside(x_CD)


def _join(before_1aD: Tensor, rows_AnD: Tensor, after_1bD: Tensor) -> Tensor:
    """One sequence, or one for each of A sets of rows."""
    rows_AnD = rows_AnD if rows_AnD.ndim == 3 else rows_AnD[None]
    A = len(rows_AnD)
    return torch.cat([before_1aD.expand(A, -1, -1), rows_AnD.to(before_1aD.dtype), after_1bD.expand(A, -1, -1)], 1)


def _each(rows_AnD: Tensor, count: int) -> Tensor:
    """A set of rows for each class, of one for all or of one for each of A lists of them."""
    if rows_AnD.ndim == 2:
        return rows_AnD.expand(count, -1, -1)
    return rows_AnD.repeat_interleave(count // len(rows_AnD), 0)
