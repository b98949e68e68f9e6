"""Classes as text: their names, and the sentences the names are put into."""

from collections.abc import Sequence
from dataclasses import dataclass

from perlclip.errors import PerlclipError
from perlclip.text.templates import DEFAULT_TEMPLATE


@dataclass(frozen=True)
class Classes:
    """Class names in label order, and the data set's template; a method with a sentence of its own fills that one."""

    names: tuple[str, ...]
    template: str = DEFAULT_TEMPLATE

    def prompts(self, template: str = "") -> list[str]:
        """Each name in the given template, or in the data set's."""
        return [(template or self.template).format(name) for name in self.names]

    @classmethod
    def spoken(cls, names: Sequence[str], template: str = DEFAULT_TEMPLATE) -> "Classes":
        """From names as folders have them: their underscores are spaces in a sentence."""
        return cls(tuple(name.replace("_", " ") for name in names), template)

    @classmethod
    def of(cls, classes: "Classes | Sequence[str]") -> "Classes":
        """From plain prompts: names in the usual template where that is what they are, else texts to be said so."""
        if isinstance(classes, Classes):
            return classes
        if isinstance(classes, str) or not classes:
            raise PerlclipError(f"a list of class prompts is needed, got {classes!r}")
        before, after = DEFAULT_TEMPLATE.split("{}")
        names = tuple(prompt.removeprefix(before).removesuffix(after) for prompt in classes)
        usual = all(prompt == DEFAULT_TEMPLATE.format(name) for prompt, name in zip(classes, names, strict=True))
        return cls(names) if usual else cls(tuple(classes), "{}")


def are_novel(names: Sequence[str], trained: Sequence[str]) -> bool:
    """Whether there is a class among the names that was not trained, however it is spelt."""
    plain = [{name.replace("_", " ").strip().casefold() for name in some} for some in (names, trained)]
    return not plain[0] <= plain[1]


def check_class_names(names: Sequence[str], *, unique: bool = True) -> None:
    """Refuse an empty list, empty names and, if names are to be unique, duplicates (with underscores as spaces)."""
    if isinstance(names, str):
        raise PerlclipError(f"class names must be a list of names, got the one string {names!r}")
    if not names:
        raise PerlclipError("no class names given")
    seen: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name.isprintable():  # undecodable bytes of a file name are not printable
            raise PerlclipError(f"class name {name!r} is not a printable text")
        plain = name.replace("_", " ").strip()
        if not plain:
            raise PerlclipError("a class name is empty")
        if unique and plain in seen:
            raise PerlclipError(f"duplicate class name {plain!r} (from {seen[plain]!r} and {name!r})")
        seen[plain] = name
