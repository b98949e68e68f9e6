"""The page of mistakes: all in one file, bounded, names as text, and used in a real browser by its filter."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from perlclip.data.images import Held
from perlclip.inference.evaluation import Evaluation
from perlclip.viz.mistakes import SIDE, draw_confusion, mistakes_page, shown_name
from tests.browser import needs_browser, use

NAMES = (r"$\input{x}$ </script><b>bold", "dog & cat", "lynx", "a word without any end " * 4)


def evaluation(answers: list[int], labels: list[int], images: list, names=NAMES) -> Evaluation:
    answers_B, labels_B = torch.tensor(answers), torch.tensor(labels)
    correct = 100 * (answers_B == labels_B).double().mean().item()
    return Evaluation(
        accuracy=correct, class_accuracy={}, step_accuracy=[correct], total=len(labels), class_names=tuple(names),
        predictions_KB=answers_B[None], probabilities_BC=torch.rand(len(labels), len(names)), labels_B=labels_B,
        images=images, places_B=torch.arange(len(labels)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Evaluation:
    """Mistakes: 0 for 1 three times, 1 for 2 twice, 3 for 0 once, of which the file is gone."""
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0).integers(0, 256, (900, 700, 3), dtype=np.uint8)
    images: list = [folder / f"<{i}>.jpg" for i in range(3)]
    for path in images:
        Image.fromarray(noise).save(path)
    images += [noise[:32, :32], noise[:40, :400], folder / "gone.png", noise, noise]
    return evaluation([1, 1, 1, 2, 2, 0, 2, 3], [0, 0, 0, 1, 1, 3, 2, 3], images)


@pytest.fixture(scope="module")
def page(found) -> str:
    return mistakes_page(found, title="Mistakes & more")


def test_the_page_is_one_file_and_small(page):
    assert not re.search(r"""(src|href)=(?!["']?(data:|#))|url\((?!#)|@import|https?://(?!www\.w3\.org)""", page)
    pictures = re.findall(r'src="data:image/(\w+);base64', page)
    assert pictures.count("jpeg") == 4 and pictures.count("png") == 1, "what is tiny is kept without loss"
    assert len(page) < 200_000 and "cannot be read" in page


def test_thumbnails_are_no_larger_than_needed(page):
    import base64

    for content in re.findall(r'src="data:image/\w+;base64,([^"]+)"', page):
        assert max(Image.open(io.BytesIO(base64.b64decode(content))).size) <= SIDE


def test_names_are_text(page):
    assert "<b>bold" not in page and "<0>.jpg" not in page and "&lt;0&gt;.jpg" in page
    assert r"$\input{x}$ &lt;/script&gt;&lt;b&gt;bold" in page and page.count("</script>") == 1


def test_a_name_cannot_be_read_as_another():
    """By a sign that turns what follows around, a line break, or bytes that are no text."""
    assert shown_name("café 🦊.png") == "café 🦊.png"
    assert shown_name("cat\u202egnp.exe\n\udcff") == r"cat\u202egnp.exe\n?"


def test_no_more_images_than_asked_for_and_of_every_pair_one(found):
    page = mistakes_page(found, max_images=3)
    pairs = re.findall(r"<li data-label=(\d) data-answer=(\d)>", page)
    assert pairs == [("0", "1"), ("1", "2"), ("3", "0")] and "3 of 6" in page
    assert "No mistakes" in mistakes_page(evaluation([0], [0], [np.zeros((8, 8, 3), np.uint8)]))


def test_what_is_kept_in_memory_is_not_shrunk_for_a_thumbnail():
    picture = Image.new("RGB", (500, 400))
    mistakes_page(evaluation([1], [0], [Held("a.png", b"", picture)]))
    assert picture.size == (500, 400)


def test_the_matrix_has_the_counts_and_the_names_as_they_are(found):
    drawing = draw_confusion(found)
    texts = re.findall(r">([^<>]+)</text>", drawing.svg.decode())
    assert sorted(text for text in texts if text.isdigit()) == ["1", "1", "1", "2", "3"]
    assert "dog &amp; cat" in texts and r"$\input{x}$ &lt;/script&gt;&lt;b…" in texts


def test_of_many_classes_those_with_mistakes_are_drawn():
    names = [f"class {i}" for i in range(90)]
    labels = list(range(90))
    found = evaluation([89, *labels[1:88], 88, 88], labels, [None] * 90, names)
    drawing = draw_confusion(found)
    texts = re.findall(r">([^<>]+)</text>", drawing.svg.decode())
    assert {"class 0", "class 88", "class 89"} <= set(
        texts
    ) and "40 classes with most mistakes of 90" in drawing.caption
    assert len([text for text in texts if text.startswith("class ")]) == 2 * 40 + 1, "and the axis' title"


def test_what_was_skipped_is_said(found):
    from perlclip.data import Unreadable

    assert "2 could not be read" in mistakes_page(replace(found, skipped=(Unreadable("a", "b"),) * 2))


ACT = """
  const cards = [...document.querySelectorAll(".cards > li")];
  const shown = () => cards.filter(c => c.offsetParent).map(c => c.dataset.label + c.dataset.answer);
  const say = () => [shown(), document.querySelector("output").value];
  const choose = (id, value) => { const select = document.getElementById(id); select.value = value;
    select.dispatchEvent(new Event("change", {bubbles: true})); };
  result.all = say();
  choose("label", "0"); result.label = say();
  choose("answer", "0"); result.none = say();
  document.querySelector("[type=reset]").click(); await new Promise(done => setTimeout(done, 50)); result.reset = say();
  document.querySelectorAll(".link")[1].click(); result.pair = say();
  result.focus = document.activeElement.id;
  const heads = [...document.querySelectorAll(".words thead button")];
  const rows = () => [...document.querySelectorAll(".tall tbody tr")].map(row => row.cells[2].textContent);
  heads[2].click(); heads[2].click(); result.sorted = rows();
  result.options = [...document.querySelectorAll("#label option")].map(o => o.textContent);
  result.reachable = [...document.querySelectorAll("select, .filter button, .link, thead button")]
    .every(e => e.tabIndex >= 0 && (e.labels?.length || e.textContent.trim()));
  result.overflow = document.documentElement.scrollWidth > innerWidth;
  result.widths = [...document.images].map(i => i.naturalWidth);
  const ground = getComputedStyle(document.body).backgroundColor;
  result.dark = [matchMedia("(prefers-color-scheme: dark)").matches, ground];
"""


@needs_browser
@pytest.mark.parametrize("width", [1200, 500])
def test_the_filter_works_in_a_browser(page, tmp_path, width):
    seen = use(page, ACT, tmp_path, width)
    everything = ["01", "12", "30", "01", "12", "01"]
    assert seen["wrong"] == [] and seen["all"] == [everything, "6 shown"] == seen["reset"]
    assert seen["label"] == [["01"] * 3, "3 shown"] and seen["none"] == [[], "0 shown"]
    assert seen["pair"] == [["12", "12"], "2 shown"] and seen["focus"] == "label"
    assert seen["sorted"] == ["1", "2", "3"] and seen["options"] == ["all", NAMES[0], NAMES[1], NAMES[3]]
    assert seen["reachable"] and not seen["overflow"] and all(seen["widths"]) and len(seen["widths"]) == 5
