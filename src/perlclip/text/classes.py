"""Classes as text: their names, the sentences the names are put into, when two names are the same, what is novel."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from perlclip.errors import PerlclipError
from perlclip.text.templates import DEFAULT_TEMPLATE

_USUAL = re.compile("(.+)".join(re.escape(words) for words in DEFAULT_TEMPLATE.split("{}")))


def spoken(name: str) -> str:
    """A name as it is said: the underscores of folders and lists are spaces in a sentence."""
    return name.replace("_", " ")


def spelling(name: str) -> str:
    """What two names have in common if they are one: a tokenizer sees neither case nor how words are spaced."""
    return " ".join(spoken(name).split()).casefold()


@dataclass(frozen=True)
class Classes:
    """Class names in label order, and the data set's template; a method with a sentence of its own fills that one.

    `sentences` are prompts that no template makes; they are said as they are unless another template is asked for.
    """

    names: tuple[str, ...]
    template: str = DEFAULT_TEMPLATE
    sentences: tuple[str, ...] = ()

    def prompts(self, template: str = "") -> list[str]:
        """Each name in the given template, or in the data set's."""
        template = template or self.template
        if self.sentences and template == self.template:
            return list(self.sentences)
        return [template.format(name) for name in self.names]

    @classmethod
    def spoken(cls, names: Sequence[str], template: str = DEFAULT_TEMPLATE) -> "Classes":
        """From names as folders have them."""
        return cls(tuple(map(spoken, names)), template)

    @classmethod
    def of(cls, classes: "Classes | Sequence[str]") -> "Classes":
        """From plain prompts: one in the usual template gives its name, any other stands for itself."""
        if isinstance(classes, Classes):
            return classes
        if isinstance(classes, str) or not classes:
            raise PerlclipError(f"a list of class prompts is needed, got {classes!r}")
        usual = [_USUAL.fullmatch(prompt) for prompt in classes]
        pairs = zip(usual, classes, strict=True)
        names = tuple(spoken(found[1]) if found else prompt for found, prompt in pairs)
        return cls(names) if all(usual) else cls(names, "{}", tuple(classes))


def class_keys(names: Sequence[str]) -> list[tuple[str, int]]:
    """What tells classes apart: the spelling, and for a name that is there twice, which of the two it is."""
    seen: Counter[str] = Counter()
    keys = []
    for plain in map(spelling, names):
        keys.append((plain, seen[plain]))
        seen[plain] += 1
    return keys


def are_novel(names: Sequence[str], trained: Sequence[str]) -> bool:
    """Whether there is a class among the names that was not trained, however it is spelt.

    Only the benchmark's transfer to variants of the source says otherwise: they count as novel, as with MMRL's authors.
    """
    return not set(map(spelling, names)) <= set(map(spelling, trained))


def check_class_names(names: Iterable[str], *, unique: bool = True) -> tuple[str, ...]:
    """All of them; refused are none at all, empty names and, if names are to be unique, two that are spelt alike."""
    if isinstance(names, str):
        raise PerlclipError(f"class names must be a list of names, got the one string {names!r}")
    if not isinstance(names, Iterable) or isinstance(names, Set):  # a set has no order, and labels count in one
        raise PerlclipError(f"class names must be a list of names, got a {type(names).__name__}")
    names = tuple(names)
    if not names:
        raise PerlclipError("no class names given")
    seen: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str) or not name.isprintable():  # undecodable bytes of a file name are not printable
            raise PerlclipError(f"class name {name!r} is not a printable text")
        plain = spelling(name)
        if not plain:
            raise PerlclipError("a class name is empty")
        if unique and plain in seen:
            raise PerlclipError(f"duplicate class name {plain!r} (from {seen[plain]!r} and {name!r})")
        seen[plain] = name
    return names
