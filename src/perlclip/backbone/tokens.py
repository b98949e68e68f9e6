"""Prompts as token ids, cut and grouped by length, so that little is computed for padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A group of texts more costs kernels of its own, about as much as so many rows; on CUDA, where they are small, more.
ROWS_A_GROUP = {False: 128, True: 2048}


@dataclass(frozen=True)
class Tokens:
    """A batch of prompts, cut after the longest one's EOS: under the causal mask nothing behind it can matter."""

    ids_BN: Tensor
    eos_B: Tensor

    def by_length(self) -> "list[tuple[Tokens, Tensor]]":
        """The same prompts in a few groups of about one length, each cut after its longest, with their places."""
        lengths = (self.eos_B + 1).tolist()
        groups = []
        for members in length_groups(lengths, ROWS_A_GROUP[self.eos_B.is_cuda]):
            members_b = torch.tensor(members, device=self.eos_B.device)
            longest = max(lengths[i] for i in members)
            groups.append((Tokens(self.ids_BN[members_b, :longest], self.eos_B[members_b]), members_b))
        return groups


def length_groups(lengths: Sequence[int], price: int) -> list[list[int]]:
    """Indices in groups by length, such that rows after padding, plus a price for each group, are fewest."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    # ends[j]: one behind the last index, in that order, of the j-th distinct length.
    ends = [n for n in range(1, len(order) + 1) if n == len(order) or lengths[order[n]] != lengths[order[n - 1]]]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}  # end -> (price so far, start of the last group)
    for end in ends:
        longest = lengths[order[end - 1]]
        best[end] = min((best[start][0] + (end - start) * longest + price, start) for start in best)
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        groups.append(sorted(order[start:end]))
        end = start
    return groups[::-1]
