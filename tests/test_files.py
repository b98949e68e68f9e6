"""Files: what the system would give them, whoever else is creating files."""

import os

import pytest

from perlclip.files import write_files


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077, 0o000])
def test_files_have_the_mode_that_the_system_gives(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_files({tmp_path / "a.json": b"{}", tmp_path / "b" / "c.bin": b"\0"})
        (tmp_path / "ordinary").touch()
    finally:
        os.umask(before)
    want = (tmp_path / "ordinary").stat().st_mode
    assert [path.stat().st_mode for path in (tmp_path / "a.json", tmp_path / "b" / "c.bin")] == [want, want]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b", "ordinary"]


def test_the_umask_is_never_touched(tmp_path, monkeypatch):
    """It belongs to the whole process: a file that another thread creates meanwhile would be open to everyone."""
    asked = []
    monkeypatch.setattr(os, "umask", lambda mask: asked.append(mask) or 0o022)
    write_files({tmp_path / "a": b"1"})
    assert not asked and (tmp_path / "a").read_bytes() == b"1"
