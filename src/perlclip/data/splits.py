"""Train, val and test, as people call them."""

import re
from collections.abc import Iterable

from perlclip.errors import PerlclipError

SPLITS = ("train", "val", "test")
SPELLINGS = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def split_named(name: str) -> str | None:
    """The split that a folder, a cell or an option means; None if it means none."""
    return SPELLINGS.get(name.strip().casefold())


def split_folders(where: str, tops: Iterable[str], looks_split: Iterable[str]) -> dict[str, str]:
    """The folder of each split, among folders that stand side by side; nothing if they are classes.

    `looks_split` are those that have folders with images in them but no image of their own. What could be either is
    refused: to train on splits as if they were classes is worse than to ask.
    """
    tops = list(tops)
    named = {name: split for name in tops if (split := split_named(name))}
    if named and len(named) == len(tops):
        found: dict[str, str] = {}
        for name, split in named.items():
            if split in found:
                raise PerlclipError(
                    f"{where} has two folders for the split {split!r}, {found[split]!r} and {name!r}; keep one of them"
                )
            found[split] = name
        return found
    some = sorted(set(named) & set(looks_split))
    if some:
        others = ", ".join(repr(name) for name in tops if name not in named)
        raise PerlclipError(
            f"{where} has {some[0]!r}, a split with folders in it, beside {others[:200]}: either splits (train, val, "
            "test) or classes can stand there; move the others away"
        )
    words = [
        {split for word in re.findall(r"[a-z]+", name.casefold()) if (split := split_named(word))} for name in tops
    ]
    if words and all(words) and len(set().union(*words)) > 1:
        shown = ", ".join(map(repr, tops[:4]))
        raise PerlclipError(
            f"the folders of {where} ({shown}) look like splits; call them train, val and test, or if they are classes "
            "list the images in a CSV manifest"
        )
    return {}
