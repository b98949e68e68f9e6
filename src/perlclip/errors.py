"""The one kind of error that users are meant to see, and wording that several share."""

from collections.abc import Iterable
from difflib import get_close_matches


class PerlclipError(Exception):
    """Something is wrong with what was asked for or given: one sentence that says what, and what is allowed."""


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
