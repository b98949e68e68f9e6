"""Ways to do many runs: each module here is an executor by its name, and its `execute` does the runs."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

from perlclip.bench.machines import Machines, Outcomes, Unit
from perlclip.bench.store import Store
from perlclip.errors import unknown_name

Executor = Callable[[Sequence[Unit], Store, Machines], Outcomes]


def executor(name: str) -> Executor:
    """An executor by name, imported when it is asked for."""
    known = [module.name for module in iter_modules(__path__)]
    if name not in known:
        raise unknown_name("executor", name, known)
    found: Executor = import_module(f"{__name__}.{name}").execute
    return found
