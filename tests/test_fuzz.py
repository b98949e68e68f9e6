"""A short run of benchmarks/fuzz.py: whatever is in a file, it is accepted or refused in one line."""

import json

import pytest

from benchmarks.fuzz import TARGETS, adapter, explore, load
from perlclip.data import load_images, read_class_names
from perlclip.data.manifests import text_rows
from perlclip.errors import PerlclipError


@pytest.mark.parametrize("name", TARGETS)
def test_no_file_ends_in_a_traceback(name):
    explore(TARGETS[name], examples=60, number=1)


def test_the_adapter_that_is_changed_is_a_good_one():
    _, info, weights = adapter()
    assert load(json.dumps(info).encode(), weights) and not load(b"{}", weights)


def test_what_reading_the_targets_found(tmp_path):
    """A header with a bare carriage return was a traceback, and so was a list of names nested without end."""
    with pytest.raises(PerlclipError, match="as CSV"):
        text_rows(b"path\rlabel\na,b\n", "list.csv")
    (tmp_path / "names.json").write_text("[" * 100_000)
    with pytest.raises(PerlclipError, match="nested too deeply"):
        read_class_names(tmp_path / "names.json")
    (tmp_path / "tree" / "cat").mkdir(parents=True)
    (tmp_path / "tree" / "cat" / "0.png").touch()
    (tmp_path / "tree" / "metadata.jsonl").write_text('{"a":' + "[" * 50_000)
    with pytest.raises(PerlclipError, match="is not JSON"):
        load_images(tmp_path / "tree")
    with pytest.raises(PerlclipError, match="not a plain file"):
        read_class_names("/dev/zero")
