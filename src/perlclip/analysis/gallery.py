"""One HTML page an analysis, which needs no other file and no network: style, script and pictures are in it."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from perlclip.analysis.cases import Case, overlay
from perlclip.analysis.drawings import Drawing, scale_of, titles

TEMPLATE = Path(__file__).with_name("page.html")
SMALL = 160  # pixels a side; smaller pictures are shown with sharp pixels and stored without loss
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 300, 170, 34, 10, 10, 26  # of a confidence chart

ORDER = ("wrong→correct", "correct→wrong", "correct→correct", "wrong→wrong")  # the changes first
CAPTIONS = {
    "curves": "Averages over the images at every step, with 95 % bands; the arrow says which way is better.",
    "drift": "Boxes: the middle half of the images, with the median; whiskers: 5 to 95 %; small marks: the mean.",
}


def page(title: str, body: Sequence[str]) -> str:
    """The frame of every page."""
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("{{title}}", escape(title)).replace("{{body}}", "\n".join(body))


def study_page(
    title: str, about: Mapping[str, Any], findings: Sequence[str], drawings: Sequence[Drawing], cases: Sequence[Case]
) -> str:
    """Curves, drift, and a gallery with a slider over steps."""
    body = [f"<h1>{escape(title)}</h1>", f"<p class=about>{escape(_about(about))}</p>", _list(findings)]
    for heading, drawn in zip(("Step by step", "Drift from the first answer"), drawings, strict=True):
        body += [f"<h2>{heading}</h2>", figure(drawn, CAPTIONS[drawn.name])]
    if cases:
        body += ["<h2>Cases</h2>", _gallery(cases)]
    return page(title, body)


def _about(about: Mapping[str, Any]) -> str:
    config = about["config"]
    part = "" if about["images"] == about["images_in_all"] else f" of {about['images_in_all']}"
    kind = "classes that were not trained on" if about["novel_classes"] else "classes"
    return (
        f"{about['images']}{part} images, {about['classes']} {kind}; PERL with K = {config['steps']}, rank "
        f"{config['rank']}, on {about['backbone']}; adapter {about['adapter']}; perlclip {about['perlclip']}."
    )


def _list(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def figure(drawn: Drawing, caption: str) -> str:
    """A drawing in the page's own ink."""
    return f"<figure>{drawn.inline}<figcaption>{escape(caption)}</figcaption></figure>"


# ---- the gallery ----


def _gallery(cases: Sequence[Case]) -> str:
    steps = len(cases[0].maps_KMGG) - 1
    parts = [
        "<p class=about>Orange patches speak for a class, blue ones against it; full colour is the case's largest "
        "contribution. Arrow keys move a slider.</p>",
        f"<div class=all><label>all cases: step <output id=all-step>0</output><input type=range id=all min=0 "
        f'max={steps} value=0 step=1 aria-label="step of all cases"></label></div>',
    ]
    for transition in sorted({case.transition for case in cases}, key=ORDER.index):
        group = [case for case in cases if case.transition == transition]
        parts += [f"<h3>{escape(transition)}</h3>", "<div class=cases>", *map(_case, group), "</div>"]
    return "\n".join(parts)


def _case(case: Case) -> str:
    source, scale, steps = _data_url(case.picture), scale_of(case), len(case.maps_KMGG) - 1
    small = "small" if case.picture.width < SMALL else ""
    maps = [[_data_url(overlay(map_GG, scale)) for map_GG in case.maps_KMGG[:, m]] for m in range(2)]
    data = escape(json.dumps({"maps": maps, "answers": case.answers, "confidence": case.confidence_KM.tolist()}))
    shown = "".join(
        f'<figure class=map><div class=stack><img class=base src="{source}" alt="{escape(case.name)}">'
        f'<img class=over src="{maps[m][0]}" alt="evidence for {escape(case.classes[m])}"></div>'
        f"<figcaption class=c{m}>{escape(title).replace(chr(10), '<br>')}</figcaption></figure>"
        for m, title in enumerate(titles(case))
    )
    return (
        f'<article class="case {small}" data-case="{data}"><p><b>{escape(case.label)}</b> '
        f'<small>{escape(case.name)}</small></p><div class=row><img class=plain src="{source}" alt="the image">'
        f"{shown}</div>{_chart(case)}<label>step <output>0</output>: <span class=answer>"
        f"{escape(case.answers[0])}</span><input type=range min=0 max={steps} value=0 step=1 "
        f'aria-label="step of {escape(case.name)}"></label></article>'
    )


def _chart(case: Case) -> str:
    """The confidence of both classes as a small chart with a marker that the slider moves."""
    steps = len(case.confidence_KM) - 1
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    xs = [LEFT + wide * k / steps for k in range(steps + 1)]
    parts = []
    for value in (0, 0.5, 1):
        y = TOP + high * (1 - value)
        parts.append(f'<path class=grid d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/><text x={LEFT - 6} y={y + 4:.1f} '
                     f"text-anchor=end>{value:g}</text>")  # fmt: skip
    parts += [f"<text x={x:.1f} y={HEIGHT - 8} text-anchor=middle>{k}</text>" for k, x in enumerate(xs)]
    parts.append(f'<path class=marker d="M0 {TOP}V{TOP + high}" transform="translate({LEFT} 0)"/>')
    for m in range(2):
        ys = [TOP + high * (1 - p) for p in case.confidence_KM[:, m].tolist()]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        dots = "".join(f"<circle cx={x:.1f} cy={y:.1f} r=3.2 />" for x, y in zip(xs, ys, strict=True))
        parts.append(f'<g class=c{m}><polyline points="{points}"/>{dots}</g>')
    return (
        f'<svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" data-left={LEFT} data-wide={wide} role=img '
        f'aria-label="confidence of {escape(case.classes[0])} and {escape(case.classes[1])} by step">'
        f"{''.join(parts)}</svg>"
    )


def _data_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    kind = "png" if picture.width < SMALL else "jpeg"
    picture.save(buffer, kind, optimize=True)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
