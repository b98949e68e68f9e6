"""How many threads torch computes with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
