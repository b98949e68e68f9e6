"""The gallery of an analysis' page: what is shown of each case, and where its confidence chart has its points."""

import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from perlclip.analysis.cases import Case, overlay
from perlclip.analysis.figures import scale_of, titles
from perlclip.viz.pages import data_url

SMALL = 160  # pixels a side; smaller pictures are shown with sharp pixels and stored without loss
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 300, 170, 34, 10, 10, 26  # of a confidence chart
ORDER = ("wrong→correct", "correct→wrong", "correct→correct", "wrong→wrong")  # the changes first


def gallery(cases: Sequence[Case]) -> list[tuple[str, list[tuple[Case, dict[str, Any]]]]]:
    """The cases of each transition that there are, each with what its card needs besides."""
    groups = [(transition, [case for case in cases if case.transition == transition]) for transition in ORDER]
    return [(transition, [(case, case_view(case)) for case in group]) for transition, group in groups if group]


def case_view(case: Case) -> dict[str, Any]:
    """What a page needs of a case beside its numbers: pictures, maps of every step, points of the chart."""
    scale = scale_of(case)
    maps = [[_picture_url(overlay(map_GG, scale)) for map_GG in case.maps_KMGG[:, m]] for m in range(2)]
    return {
        "picture": _picture_url(case.picture),
        "small": case.picture.width < SMALL,
        "titles": titles(case),
        "data": {"maps": maps, "answers": case.answers},  # what the slider switches between
        "chart": _chart(case),
    }


def _chart(case: Case) -> dict[str, Any]:
    steps, wide, high = len(case.confidence_KM) - 1, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    xs = [round(LEFT + wide * k / steps, 1) for k in range(steps + 1)]

    def y(confidence: float) -> float:
        return round(TOP + high * (1 - confidence), 1)

    return {
        "width": WIDTH, "height": HEIGHT, "left": LEFT, "top": TOP, "wide": wide, "high": high, "steps": xs,
        "grid": [(f"{value:g}", y(value)) for value in (0, 0.5, 1)],
        "lines": [list(zip(xs, map(y, case.confidence_KM[:, m].tolist()), strict=True)) for m in range(2)],
    }  # fmt: skip


def _picture_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    kind = "png" if picture.width < SMALL else "jpeg"
    picture.save(buffer, kind, optimize=True)
    return data_url(buffer.getvalue(), f"image/{kind}")
