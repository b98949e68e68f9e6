"""Data sets that are benchmarked together: a source, targets, and variants of the source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perlclip.data.coop.catalog import dataset_names, load_dataset
from perlclip.data.sets import DataSet
from perlclip.data.toybox import load_toybox, toybox_names
from perlclip.errors import PerlclipError, unknown_name

Loader = Callable[[str, Path | None], DataSet]  # name, root of the data sets


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Data sets that are benchmarked together."""

    name: str
    source: str
    targets: tuple[str, ...]
    variants: tuple[str, ...] = ()  # of the source: its classes, other pictures
    load: Loader
    on_disk: bool = False  # below a root that the user must name
    drawn: bool = False  # by our own code: the same name is the same pictures
    published: bool = False  # its sets are those that methods have settings for
    backbone: str = "tiny"  # unless another is asked for

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.source, *self.targets, *self.variants)


def _from_catalog(name: str, root: Path | None) -> DataSet:
    if root is None:
        raise PerlclipError("the data sets of suite 'coop' are read from a folder: name it with --data ROOT")
    return load_dataset(name, root)


def _fifteen(name: str, sets: Sequence[str], load: Loader, **more: Any) -> Suite:
    """A source, ten targets, four variants."""
    return Suite(name=name, source=sets[0], targets=tuple(sets[1:11]), variants=tuple(sets[11:]), load=load, **more)


VIT_B16 = "openai/clip-vit-base-patch16"
SUITES: dict[str, Suite] = {
    "toybox": _fifteen("toybox", toybox_names(), lambda name, root: load_toybox(name), drawn=True),
    "coop": _fifteen("coop", dataset_names(), _from_catalog, on_disk=True, published=True, backbone=VIT_B16),
}


def suite(name: str) -> Suite:
    """A suite by name."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]
