"""How many threads torch computes with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CORES = 2  # that work which can be cut is done on; more would mostly wait for memory
In = TypeVar("In")
Out = TypeVar("Out")


@contextmanager
def one_thread() -> Iterator[None]:
    """Short operations are not worth more: threads mostly wait for each other, on a busy machine for its turns too.

    On two cores kept busy by others, two threads drew 67 pictures/s where one drew 6,000.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(work: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
    """Pieces of work, each in one thread, two at a time: the same bits however many there are."""
    with one_thread(), ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, items))


def beside_each_other(work: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
    """The same for a few pieces of some milliseconds, the longest first: that one needs no new thread."""
    with one_thread(), ThreadPoolExecutor(CORES - 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        others = [pool.submit(work, item) for item in items[1:]]
        return [work(items[0]), *(other.result() for other in others)]


def apart(works: Sequence[Callable[[], Tensor]], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What pieces of work make of parameters that need gradients, two at a time, the longest first; so go gradients.

    The same bits as one after the other, as long as no parameter has a part in two of them. Every piece has one.
    """
    return tuple(_Apart.apply(works, *parameters))  # type: ignore[no-untyped-call]


class _Apart(torch.autograd.Function):
    """Each piece has a graph of its own, which only its own thread goes through: back as well as forth."""

    @staticmethod
    def forward(ctx: Any, works: Sequence[Callable[[], Tensor]], *parameters: Tensor) -> tuple[Tensor, ...]:
        def made(work: Callable[[], Tensor]) -> Tensor:
            with torch.enable_grad():
                return work()

        ctx.made, ctx.parameters = beside_each_other(made, works), parameters
        return tuple(each.detach() for each in ctx.made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        def back(pair: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(pair[0], ctx.parameters, pair[1], allow_unused=True)
            return found

        parts = beside_each_other(back, list(zip(ctx.made, gradients, strict=True)))
        found = ([each for each in of_one if each is not None] for of_one in zip(*parts, strict=True))
        return None, *(sum(each[1:], each[0]) if each else None for each in found)
