"""Figures and pages: the same numbers give the same bytes, text stays text, and everything is in one file."""

import csv
import html
import io
import json
import re
import warnings
from html.parser import HTMLParser
from importlib.resources import files

import jinja2
import matplotlib
import pytest
import torch
from PIL import Image

from perlclip.analysis.cases import Case
from perlclip.analysis.gallery import gallery
from perlclip.viz.drawing import draw
from perlclip.viz.markup import aligned, csv_lines, csv_text, markdown_text
from perlclip.viz.pages import page
from perlclip.viz.style import COLOURS, GREY, INK, VERMILION, look


def line(figure) -> None:
    axis = figure.subplots()
    axis.plot([1, 2], [3, 4], label="a <b> & c", **look(7))
    axis.legend()


def test_the_same_numbers_give_the_same_bytes_whatever_the_users_settings_are():
    first = draw("one", "", (3, 2), line)
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        again = draw("one", "", (3, 2), line)
        assert dict(matplotlib.rcParams) == before
    assert again == first
    assert not re.search(rb"20\d\d-\d\d-\d\d|[Mm]atplotlib v", first.svg) and b"tIME" not in first.png


def test_an_inline_drawing_has_the_pages_ink_and_no_ground():
    drawing = draw("one", "", (3, 2), line)
    assert INK.encode() in drawing.svg and drawing.svg.startswith(b"<?xml")
    assert drawing.inline.startswith('<svg role="img" ') and "currentColor" in drawing.inline
    assert INK not in drawing.inline and "#ffffff" not in drawing.inline and "<metadata>" not in drawing.inline
    assert "a &lt;b&gt; &amp; c" in drawing.inline


def test_names_are_drawn_as_text_and_never_as_mathematics():
    """Neither `$…$`, which would lose its dollars, nor what TeX could not read; and powers of ten need none of it."""
    names = ["$1 or $2 bill", r"$\input{x}$", "$x^2$", "a $ b", "日本"]

    def paint(figure) -> None:
        axes = figure.subplots(1, 3)
        for name in names:
            axes[0].plot([1, 2], [1, 2], label=name)
        axes[0].legend()
        axes[0].set_title(names[1])
        axes[1].barh(names, range(5))
        axes[2].plot([1, 1000], [2e-3, 7e-3])
        axes[2].set(xscale="log", yscale="log")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of letters that the font has not
        svg = draw("names", "", (9, 3), paint).svg.decode()
    texts = [html.unescape(text) for text in re.findall(r">([^<>]+)</text>", svg)]
    assert all(texts.count(name) >= 2 for name in names) and texts.count(names[1]) == 3
    assert {"10⁰", "10³", "2×10⁻³"} <= set(texts) and "mathdefault" not in svg


def test_text_in_markdown_is_what_it_was():
    odd = r"a|b *c* _d_ e_f <g> `h` [i](j) $k$ ~~l~~ \ &amp; m&n" + "\n# n"
    words = markdown_text(odd)
    assert words == (r"a\|b \*c\* \_d\_ e_f \<g\> \`h\` \[i\](j) \$k\$ \~\~l\~\~ \\ \&amp; m&n # n")
    assert re.sub(r"\\(.)", r"\1", words) == odd.replace("\n", " ")


def test_looks_differ_and_keep_the_colours_of_what_is_set_off():
    found = {(look(i)["color"], look(i)["marker"], look(i)["markerfacecolor"]) for i in range(13)}
    assert len(found) == 13
    assert not {VERMILION, GREY} & {look(i)["color"] for i in range(13)} and len(set(COLOURS)) == len(COLOURS)


@pytest.fixture
def values() -> dict:
    return dict(about="x", findings=["<script>alert(1)</script>"], figures=[], gallery=[], steps=0)


def test_text_in_a_page_is_escaped(values):
    text = page("analysis.html", title="a <b>", **values)
    assert "<title>a &lt;b&gt;</title>" in text and "&lt;script&gt;alert(1)" in text and text.count("<script>") == 1


class Cards(HTMLParser):
    """What the script of a page of cases reads."""

    def handle_starttag(self, tag, attributes):
        self.found = {**getattr(self, "found", {}), **{k: v for k, v in attributes if k in ("data-case", "aria-label")}}


def test_names_of_classes_cannot_break_a_page(values):
    name = """kid's "toy" <b>&amp; </script>"""
    case = Case(
        name="x.png", transition="wrong→correct", label=name, classes=(name, "b"), answers=("b", name),
        confidence_KM=torch.tensor([[0.2, 0.8], [0.9, 0.1]]), maps_KMGG=torch.ones(2, 2, 3, 3), cls_KM=None,
        picture=Image.new("RGB", (8, 8)),
    )  # fmt: skip
    text = page("analysis.html", title="x", **values | {"gallery": gallery([case]), "steps": 1})
    cards = Cards()
    cards.feed(text)
    read = json.loads(cards.found["data-case"])
    assert read["answers"] == ["b", name] and [len(maps) for maps in read["maps"]] == [2, 2]
    assert "<b>kid&#39;s &#34;toy&#34; &lt;b&gt;&amp;amp; &lt;/script&gt;</b>" in text and text.count("</script>") == 1
    assert ">0.5</text>" in text and '<polyline points="34.0,117.2 290.0,23.4 "/>' in text


def test_a_value_that_is_missing_is_an_error_and_no_hole(values):
    with pytest.raises(jinja2.UndefinedError, match="title"):
        page("analysis.html", **values)


def test_templates_fetch_nothing_and_share_one_base():
    templates = [path for path in files("perlclip.viz").joinpath("templates").iterdir() if path.name.endswith(".html")]
    pages, shared = (
        {"report.html", "analysis.html", "mistakes.html", "suspects.html"},
        {"base.html", "cards.html", "tables.html"},
    )
    assert {path.name for path in templates} == pages | shared
    for path in templates:
        text = path.read_text()
        assert "http" not in text and "@import" not in text and 'src="/' not in text
        assert path.name in shared or text.startswith('{% extends "base.html" %}')


def test_plain_tables():
    assert aligned(["a", "bb"], [["ccc", ""]]) == "| a   | bb |\n| --- | -- |\n| ccc |    |\n"
    assert csv_text(["x", "y"], [["a,b", 1 / 3]]) == f'x,y\n"a,b",{1 / 3!r}\n'
    assert csv_text(["x", "y"], [[7, 1 / 3]], digits=3) == "x,y\n7,0.333\n"
    rows = list(csv.DictReader(io.StringIO(csv_lines([{"a": 1}, {"b": None, "a": 2, "c": 3}]))))
    assert rows == [{"b": "", "a": "1", "c": ""}, {"b": "", "a": "2", "c": "3"}]
