"""Files that are either there and whole, or not there."""

import os
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path

from perlclip.errors import PerlclipError


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write several files of one folder: all are staged and synced before the first takes its name.

    A full disk, a kill or an exception while staging leaves whatever stood there before. The renames come last and
    in the mapping's order, so put the file that makes the others valid at the end.
    """
    staged: dict[Path, Path] = {}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            staged[path] = _stage(path, content)
        for path, temporary in staged.items():
            temporary.replace(path)
    except OSError as error:
        raise PerlclipError(f"cannot write {error.filename or path}: {error.strerror or error}") from error
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    for folder in {path.parent for path in contents}:
        _sync_folder(folder)


def _stage(path: Path, content: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:  # a new file of mode 0o666 less the umask, as the system does it
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open a folder to sync it
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(folder: Path) -> None:
    """Fail now, not after an hour of training, when `folder` cannot take files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PerlclipError(f"cannot write to {folder}: {error.strerror or error}") from error
