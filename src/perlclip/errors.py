"""The one kind of error that users are meant to see, and wording that several share."""

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from os import PathLike


class PerlclipError(Exception):
    """Something is wrong with what was asked for or given: one sentence that says what, and what is allowed."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as schedulers send it: it ends what Ctrl-C ends, with an exit code of its own."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> PerlclipError:
    """`unknown method 'perll'; did you mean 'perl'? known: coop, perl`."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    shown = (", ".join(names[:20]) or "none") + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    return PerlclipError(f"unknown {kind} {name!r}{hint} known: {shown}")


def first_line(error: BaseException) -> str:
    """What another library's error says, without its explanations."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shell_word(name: str | PathLike[str]) -> str:
    """A name or path as it is typed in a command: quoted where it must be, never taken for an option."""
    word = str(name)
    return shlex.quote(f"./{word}" if word.startswith("-") else word)
