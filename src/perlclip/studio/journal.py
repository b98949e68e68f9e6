"""A file that only grows: one JSON object a line, on disk before anybody is told that it is.

A kill may leave half of the last line, which nobody was told about: it is cut off when the file is opened again. A line
in the middle that cannot be read is damage from outside, and is said rather than passed over.
"""

import json
import os
from pathlib import Path
from typing import Any

from perlclip.errors import PerlclipError
from perlclip.files import MIB, parse_json, read_file, write_files

LARGEST = 1024 * MIB
Entry = dict[str, Any]


class Journal:
    """Entries in the order in which they were written; one process at a time has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        try:
            if not path.exists():
                write_files({path: b""})  # its name is on disk, too
            content = read_file(path, LARGEST)
            whole = content[: content.rfind(b"\n") + 1]
            for number, line in enumerate(whole.splitlines(), start=1):
                self.entries.append(self._parsed(line, number))
            self._file = os.open(path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
            os.ftruncate(self._file, len(whole))
        except OSError as error:
            raise PerlclipError(f"cannot open {path}: {error.strerror or error}") from error
        self._end = len(whole)

    def _parsed(self, line: bytes, number: int) -> Entry:
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise PerlclipError(f"{self.path} is damaged in line {number} ({error}): repair or remove it") from error
        if not isinstance(entry, dict):
            raise PerlclipError(f"{self.path} is damaged in line {number}: it is no JSON object")
        return entry

    def append(self, entry: Entry) -> None:
        """Write an entry and wait until it is on disk; on a full disk nothing of it stays."""
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"  # ASCII: names may have bytes that are no text
        try:
            os.lseek(self._file, self._end, os.SEEK_SET)
            view = memoryview(line)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise PerlclipError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._end += len(line)
        self.entries.append(entry)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
