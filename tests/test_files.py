"""Files: what the system would give them, whoever else is creating files."""

import os
import signal

import pytest

from perlclip import files
from perlclip.files import held_folder, parse_json, remove, require_writable, write_files


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


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_is_not(tmp_path):
    path = tmp_path / "a.json"
    dead = tmp_path / ".a.json.0123456789abcdef"
    dead.write_bytes(b"half")
    (tmp_path / ".a.json.mine").write_bytes(b"not ours")
    temporary, file = files._stage(path, b"coming")
    write_files({path: b"1"})
    assert not dead.exists() and temporary.read_bytes() == b"coming" and (tmp_path / ".a.json.mine").exists()
    file.close()
    remove(path)
    assert [left.name for left in tmp_path.iterdir()] == [".a.json.mine"]


def test_looking_whether_a_folder_can_be_written_leaves_nothing(tmp_path):
    (tmp_path / ".perlclip.0123456789abcdef").touch()
    require_writable(tmp_path / "new")
    require_writable(tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == ["new"] and not any((tmp_path / "new").iterdir())


def test_a_folder_is_held_once_and_let_go_with_its_process(tmp_path):
    """The lock of a killed process is gone, also while a process that it had forked lives on."""
    ready, done = os.pipe(), os.pipe()

    def hold():
        with held_folder(tmp_path) as alone:
            if os.fork() == 0:
                os.read(done[0], 1)  # a worker that does not notice
                os._exit(0)
            os.write(ready[1], b"1" if alone else b"0")
            signal.pause()

    child = os.fork()
    if child == 0:
        hold()
    try:
        assert os.read(ready[0], 1) == b"1"
        with held_folder(tmp_path) as alone:
            assert not alone
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with held_folder(tmp_path) as alone, held_folder(tmp_path) as again:
            assert alone and again
    finally:
        os.write(done[1], b"1")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"[" * 70 + b"]" * 70, "nested"), (b"[" * 100_000, "nested"), (b'{"a": 1e999}', "too large"),
     (b"9" * 40, "too large"), (b"9" * 5000, "digits"), (b'{"a"', "delimiter")],
)  # fmt: skip
def test_json_from_outside_is_bounded(content, words):
    with pytest.raises(ValueError, match=words):
        parse_json(content)
    assert parse_json(b"[NaN, -Infinity, 1.5, 18446744073709551615]") == ["NaN", "-Infinity", 1.5, 2**64 - 1]
