"""The analysis page in a real browser: pictures load, sliders move maps and markers, nothing goes wrong."""

import pytest

import perlclip
from perlclip.analysis.single import analyze
from tests.analysis.test_analysis import loud_perl
from tests.browser import needs_browser, use

pytestmark = needs_browser
ACT = """
  const card = document.querySelector(".case"), slider = card.querySelector("input"), last = +slider.max;
  const look = () => ({maps: [...card.querySelectorAll(".over")].map(i => i.src), value: slider.value,
    marker: card.querySelector(".marker").getAttribute("transform"), step: card.querySelector("output").value,
    answer: card.querySelector(".answer").textContent});
  const move = (input, value) => { input.value = value; input.dispatchEvent(new Event("input", {bubbles: true})); };
  Object.assign(result, {last, first: look(), widths: [...document.images].map(i => i.naturalWidth)});
  move(slider, last); result.moved = look();
  move(document.querySelector(".all input"), 1); result.all = look();
  result.together = [...document.querySelectorAll(".case input")].map(i => i.value);
  slider.focus(); result.focused = document.activeElement === slider;
  result.labelled = [...document.querySelectorAll("input")].every(i => i.ariaLabel);
  result.overflow = document.documentElement.scrollWidth > innerWidth;
  result.figures = document.querySelectorAll("figure > svg").length;
"""


@pytest.fixture(scope="module")
def seen(backbone, tree, tmp_path_factory):
    """What a browser finds after using the page."""
    folder, data = tmp_path_factory.mktemp("page"), perlclip.load_images(tree)
    adapter_folder = perlclip.save_adapter(
        loud_perl(backbone), folder / "adapter", class_names=data.class_names, template=data.template
    )
    analyze(perlclip.load_adapter(adapter_folder), data, folder / "out", cases=2)
    return use((folder / "out" / "index.html").read_text(), ACT, folder)


def test_nothing_goes_wrong(seen):
    assert seen["wrong"] == []


def test_pictures_load(seen):
    assert len(seen["widths"]) >= 5 and all(seen["widths"])
    assert seen["figures"] == 2  # curves and drift, drawn in the page itself


def test_a_slider_swaps_maps_and_moves_the_marker(seen):
    first, moved = seen["first"], seen["moved"]
    assert first["step"] == "0" and moved["step"] == moved["value"] == str(seen["last"]) == "3"
    assert all(a != b for a, b in zip(first["maps"], moved["maps"], strict=True))
    assert first["marker"] != moved["marker"] and moved["answer"]


def test_one_slider_moves_all_cases(seen):
    assert len(seen["together"]) >= 2 and set(seen["together"]) == {"1"} and seen["all"]["step"] == "1"


def test_it_can_be_used_by_keyboard_and_fits_the_window(seen):
    assert seen["focused"] and seen["labelled"] and not seen["overflow"]
