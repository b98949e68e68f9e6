"""Every block of the documents that can run offline is run: `make docs` does, as `pytest tests/blocks.py`.

A document is one session in a folder of its own: its Python blocks share their names, its commands their files. Hub
names are found in a cache that holds a tiny CLIP of random weights. What cannot run is in `CANNOT`, with the reason;
that its options exist is tested all the same (tests/test_docs.py).
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import perlclip
from tests.backbone.test_backbone import HUB_NAME, hub_cache  # noqa: F401 (a fixture)
from tests.cli.test_cli import run
from tests.conftest import draw_tree
from tests.data.test_catalog import mini_sizes, minis  # noqa: F401 (fixtures)

ROOT = Path(__file__).parent.parent
# Run by tests of their own, which `make docs` runs as well.
ELSEWHERE = {
    "README.md": "tests/cli/test_readme.py",
    "docs/cli.md": "tests/cli/test_readme.py",
    "docs/api.md": "tests/test_api.py",
    "CONTRIBUTING.md": "tests/test_docs.py",
}
CANNOT = {
    r"^(make|pip) ": "sets up an environment, as this one was",
    r"^python -m benchmarks|^PYTHONPATH=src python scripts": "minutes to hours; small in tests/test_benchmarks.py",
    r"^perlclip bench (all|ablation|few-shot|base-to-novel --suite toybox)|^perlclip fit toybox": "trains for minutes",
    r"--suite coop|--suite SUITE/|coop:dtd": "needs the real data sets",
    r"^perlclip (serve|studio)|^curl|run_server|_backend": "runs until it is stopped; tests/serve and studio start it",
    r"s3://|google/siglip|onnxruntime-web": "needs a network",
    r"--executor ray": "needs a cluster; tests/batch starts one",
    r"laion/": "a hundred tars; tests/batch has two",
    r"--image-size 336": "the stand-in for CLIP has images of another size",
    r"^perlclip (analyze|report|explain) (STORE|bench|results)": "of benchmarks that are not run here",
    r"^perlclip analyze ADAPTER toybox": "a thousand images; tests/analysis has fewer",
}
# Documents that begin without an adapter.
UNTRAINED = ("docs/start.md", "docs/robustness.md")
# Words that stand for something of the reader's.
MEANT = {"ADAPTER": "pets-adapter", "IMAGE…": "new.jpg", "DATA": "test-pets", "DIR": "looked-at"}


def blocks(path: Path) -> list[str]:
    """The programs and the command lines of a document, in their order."""
    found = []
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text("utf-8"), re.M | re.S):
        lines = re.sub(r"\\\n\s*", "", code).splitlines()
        commands = [line for line in lines if re.match(r"(perlclip|python|make|pip|curl|PYTHONPATH=src) ?", line)]
        found += [code] if language == "python" else commands if not language else []
    return found


DOCUMENTS = {
    name: found
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
    if (name := path.relative_to(ROOT).as_posix()) not in ELSEWHERE and (found := blocks(path))
}


def why_not(text: str) -> str:
    """Why a block is not run; nothing if it is."""
    return next((reason for pattern, reason in CANNOT.items() if re.search(pattern, text, re.M)), "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, clip_folder) -> Path:
    """An adapter for the documents that have one already, calibrated on enough images for everything they ask."""
    folder = tmp_path_factory.mktemp("trained")
    draw_tree(folder / "pets", images=17)
    draw_tree(folder, classes={"photos": (200, 120, 60)}, size=52)  # without labels
    data, others = perlclip.train_val(perlclip.load_images(folder / "pets"), shots=8, val=9, seed=1)
    method = perlclip.create_method("perl", perlclip.load_backbone(str(clip_folder)), recipe="fast")
    fitted = perlclip.fit(method, data, progress=False)
    trust = perlclip.Classifier(fitted).calibrate(others, progress=False)
    perlclip.save_adapter(fitted, folder / "pets-adapter", trust=trust)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch, hub_cache, minis, mini_sizes, trained) -> Path:  # noqa: F811
    """All that the documents speak of."""
    monkeypatch.chdir(tmp_path)
    for name in ("pets", "test-pets", "more-pets", "plants"):
        shutil.copytree(trained / "pets", tmp_path / name)
    shutil.copytree(trained / "photos", tmp_path / "photos")
    for name in ("new-images", "new"):
        shutil.copytree(trained / "pets" / "red", tmp_path / name)
    for name in ("pets-adapter", "birds-adapter"):
        shutil.copytree(trained / "pets-adapter", tmp_path / name)
    for name in ("new.jpg", "a.jpg", "b.jpg", "cat.jpg", "robin.jpg"):
        shutil.copy(trained / "pets" / "red" / "0.png", tmp_path / name)
    for name in ("classes.txt", "names.txt"):
        (tmp_path / name).write_text("red\ngreen grass\nblue\n")
    paths = sorted((tmp_path / "pets").rglob("*.png"))
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in paths]
    for name in ("birds.csv", "list.csv"):
        (tmp_path / name).write_text("\n".join(["path,label", *rows]))
    (tmp_path / "garden.toml").write_text(
        f'name = "garden"\nbackbone = "{HUB_NAME}"\n[sets.plants]\ndata = "plants"\n[sets.birds]\ndata = "birds.csv"\n'
    )
    parquet(tmp_path / "photos.parquet", paths)
    (tmp_path / "ROOT").symlink_to(minis)
    return tmp_path


def parquet(path: Path, images: list[Path]) -> None:
    """A table of image files."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"key": [each.as_posix() for each in images], "image": [each.read_bytes() for each in images]}
    )
    pyarrow.parquet.write_table(table, path)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_shows_runs(document, folder):
    if document in UNTRAINED:
        shutil.rmtree("pets-adapter")
    if document == "docs/data.md":
        Path("pets/red").rename("pets/n02123045")  # which it renames
    data, val = perlclip.train_val(perlclip.load_images("pets/"), shots=4, seed=1)
    names = {"perlclip": perlclip, "data": data, "train_set": data, "other": val}
    for text in DOCUMENTS[document]:
        if why_not(text):
            continue
        if not text.startswith(("perlclip ", "python ")):
            exec(compile(text, document, "exec"), names)
            continue
        words = [MEANT.get(word, word) for word in shlex.split(text, comments=True)]
        if words[0] == "python":
            subprocess.run([sys.executable, ROOT / words[1], *words[2:]], check=True)
            continue
        made = ("answers", "looked-at", *(["pets-adapter"] if words[1] == "fit" else []))  # anew by each command
        for name in made:
            shutil.rmtree(name, ignore_errors=True)
        result = run(*words[1:])
        assert result.exit_code == 0, (text, result.output, result.exception)


def test_every_reason_is_needed():
    texts = [text for found in DOCUMENTS.values() for text in found]
    unused = [pattern for pattern in CANNOT if not any(re.search(pattern, text, re.M) for text in texts)]
    assert not unused
