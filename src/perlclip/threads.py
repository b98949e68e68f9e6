"""How many threads torch computes with."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

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
