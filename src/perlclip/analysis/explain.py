"""`explain`: how single images were thought about, as figures and numbers."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

from perlclip.adapters.folder import Adapter
from perlclip.analysis.cases import Case, Wanted, image_name, look_into
from perlclip.analysis.drift import transition
from perlclip.analysis.figures import draw_case
from perlclip.analysis.trajectories import require_perl
from perlclip.data.sets import ImageSet
from perlclip.errors import unknown_name
from perlclip.files import write_files
from perlclip.progress import progress_bar
from perlclip.text.classes import Classes, are_novel, spelling


def explain(
    adapter: Adapter, images: Sequence[str | Path] | ImageSet, out: str | Path, *, how: str = "gradient",
    shown: str = "", class_names: Sequence[str] | None = None, template: str | None = None,
) -> list[Case]:  # fmt: skip
    """Write `NAME.png`, `NAME.svg` and `NAME.json` for each image; `shown` is a class to map besides the answer.

    Images of one name in several folders are told apart by a number: `NAME`, `NAME-2`, and so on. Labelled images are
    asked about the classes of their set, and their transition is told.
    """
    method, out = require_perl(adapter.method), Path(out)
    if isinstance(images, ImageSet):
        classes, wanted = images.classes, _labelled(images)
    else:
        classes = Classes.spoken(class_names or adapter.class_names, template or adapter.template)
        wanted = [Wanted(image=Path(image), name=Path(image).name) for image in images]
    names = list(classes.names)
    mapped = next((name for name in names if spelling(name) == spelling(shown)), "")
    if shown and not mapped:
        raise unknown_name("class", shown, names)
    state = method.class_state(classes, novel=are_novel(names, adapter.class_names))
    cases = []
    with progress_bar("explain", len(wanted)) as bar:
        for one, stem in zip(wanted, _file_names([Path(one.name) for one in wanted]), strict=True):
            (case,) = look_into(method, [one], names, state, how=how, shown=mapped, head=adapter.head)
            if one.label:
                case = replace(case, transition=transition(*(case.answers[k] == one.label for k in (0, -1))))
            where = str(one.image) if isinstance(one.image, str | Path) else one.name
            numbers = {"how": how, **case.numbers(), "image": where}
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


def _labelled(images: ImageSet) -> list[Wanted]:
    names = images.classes.names
    return [
        Wanted(image=image, name=image_name(image, i, images.name), label=names[label])
        for i, (image, label) in enumerate(zip(images.images, images.labels, strict=True))
    ]
