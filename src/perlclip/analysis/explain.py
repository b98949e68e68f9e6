"""`explain`: how single images were thought about, as figures and numbers."""

import json
import re
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from perlclip.adapters.folder import Adapter
from perlclip.analysis.cases import Case, Wanted, look_into
from perlclip.analysis.figures import draw_case
from perlclip.analysis.trajectories import require_perl
from perlclip.errors import unknown_name
from perlclip.files import write_files
from perlclip.progress import progress_bar
from perlclip.text.classes import Classes, are_novel, spelling, spoken


def explain(
    adapter: Adapter, images: Sequence[str | Path], out: str | Path, *, how: str = "gradient", shown: str = "",
    class_names: Sequence[str] | None = None, template: str | None = None,
) -> list[Case]:  # fmt: skip
    """Write `NAME.png`, `NAME.svg` and `NAME.json` for each image; `shown` is a class to map besides the answer.

    Images of one name in several folders are told apart by a number: `NAME`, `NAME-2`, and so on.
    """
    method, out, paths = require_perl(adapter.method), Path(out), [Path(image) for image in images]
    names = [spoken(name) for name in class_names or adapter.class_names]
    mapped = next((name for name in names if spelling(name) == spelling(shown)), "")
    if shown and not mapped:
        raise unknown_name("class", shown, names)
    novel = are_novel(names, adapter.class_names)
    state = method.class_state(Classes.spoken(names, template or adapter.template), novel=novel)
    cases = []
    with progress_bar("explain", len(images)) as bar:
        for path, stem in zip(paths, _file_names(paths), strict=True):
            wanted = [Wanted(image=path, name=path.name)]
            (case,) = look_into(method, wanted, names, state, how=how, shown=mapped, head=adapter.head)
            numbers = {"how": how, **case.numbers(), "image": str(path)}
            content = (json.dumps(numbers, ensure_ascii=False) + "\n").encode()
            write_files({**draw_case(stem, case).files(out), out / f"{stem}.json": content})
            cases.append(case)
            bar()
    return cases


def _file_names(paths: Sequence[Path]) -> list[str]:
    """The images' own names; of those that would be the same, also where capitals count for nothing, with a number."""
    names: list[str] = []
    for path in paths:
        stem = re.sub(r"[^\w.-]+", "_", path.stem)
        numbered = (f"{stem}-{i}" for i in count(2))
        taken = {name.casefold() for name in names}
        names.append(next(name for name in chain([stem], numbered) if name.casefold() not in taken))
    return names
