"""The analysis page in a real browser: pictures load, sliders move maps and markers, nothing goes wrong."""

import html
import json
import re
import shutil
import subprocess

import pytest

import perlclip
from perlclip.analysis.single import analyze
from tests.analysis.test_analysis import loud_perl

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome to open the page in")

# Before the page's own script, so that nothing it throws is missed.
WATCH = """<script>
window.wrong = [];
addEventListener("error", e => wrong.push(e.message || `cannot load ${e.target.src}`), true);
addEventListener("unhandledrejection", e => wrong.push(String(e.reason)));
console.error = console.warn = (...words) => wrong.push(words.join(" "));
</script>"""
ACT = """<script>
addEventListener("load", () => {
  const card = document.querySelector(".case"), slider = card.querySelector("input"), last = +slider.max;
  const look = () => ({maps: [...card.querySelectorAll(".over")].map(i => i.src), value: slider.value,
    marker: card.querySelector(".marker").getAttribute("transform"), step: card.querySelector("output").value,
    answer: card.querySelector(".answer").textContent});
  const move = (input, value) => { input.value = value; input.dispatchEvent(new Event("input", {bubbles: true})); };
  const result = {last, first: look(), widths: [...document.images].map(i => i.naturalWidth)};
  move(slider, last); result.moved = look();
  move(document.querySelector(".all input"), 1); result.all = look();
  result.together = [...document.querySelectorAll(".case input")].map(i => i.value);
  slider.focus(); result.focused = document.activeElement === slider;
  result.labelled = [...document.querySelectorAll("input")].every(i => i.ariaLabel);
  result.overflow = document.documentElement.scrollWidth > innerWidth;
  result.figures = document.querySelectorAll("figure > svg").length;
  const out = document.createElement("pre");
  out.id = "result"; out.textContent = JSON.stringify({...result, wrong}); document.body.append(out);
});
</script>"""


@pytest.fixture(scope="module")
def seen(backbone, tree, tmp_path_factory):
    """What a browser finds after using the page."""
    folder, data = tmp_path_factory.mktemp("page"), perlclip.load_images(tree)
    adapter_folder = perlclip.save_adapter(
        loud_perl(backbone), folder / "adapter", class_names=data.class_names, template=data.template
    )
    analyze(perlclip.load_adapter(adapter_folder), data, folder / "out", cases=2)
    page = (folder / "out" / "index.html").read_text()
    assert page.count("<head>") == page.count("</body>") == 1
    watched = folder / "watched.html"
    watched.write_text(page.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{ACT}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--window-size=1000,800", "--virtual-time-budget=10000", "--dump-dom", watched.as_uri()]
    for _ in range(3):  # a browser on a busy machine may dump the page before its scripts have run
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
        if found:
            return json.loads(html.unescape(found.group(1)))
    raise AssertionError(dom[-2000:])


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
