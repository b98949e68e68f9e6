"""Random numbers of one thread, from a generator of their own.

PyTorch's default generator belongs to the whole process: a thread that seeds it, and another that draws from it in
between, as every data loader does, would both get other numbers than alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, what this thread draws on the CPU is what `torch.manual_seed(seed)` would give; nothing else moves."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; one that draws, with the own generator."""
        given = dict(kwargs or {})
        where = [x.device for x in args if isinstance(x, torch.Tensor)] or [torch.device(given.get("device") or "cpu")]
        if where[0].type != "cpu":  # another device's numbers come from another generator
            return func(*args, **given)
        if not _draws(func) and "generator" in func.overloadpacket.overloads():  # randn and its like have a form for it
            func = func.overloadpacket.generator
        if _draws(func) and given.get("generator") is None:
            given["generator"] = self.generator
        return func(*args, **given)


def _draws(operator: Any) -> bool:
    return any(argument.name == "generator" for argument in operator._schema.arguments)
