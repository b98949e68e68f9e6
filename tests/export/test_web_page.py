"""The page in a real browser, from a file: the pixels and the answers of Python, with two adapters in one batch.

WEB_PICTURE=docs/browser.png python -m pytest tests/export/test_web_page.py -k picture      # draws that of docs/onnx.md
"""

import base64
import gzip
import io
import json
import os
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import perlclip
from perlclip.backbone import LENSES
from perlclip.export.web_page import RUNTIME, export_page, runtime_files
from tests.browser import Browser, needs_browser
from tests.cli.test_cli import fails, run
from tests.common import random_middle
from tests.export.test_onnx import adapter_of, with_head

pytest.importorskip("onnx")
# `make test` fetches it where npm is; ONNXRUNTIME_WEB names another one.
FOUND = [*filter(None, [os.environ.get("ONNXRUNTIME_WEB")]), *map(str, Path(sys.prefix).glob("onnxruntime-web-*.tgz"))]
SHOWN = ["<b>one</b>", "two", *LENSES]
needs_runtime = pytest.mark.skipif(not FOUND, reason="no onnxruntime-web: `npm pack onnxruntime-web`, ONNXRUNTIME_WEB")


def picture(width: int, height: int, seed: int = 0, **options) -> bytes:
    """Coloured blots and noise, so that every weight of a filter counts."""
    rng = np.random.default_rng(seed)
    blots = Image.fromarray(rng.integers(0, 255, (5, 7, 3), np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    noisy = np.clip(np.asarray(blots) + rng.normal(0, 40, (height, width, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noisy).save(buffer, "png", **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def page(tiny, tmp_path_factory):
    """Adapters that differ in all they can, lenses among it, and a browser that has opened their page."""
    folder = tmp_path_factory.mktemp("page")
    middle = random_middle(tiny, adapter_of(tiny).class_names)
    adapters = [with_head(adapter_of(tiny, readout="rising"), features="mean", share=0.7, scale=2.0, middle=middle)]
    adapters.append(adapter_of(tiny, 2, rank=3, steps=2, readout="mean"))
    adapters += [*(adapter_of(tiny, lens=lens) for lens in LENSES), adapter_of(tiny, center=0.75, readout="rising")]
    path = export_page(adapters, folder / "page.html", runtime=FOUND[0], names=SHOWN, examples=[picture(40, 30)])
    with Browser(folder) as browser:
        browser.open(path.as_uri())
        browser.wait("document.getElementById('state').textContent.includes('ready')")
        yield browser, adapters
        assert browser.wrong == []


@needs_browser
@needs_runtime
def test_a_dropped_image_has_the_answers_of_python(page):
    browser, adapters = page
    turned = Image.Exif()
    turned[0x112] = 6
    for content in (picture(50, 41), picture(200, 131, 1), picture(64, 64, 2), picture(70, 90, 3, exif=turned)):
        browser.run(
            f"""(() => {{
            const bytes = Uint8Array.from(atob({base64.b64encode(content).decode()!r}), c => c.charCodeAt(0));
            const carried = new DataTransfer();
            carried.items.add(new File([bytes], "dropped.png", {{type: "image/png"}}));
            document.getElementById("answers").replaceChildren();
            drop.dispatchEvent(new DragEvent("drop", {{dataTransfer: carried, bubbles: true}}));
            }})()"""
        )
        browser.wait("document.querySelector('article')")
        heads = browser.run("[...document.querySelectorAll('h2')].map(each => each.textContent)")
        sure = browser.run(
            "[...document.querySelectorAll('tbody tr:first-child td:last-child')].map(e => parseInt(e.textContent))"
        )
        for name, adapter, head, percent in zip(SHOWN, adapters, heads, sure, strict=True):
            want = perlclip.Classifier(adapter).predict(content)
            assert head == f"{name}: {want.label}" and abs(percent - 100 * want.probability) < 0.7
    assert browser.run("document.querySelectorAll('thead')[0].rows[0].cells.length") == 1 + 5 + 1, "all steps are shown"
    browser.run("document.querySelector('#examples button').click()")
    browser.wait("document.querySelectorAll('article').length === 2")


@needs_browser
@needs_runtime
def test_pixels_are_those_of_pillow_to_the_bit(page, tiny, tmp_path):
    browser, _ = page
    for seed, (width, height) in enumerate([(50, 41), (333, 64), (64, 120), (129, 128)]):
        content = picture(width, height, seed)
        made = browser.run(
            f"""(async () => {{
            const bytes = Uint8Array.from(atob({base64.b64encode(content).decode()!r}), c => c.charCodeAt(0));
            const {{rgb, width, height}} = await rgbOf(new Blob([bytes], {{type: "image/png"}}));
            const view = crop(rgb, width, height, (await loaded).about);
            const resized = [1, 2, 3].map(filter => [...resize(rgb, width, height, 37, 90, filter)]);
            return {{view: [...view], numbers: [...normalised(view, (await loaded).about)], resized}};
            }})()"""
        )
        image = Image.open(io.BytesIO(content))
        want = tiny.preprocess.crop(image)
        assert np.array_equal(np.array(made["view"]).reshape(64, 64, 3).transpose(2, 0, 1), want)
        assert np.array_equal(np.float32(made["numbers"]).reshape(3, 64, 64), tiny.preprocess.test_view(image).numpy())
        for filter_, found in zip((1, 2, 3), made["resized"], strict=True):
            assert np.array_equal(np.array(found).reshape(90, 37, 3), np.asarray(image.resize((37, 90), filter_)))


@needs_browser
@needs_runtime
def test_what_is_no_image_is_said_and_nothing_is_fetched(page):
    browser, _ = page
    browser.run("take([new File(['no image'], 'wrong.png')])")
    browser.wait("document.getElementById('error').textContent.startsWith('wrong.png: ')")
    refused = browser.run("fetch('https://example.com').then(() => 'fetched', error => error.name)")
    assert refused == "TypeError"
    browser.wrong[:] = [each for each in browser.wrong if "Content Security Policy" not in each]


@needs_browser
@needs_runtime
@pytest.mark.skipif("WEB_PICTURE" not in os.environ, reason="WEB_PICTURE=docs/browser.png draws the documents' picture")
def test_a_picture_for_the_documents(tmp_path):
    sets = ("noisy_shapes", "turned_shapes")
    for name in sets:
        ask = ("--backbone", "tiny", "--shots", "16", "--epochs", "1", "--no-rehearse", "--out", tmp_path / name)
        run("fit", f"toybox:{name}", *ask)
    ask = ("--format", "web", "--runtime", FOUND[0], "--examples", "toybox:noisy_shapes", "--out", tmp_path / "a.html")
    run("export", *(tmp_path / name for name in sets), *ask)
    with Browser(tmp_path, 1120, 840) as browser:
        browser.open((tmp_path / "a.html").as_uri())
        browser.wait("document.querySelectorAll('#examples button').length > 4")
        for n in (1, 4):
            browser.run(f"document.querySelectorAll('#examples button')[{n}].click()")
            browser.wait(f"document.querySelectorAll('article').length === {1 + n // 4}")
        browser.picture(Path(os.environ["WEB_PICTURE"]))


def package(path: Path, names: list[str]) -> Path:
    """What looks like npm's, with these files in it."""
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(f"package/dist/{name}")
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
    return path


def test_the_runtime_is_taken_from_a_package_or_a_folder(tmp_path):
    whole = package(tmp_path / "whole.tgz", ["ort.js", *RUNTIME.values()])
    with tarfile.open(whole) as archive:
        archive.extractall(tmp_path / "some", filter="data")
    assert runtime_files(whole) == runtime_files(tmp_path / "some") == dict.fromkeys(RUNTIME, b"abc")
    (tmp_path / "text.tgz").write_text("no archive")
    for wrong in (package(tmp_path / "half.tgz", ["ort.js"]), tmp_path, tmp_path / "text.tgz"):
        with pytest.raises(perlclip.PerlclipError, match="npm pack onnxruntime-web"):
            runtime_files(wrong)


def test_the_command_writes_a_page_of_adapters(tiny, tmp_path):
    whole = package(tmp_path / "whole.tgz", list(RUNTIME.values()))
    for name, depth in (("one", 7), ("two", 7), ("deep", 9)):
        perlclip.save_adapter(adapter_of(tiny, depth=depth), tmp_path / name)
    ask = ("export", tmp_path / "one", tmp_path / "two", "--format", "web", "--out", tmp_path / "page.html")
    assert "MB" in run(*ask, "--runtime", whole, "--int8", "weights", "--examples", "toybox:noisy_shapes").stdout
    page = (tmp_path / "page.html").read_text()
    told = page.partition('data-part="about">')[2].partition("<")[0]
    told = json.loads(gzip.decompress(base64.b64decode(told)))
    assert [each["name"] for each in told["adapters"]] == ["one", "two"] and len(told["examples"]) == 12
    assert told["inputs"]["classes"]["shape"] == [2, 5, 5, tiny.embed_dim] and len(page) < 6_000_000
    assert "--runtime is missing" in fails(*ask)
    assert "think from one depth" in fails(*ask[:2], tmp_path / "deep", *ask[3:], "--runtime", whole)
    assert "tiny is none" in fails("export", "tiny", *ask[3:], "--runtime", whole)
    assert "--format web" in fails("export", tmp_path / "one", tmp_path / "two", "--out", tmp_path / "a.npz")
