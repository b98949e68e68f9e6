"""Images that are there more than once: the same file, or the same picture stored again, scaled, cropped or mirrored.

Two images are near-duplicates if the frozen CLIP finds them the same (the cosine of their embeddings) and they look the
same, too, 16 by 16 (a correlation, as they are or mirrored): each at least `EACH`, both together at least `BOTH`. CLIP
alone takes two pictures of one kind for the same, small pictures alone two horizons. What is near-duplicate of the
same image is one group.

Shapes: N images, B of a chunk, E embedding width, S small side, P numbers of a small picture.
"""

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

EACH, BOTH = 0.75, 1.74
FLAT = 0.05  # a small picture's contrast, below which it shows nothing that could be compared
CHUNK, PAIRS = 2048, 2**16  # images compared with all others at once, and pairs of small pictures


def duplicate_groups(
    frozen_NE: Tensor, small_N3SS: Tensor, contents: Sequence[Hashable] | None = None
) -> list[tuple[int, ...]]:
    """Groups of two and more images, each in order; `contents` are equal for equal files."""
    parent = list(range(len(frozen_NE)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[Hashable, int] = {}
    same = [(first.setdefault(content, i), i) for i, content in enumerate(contents or ())]
    for i, j in (*same, *_pairs(frozen_NE, small_N3SS)):
        a, b = sorted((root(i), root(j)))
        parent[b] = a
    groups: dict[int, list[int]] = {}
    for i in range(len(parent)):
        groups.setdefault(root(i), []).append(i)
    return [tuple(members) for members in groups.values() if len(members) > 1]


def _pairs(frozen_NE: Tensor, small_N3SS: Tensor) -> Iterator[tuple[int, int]]:
    v_NE, small_NP, mirrored_NP = F.normalize(frozen_NE, dim=-1), _centred(small_N3SS), _centred(small_N3SS.flip(-1))
    for start in range(0, len(v_NE), CHUNK):
        cosine_BN = v_NE[start : start + CHUNK] @ v_NE.T
        for part in torch.split((cosine_BN >= EACH).triu(start + 1).nonzero(), PAIRS):
            i, j = part[:, 0] + start, part[:, 1]
            alike = torch.maximum((small_NP[i] * small_NP[j]).sum(-1), (mirrored_NP[i] * small_NP[j]).sum(-1))
            kept = (alike >= EACH) & (alike + cosine_BN[part[:, 0], j] >= BOTH)
            yield from zip(i[kept].tolist(), j[kept].tolist(), strict=True)


def _centred(small_N3SS: Tensor) -> Tensor:
    """Unit vectors whose product is a correlation; nothing of a picture that shows nothing."""
    x_NP = (small_N3SS - small_N3SS.mean((-2, -1), keepdim=True)).flatten(1)
    return torch.where(x_NP.std(-1, keepdim=True) < FLAT, 0.0, F.normalize(x_NP, dim=-1))
