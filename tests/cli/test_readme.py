"""What the README shows is run: its first code block in Python, its commands on the command line."""

import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from perlclip.cli import main
from tests.backbone.test_backbone import HUB_NAME, hub_cache  # noqa: F401 (a fixture)
from tests.cli.test_cli import run
from tests.conftest import draw_tree

MODULES = [
    f"perlclip.{name}"
    for name in ("backbone.clip", "backbone.tower", "methods.perl", "recipes", "data.images", "data.sets")
]
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def pets(tmp_path, monkeypatch, hub_cache):  # noqa: F811
    """The files that the README speaks of."""
    monkeypatch.chdir(tmp_path)
    draw_tree(tmp_path / "pets", images=17)
    shutil.copytree(tmp_path / "pets", tmp_path / "test-pets")
    for folder in ("new-images", "more"):
        shutil.copytree(tmp_path / "pets" / "red", tmp_path / folder)
    for path in (tmp_path / "more").iterdir():
        path.rename(path.with_suffix(".jpg"))
    shutil.copy(tmp_path / "pets" / "red" / "0.png", tmp_path / "new.jpg")
    return tmp_path


def test_the_first_code_block_runs(pets, capsys):
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert HUB_NAME in block and len([line for line in block.splitlines() if line and "import" not in line]) == 5
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() in ("red", "green grass", "blue")
    assert (pets / "pets-adapter" / "adapter_model.safetensors").exists()


def test_the_commands_run(pets):
    section = README.split("## Command line")[1]
    commands = re.search(r"```\n(.*?)```", section, re.DOTALL).group(1).splitlines()
    assert [shlex.split(line)[1] for line in commands] == ["fit", "predict", "eval", "inspect", "methods"]
    for line in commands:
        result = run(*shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)


def test_every_command_is_in_the_readme():
    for name in main.commands:
        assert f"perlclip {name}" in README or f"make {name}" in README


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(p.relative_to(ROOT) for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_documents_name_only_what_exists():
    """Backticked tests, and functions said to compute an equation, are in the code."""
    text = (ROOT / "docs" / "method.md").read_text()
    code = "\n".join(p.read_text() for folder in ("src", "tests") for p in (ROOT / folder).rglob("*.py"))
    names = set(re.findall(r"`(test_\w+|[A-Z]\w+\.\w+)`", text))
    assert len(names) > 30
    known = {name: cls for module in MODULES for name, cls in vars(import_module(module)).items()}
    for name in names:
        owner, _, attribute = name.rpartition(".")
        if owner:
            assert hasattr(known[owner], attribute) or attribute in known[owner].__annotations__, name
        else:
            assert f"def {name}(" in code, name
