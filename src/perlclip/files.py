"""Files that are either there and whole, or not there; and reading that ends, whatever lies under a name."""

import errno
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isinf
from pathlib import Path
from typing import Any, BinaryIO

from perlclip.errors import PerlclipError

if sys.platform != "win32":
    import fcntl

MIB = 2**20
DEPTH = 64  # nested lists and objects of a JSON file
LARGEST = 2**64  # a whole number in one


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write several files of one folder: all are staged and synced before the first takes its name.

    A full disk, a kill or an exception while staging leaves whatever stood there before. The renames come last and
    in the mapping's order, so put the file that makes the others valid first if `staged` finds them, else at the end.
    What earlier, killed writers of these files have left is removed first.
    """
    waiting: dict[Path, tuple[Path, BinaryIO]] = {}
    for path in contents:
        sweep(path)
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting[path] = _stage(path, content)
        for folder in {path.parent for path in contents}:
            _sync_folder(folder)
        for path, (temporary, _) in waiting.items():
            temporary.replace(path)
    except OSError as error:
        raise PerlclipError(f"cannot write {error.filename or path}: {error.strerror or error}") from error
    finally:
        # Ctrl-C between two renames: what has no name yet may be what the first of them needs, and stays.
        unchanged = all(temporary.exists() for temporary, _ in waiting.values())
        for temporary, file in waiting.values():
            if unchanged:
                temporary.unlink(missing_ok=True)
            file.close()
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def staged(path: Path) -> list[Path]:
    """Files that are being written to take this name, or that a killed writer has left; at most a hundred."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}")
    try:
        with os.scandir(path.parent) as entries:
            found = [entry.name for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return []
    return [path.with_name(name) for name in sorted(found)[:100]]


def sweep(path: Path) -> None:
    """Remove what killed writers of a file have left, which is what nobody has locked."""
    for temporary in staged(path):
        try:
            if sys.platform == "win32":  # where an open file cannot be removed
                temporary.unlink()
                continue
            descriptor = os.open(temporary, os.O_RDWR | _NO_WAIT)
            try:
                if _lock(descriptor):
                    temporary.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        except OSError:  # gone meanwhile, or not ours
            continue


def remove(path: Path) -> None:
    """Remove a file, and what killed writers of it have left."""
    path.unlink(missing_ok=True)
    sweep(path)


def _stage(path: Path, content: bytes) -> tuple[Path, BinaryIO]:
    """A file under a name of its own, locked for as long as it is open: nobody sweeps it away."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        file = temporary.open("xb")  # a new file of mode 0o666 less the umask, as the system does it
        try:
            if _lock(file.fileno()) is False or not temporary.exists():  # swept away before it was locked
                file.close()
                continue
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        if sys.platform == "win32":  # an open file cannot be renamed there
            file.close()
        return temporary, file


_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def _lock(descriptor: int) -> bool | None:
    """Lock an open file for as long as it is open; False if somebody else has, None where there are no such locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder to sync it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- one writer at a time ----

_held: dict[tuple[int, int], int] = {}  # folders that this process holds, and the descriptors that hold them


def _let_go() -> None:
    """In a forked child: the lock is the parent's alone and must not outlive it."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held_folder(folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Hold a folder against other processes; False if after so long another one still has it.

    The lock is on the folder itself, leaves no file and dies with its process. Held twice by one process it is held
    once. Where the system has no such locks everyone gets it.
    """
    if sys.platform == "win32":
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    here = os.fstat(descriptor)
    key = here.st_dev, here.st_ino
    if key in _held:
        os.close(descriptor)
        yield True
        return
    try:
        until = time.monotonic() + seconds
        while (got := _lock(descriptor)) is False and time.monotonic() < until:
            time.sleep(0.01)
        if got:
            _held[key] = descriptor
        yield got is not False
    finally:
        if _held.get(key) == descriptor:
            del _held[key]
        os.close(descriptor)


# ---- reading ----


def read_file(path: Path, limit: int) -> bytes:
    """A file's contents; an OSError for what is no plain file, as devices and pipes have no end, or too large."""
    with os.fdopen(os.open(path, os.O_RDONLY | _NO_WAIT), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        content = file.read(limit + 1) if found.st_size <= limit else b""
        if max(len(content), found.st_size) > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit // MIB:,} MiB", str(path))
        return content


def parse_json(content: bytes) -> Any:
    """JSON from outside; a ValueError for what no file of ours has: deep nesting, numbers without end.

    NaN and infinities, which are not JSON, come as words, so that what must be a number refuses them.
    """
    try:
        values = json.loads(content, parse_constant=str, parse_float=_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    waiting: list[tuple[Any, int]] = [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(value, int) and abs(value) >= LARGEST:
            raise ValueError("a number in it is too large")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += ((item, depth + 1) for item in inner)
    return values


def _number(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def require_writable(folder: Path) -> None:
    """Fail now, not after an hour of training, when `folder` cannot take files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary, file = _stage(folder / "perlclip", b"")
        temporary.unlink()
        file.close()
    except OSError as error:
        raise PerlclipError(f"cannot write to {folder}: {error.strerror or error}") from error
    sweep(folder / "perlclip")
