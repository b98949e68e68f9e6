"""Random numbers that are the same on every device: a hash of (seed, index, stream), not a sequential generator.

Sample i of a seed does not depend on how many samples are drawn beside it, so batches can be cut anywhere, and a GPU
draws what a CPU draws. All arithmetic is on int64 tensors whose values stay below 2**63, so nothing overflows.

Shape legend: N samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9
# (shift, factor) of each round. Factors are odd and below 2**31: a 32-bit value times a factor fits in an int64.
_ROUNDS = ((16, 0x7FEB352D), (15, 0x2C1B3C6D), (13, 0x297A2D39))


def mix(x: Tensor) -> Tensor:
    """Scramble int64 values in [0, 2**32) into others of that range, one to one."""
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


class Draws:
    """Random numbers for the samples `start .. start + count`; each call draws a fresh, independent stream."""

    def __init__(self, seed: int, count: int, *, start: int = 0, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        key = mix(torch.tensor((seed + _GOLDEN) & _MASK, device=self.device))
        index_N = torch.arange(start, start + count, device=self.device)
        self._state_N = mix(mix((index_N + _GOLDEN) & _MASK) ^ key)
        self._streams = 0

    def bits(self, *inner: int) -> Tensor:
        """(N, *inner) integers, uniform in [0, 2**32)."""
        self._streams += 1
        state_N = mix((self._state_N + self._streams * _GOLDEN) & _MASK)
        if not inner:
            return state_N
        counter = torch.arange(1, math.prod(inner) + 1, device=self.device).view(inner)
        return mix((state_N.view(-1, *(1 for _ in inner)) + counter * _GOLDEN) & _MASK)

    def below(self, bound: int | Tensor, *inner: int) -> Tensor:
        """(N, *inner) integers, uniform in [0, bound)."""
        return (self.bits(*inner) * bound) >> 32

    def uniform(self, low: float, high: float, *inner: int) -> Tensor:
        """(N, *inner) float32 numbers, uniform in [low, high)."""
        unit = (self.bits(*inner) >> 8).float() * 2.0**-24
        return unit * (high - low) + low
