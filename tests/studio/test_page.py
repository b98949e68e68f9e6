"""The studio in a real browser, by keyboard: from an empty folder to an adapter, undo, reload, a kill, hostile names.

STUDIO_PICTURES=docs python -m pytest tests/studio/test_page.py -k pictures      # draws those of the documents
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import perlclip
from perlclip.studio import takeaway
from perlclip.studio.project import Project
from tests.browser import Browser, needs_browser
from tests.studio.conftest import COLOURS, draw
from tests.studio.test_interface import until

pytestmark = needs_browser
SHOWN = "(document.querySelector('.stage figcaption')?.textContent ?? '')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def page(browser):
    browser.first = browser.tab()
    browser.size(1100, 760)
    browser.wrong.clear()
    yield browser
    assert [one for one in browser.wrong if "ERR_CONNECTION" not in one] == []  # a studio that has ended
    browser.call("Page.navigate", url="about:blank")


def done(page) -> int:
    return page.run("Number(document.querySelector('.tally strong')?.textContent.replace(/,/g, '') ?? -1)")


def label(page, count: int) -> None:
    """Give images the class that their name has, by its number; the next one is waited for."""
    for _ in range(count):
        page.wait(f"/\\w+-\\w+/.test({SHOWN})")
        name, before = page.run(SHOWN), done(page)
        page.press(str(1 + list(COLOURS).index(name.split("-")[1].removesuffix(".png"))))
        page.wait(
            f"{SHOWN} !== {json.dumps(name)} && Number(document.querySelector('.tally strong').textContent) > {before}"
        )


def test_from_an_empty_folder_to_an_adapter_by_keyboard(page, studio, tmp_path, backbone, monkeypatch):
    tested, evaluate = [], takeaway.evaluate
    monkeypatch.setattr(takeaway, "evaluate", lambda it, *a, **k: (tested.append(it), evaluate(it, *a, **k))[1])
    folder = draw(tmp_path / "images", 36)
    with studio(folder, every=15) as (address, worker):
        page.open(address)
        page.wait("document.activeElement?.matches('.class-row input')")
        for name in COLOURS:
            page.type(name)
            page.press("Enter")
        page.press("Enter", modifiers=2)
        page.wait("document.querySelector('.choice.best')")
        label(page, 15)
        name = page.run(SHOWN)
        page.press("X", at="KeyX", held=3)  # with caps lock, and for too long: one is skipped
        page.wait(f"{SHOWN} !== {json.dumps(name)}")
        page.press("z")  # back to what was skipped
        page.wait(f"{SHOWN} === {json.dumps(name)} && !document.querySelector('.tally .badge')")
        assert done(page) == 15
        until(lambda: worker.perl)
        page.press("l")
        page.wait("document.querySelectorAll('.pane .over').length === 2 && document.querySelector('.chart')")
        page.press("ArrowLeft")
        page.wait("document.querySelector('.look output').value.startsWith('After step 3')")
        page.press("Escape")
        page.press("g", "2")
        page.wait("document.querySelectorAll('.tile').length > 0")
        active = int(page.run("document.querySelector('.tile.active').dataset.place"))
        page.press("é", at="Digit2")  # of the grid's images this one is something else; a French keyboard
        until(lambda: worker.project.labels().given().get(active) == 1)
        assert page.run(f"document.querySelector('#tile-{active}') === null")
        many = page.run("document.querySelectorAll('.tile[aria-selected=true]').length")
        assert f" {many} " in page.run("document.querySelector('.gridbar').innerText") or not many
        if not many:
            page.press(" ", "ArrowRight", " ")
        before = len(worker.project.labels().of)
        page.press("Enter")  # all of one guess in one stroke
        page.wait("document.querySelector('.toast button')")
        until(lambda: len(worker.project.labels().of) > before)
        many = len(worker.project.journal.entries[-1]["images"])
        assert worker.project.journal.entries[-1]["op"] == "label" and many > 1
        assert len(worker.project.labels().of) == before + many
        page.press("g", "3")
        page.wait("document.querySelector('.checking h2')")
        page.press("g", "4")
        page.wait("document.querySelector('.curve')")
        page.press("e")
        page.wait("document.querySelector('.done a')")
    adapter = perlclip.load_adapter(tmp_path / "images-adapter" / "adapter", backbone=backbone)
    assert adapter.class_names == tuple(COLOURS) and adapter.method.name == "perl"
    counts = worker.project.labels().counts().values()
    assert adapter.training["images"] == sum(min(32, count) for count in counts)  # those held out as well
    apart = [row["labels"] - row["held"] for row in worker.history if row["kind"] == "perl" and row["held"]]
    assert [it.method.name for it in tested] == ["perl"] and tested[0].training["images"] in apart  # not in the report
    assert "labels that it was not trained on" in (tmp_path / "images-adapter" / "report.html").read_text()
    assert len(perlclip.load_images(tmp_path / "images-adapter" / "labels.csv")) == before + many


def test_a_reload_in_mid_training_and_two_tabs(page, studio, tmp_path):
    with studio(draw(tmp_path / "images", 30), every=8, recipe=perlclip.Recipe(epochs=5000)) as (address, worker):
        worker.project.set_classes([(None, name) for name in COLOURS])
        for place in (0, 2, 3, 5):  # of two classes, so that PERL can be trained whatever is suggested
            worker.project.label([place], place % 3)
        worker.wake()
        page.open(address)
        label(page, 8)
        page.wait("document.querySelector('#status progress')")
        page.call("Page.reload")
        page.wait("document.querySelector('.tally')")
        assert done(page) == 12
        page.wait("document.querySelector('#status progress')")  # it goes on
        page.tab()
        page.open(f"{address}/#label")
        label(page, 2)
        page.use(page.first)
        page.wait("document.querySelector('.tally strong').textContent === '14'")  # what the other tab has done
        page.press("z")
        page.wait("document.querySelector('.tally strong').textContent === '13'")
        assert len(worker.project.labels().of) == 13
        last = [entry for entry in worker.project.journal.entries if entry["op"] == "undo"][-1]
        assert last["of"] == 12  # its own last stroke, also after the reload; not the other tab's


def test_hostile_names_are_only_names(page, studio, tmp_path):
    folder = draw(tmp_path / "images", 12)
    evil = '<img src=x onerror="window.hit=1">&amp;\u202e\'"><svg onload=hit()>'
    (folder / "00-red.png").rename(folder / f"{evil.replace('/', '')}.png")
    (folder / "01-green.png").rename(folder / os.fsdecode(b"\xff\xfe javascript:alert(1).png"))
    classes = ["<script>window.hit=1</script>", "{{7*7}} ${8*8}", "'; DROP TABLE labels; --"]
    with studio(folder, every=6) as (address, worker):
        worker.project.set_classes([(None, name) for name in classes])
        for place in range(10):
            worker.project.label([place], place % 3)
        worker.wake()
        page.open(f"{address}/#label")
        for view in "4321":
            page.wait("document.querySelector('nav a[aria-current]')")
            page.press("g", view)
        page.wait("document.querySelector('.choice')")
        shown = page.run("[...document.querySelectorAll('.choice .name')].map(one => one.textContent)")
        assert shown == classes
        page.press("g", "2")
        page.run("(s => { s.value = 'all'; s.dispatchEvent(new Event('change')); })(document.querySelector('select'))")
        page.wait("document.querySelectorAll('.tile').length === 12")
        titles = page.run("[...document.querySelectorAll('.tile')].map(one => one.title)")
        assert f"{evil}.png" in titles and any("javascript:alert(1)" in title for title in titles)
        page.wait("[...document.querySelectorAll('.tile img')].every(image => image.complete)")
        assert page.run("[...document.querySelectorAll('.tile img')].every(image => image.naturalWidth === 40)")
        page.press("Home", "l")
        page.wait("document.querySelector('.look .bars')")
        assert page.run("window.hit === undefined && !document.querySelector('main script, main svg[onload]')")


def test_fifty_thousand_images_scroll(page, studio, tmp_path, monkeypatch):
    """Only what is to be seen is in the page; pictures are those of the first few files, over and over."""
    folder = draw(tmp_path / "images", 3)
    files, real = sorted(folder.iterdir()), Project._read

    def many(self):
        real(self)
        self.names = tuple(f"{n:05}.png" for n in range(50_000))
        self.paths, self.keys = [files[n % 3] for n in range(50_000)], tuple(f"{n:064}" for n in range(50_000))
        self._place = {name: i for i, name in enumerate(self.names)}

    monkeypatch.setattr(Project, "_read", many)
    monkeypatch.setattr("perlclip.studio.worker.Worker._look", lambda self, enough=0: False)
    monkeypatch.setattr(
        "perlclip.studio.kept.Thumbnails.get", lambda self, place: (files[place % 3].read_bytes(), "image/png")
    )
    with studio(folder) as (address, worker):
        worker.project.set_classes([(None, "cat"), (None, "dog")])
        worker.wake()
        page.open(f"{address}/#grid")
        page.wait("document.querySelectorAll('.tile').length > 10")
        times = page.run("""(async () => {
          const box = document.querySelector(".gridbox"), times = [], most = [];
          for (let i = 0; i <= 40; i++) {
            const start = performance.now();
            box.scrollTop = box.scrollHeight * i / 40;
            await new Promise(requestAnimationFrame); await new Promise(requestAnimationFrame);
            times.push(performance.now() - start); most.push(document.querySelectorAll(".tile").length);
          }
          return {slow: times.sort((a, b) => a - b)[36], most: Math.max(...most)};
        })()""")
        assert times["most"] < 150 and times["slow"] < 250  # milliseconds for two frames, on a busy machine
        page.press("End")
        page.wait("[...document.querySelectorAll('.tile.active')].some(tile => tile.title === '49999.png')")


def test_it_fits_a_telephone_and_can_be_read(page, studio, tmp_path):
    with studio(draw(tmp_path / "images", 12), every=6) as (address, worker):
        worker.project.set_classes(
            [(None, "a class with a name that is longer than a telephone is wide, by far"), (None, "b")]
        )
        for place in range(8):
            worker.project.label([place], place % 2)
        worker.wake()
        page.size(360, 740)
        page.open(f"{address}/#label")
        for view in range(1, 5):
            page.wait("document.querySelector('nav a[aria-current]') && document.querySelector('main section')")
            page.press("g", str(view))
            page.wait(f"document.querySelector('nav a:nth-child({view})[aria-current]')")
            assert (
                page.run("Math.max(document.documentElement.scrollWidth, document.querySelector('main').scrollWidth)")
                <= 360
            ), view
            nameless = """[...document.querySelectorAll("button, input, select, a, [role=option]")]
              .filter(one => one.offsetParent && !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
              .map(one => one.outerHTML)"""
            assert page.run(nameless) == []
        page.press("?")
        page.wait("document.querySelectorAll('dialog .keys kbd').length > 12")
        assert "[object" not in page.run("document.querySelector('dialog').textContent")
        page.press("Escape")
        for dark in (False, True):
            page.dark(dark)
            for name in ("--ink", "--soft", "--accent", "--bad"):
                for ground in ("--card", "--paper"):
                    assert (
                        contrast(
                            *(
                                page.run(f"getComputedStyle(document.documentElement).getPropertyValue('{v}')")
                                for v in (name, ground)
                            )
                        )
                        > 4.5
                    ), (dark, name, ground)
        page.dark(False)


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG counts it."""

    def light(colour: str) -> float:
        parts = [int(part, 16) / 255 for part in re.findall("..", colour.strip().lstrip("#"))]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_kill_loses_nothing_and_the_page_goes_on(page, studio, tmp_path, clip_folder):
    """Labels given while the service is dead arrive when it is back."""
    folder = draw(tmp_path / "images", 20)
    names = tmp_path / "classes.txt"
    names.write_text("\n".join(COLOURS))
    command = [
        sys.executable,
        "-c",
        "from perlclip.cli import main; main()",
        "studio",
        folder,
        "--port",
        "0",
        "--no-open",
    ]
    command += ["--backbone", clip_folder, "--class-names", names, "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    version = "await fetch('/api/state').then(found => found.json()).then(state => state.version)"
    try:
        address = re.search(r"http://\S+", process.stdout.readline())[0]
        page.open(address)
        label(page, 3)
        page.wait(f"(async () => {version} === 4)()")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    label(page, 2)  # into nothing
    page.wait("!document.getElementById('away').hidden")
    (folder / "!new.png").write_bytes((folder / "00-red.png").read_bytes())  # all others have another place now
    with studio(folder, int(address.rpartition(":")[2])) as (again, worker):
        assert again == address
        page.wait("document.getElementById('away').hidden && sessionStorage.outbox === '[]'")
        assert len(worker.project.labels().of) == 5 and worker.project.version == 6
        assert all(f"-{name}." in file for file, name in worker.project.rows(worker.project.labels()))
        assert worker.project.labels().names == tuple(COLOURS)
    page.wrong[:] = [one for one in page.wrong if "409 (Conflict)" not in one]  # of places in the old folder


@pytest.mark.skipif("STUDIO_PICTURES" not in os.environ, reason="STUDIO_PICTURES=docs draws the documents' pictures")
def test_pictures_for_the_documents(page, tmp_path, tiny):
    from perlclip.serve.guard import Limits, running
    from perlclip.studio.interface import studio_app
    from perlclip.studio.toys import draw_toys, truth_of
    from perlclip.studio.worker import Worker

    out = Path(os.environ["STUDIO_PICTURES"])
    names = draw_toys(tmp_path / "toys")
    truth = truth_of()
    with Project(tmp_path / "toys") as project:
        project.set_classes([(None, name) for name in names])
        worker = Worker(project, tiny, every=20)
        worker.start()
        with running(studio_app(worker), Limits(port=0, seconds=120)) as address:
            page.open(f"{address}/#label")
            page.size(1100, 720)
            for n in range(46):
                page.wait(f"{SHOWN} !== ''")
                name = page.run(SHOWN)
                page.press(str(1 + (truth[name] if n != 30 else (truth[name] + 1) % len(names))))
                page.wait(f"{SHOWN} !== {json.dumps(name)}")
                time.sleep(0.1)
            end = time.monotonic() + 200
            while (worker.status.task or not worker.perl) and time.monotonic() < end:
                time.sleep(0.2)
            for key, name in (("1", "studio"), ("2", "studio-grid"), ("3", "studio-check"), ("4", "studio-adapter")):
                page.press("g", key)
                time.sleep(1.5)
                page.picture(out / f"{name}.png")
            page.press("g", "1")
            page.press("l")
            page.wait("document.querySelector('.panes')")
            time.sleep(0.5)
            page.dark()
            time.sleep(0.5)
            page.picture(out / "studio-look.png")
            page.dark(False)
        worker.stop()
    from PIL import Image

    for path in out.glob("studio*.png"):
        Image.open(path).convert("RGB").quantize(200).save(path, optimize=True)
