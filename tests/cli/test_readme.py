"""What README.md and docs/cli.md show is run: the first code block in Python, the commands on the command line."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from perlclip.cli import main
from tests.backbone.test_backbone import HUB_NAME, hub_cache  # noqa: F401 (a fixture)
from tests.cli.test_cli import run
from tests.conftest import draw_tree

ROOT = Path(__file__).parents[2]
README, PAGE = ((ROOT / name).read_text() for name in ("README.md", "docs/cli.md"))


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
    commands = re.search(r"```\n(.*?)```", PAGE, re.DOTALL).group(1).splitlines()
    assert [shlex.split(line)[1] for line in commands] == ["fit", "predict", "eval", "inspect", "methods"]
    for line in commands:
        result = run(*shlex.split(line)[1:])
        assert result.exit_code == 0, (line, result.output)


def test_every_command_is_on_the_page():
    assert [name for name in main.commands if f"`perlclip {name}`" not in PAGE] == []


def test_the_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 100
