"""A method's settings as a checked dataclass, and how they are read from words."""

from dataclasses import asdict, dataclass, field, fields
from types import UnionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

from perlclip.backbone.lens import LENSES, PLAIN
from perlclip.errors import PerlclipError, unknown_name
from perlclip.text.templates import check_template

# Sentences among the settings, wherever a method has one by that name; "" stands for the data set's own.
TEMPLATES = ("template", "reference", "tail")
LARGEST = 10**12  # a whole number among them; what fits no memory either is said by torch


def later(default: Any) -> Any:
    """A setting that version 0.1.0 did not have, and that by default changes nothing.

    Files have it only where it is not the default: what was saved before it existed is then the same as what is now.
    """
    return field(default=default, metadata={"later": True})


@dataclass(frozen=True, kw_only=True)
class Config:
    """A method's settings; subclasses add annotated fields with defaults and check them further in `__post_init__`.

    `adjustable` are those that no parameter depends on, so that a recipe may set them on a method that exists already.
    All methods have a `lens`, through which they look at images (`backbone.lens`).
    """

    adjustable: ClassVar[frozenset[str]] = frozenset()
    lens: str = later(PLAIN)

    def __post_init__(self) -> None:
        for name, kinds in setting_types(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)
            if not any(_fits(value, kind) for kind in kinds):
                raise PerlclipError(f"setting {name!r} must be of type {_spoken(kinds)}, got {value!r}")
            if isinstance(value, int) and abs(value) > LARGEST:
                raise PerlclipError(f"setting {name!r} is out of all range: {str(value)[:20]}…")
            if name in TEMPLATES and value:
                check_template(value)
        if self.lens not in (PLAIN, *LENSES):
            raise unknown_name("lens", self.lens, (PLAIN, *LENSES))

    def require(self, **limits: tuple[float, float]) -> None:
        """Each named number within its two bounds, which are allowed; infinities and NaN are not."""
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high or value == float("inf"):
                bound = f"at least {low} and finite" if high == float("inf") else f"in {low}..{high}"
                raise PerlclipError(f"{name} must be {bound}, got {value}")

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for files."""
        late = {f.name: f.default for f in fields(self) if f.metadata.get("later")}
        return {key: value for key, value in asdict(self).items() if key not in late or value != late[key]}

    @classmethod
    def checked(cls, method: str, settings: dict[str, Any]) -> "Config":
        """From settings by name, with the method's name in what is said about a wrong one."""
        for key in settings:
            if key not in setting_types(cls):
                raise unknown_name(f"setting of method {method!r}:", key, setting_types(cls))
        try:
            return cls(**settings)
        except PerlclipError as error:
            raise PerlclipError(f"{method}: {error}") from error


def setting_types(config: type[Config]) -> dict[str, tuple[Any, ...]]:
    """The types that each setting may have."""
    hints = get_type_hints(config)
    return {
        f.name: get_args(hints[f.name]) if isinstance(hints[f.name], UnionType) else (hints[f.name],)
        for f in fields(config)
    }


def parse_setting(config: type[Config], name: str, text: str) -> Any:
    """`7`, `0.5`, `vision`, or `3,7,11` as the type that the setting has; templates are separated by `;`."""
    kinds = setting_types(config)[name]
    for kind in kinds:
        try:
            if get_origin(kind) is tuple:
                item = get_args(kind)[0]
                parts = text.split(";" if item is str else ",")
                return tuple(item(part.strip()) for part in parts if part.strip())
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return kind(text)
        except (ValueError, KeyError, TypeError):  # TypeError: None is a kind, but no value
            continue
    raise PerlclipError(f"--set {name} takes a value of type {_spoken(kinds)}, got {text!r}")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and len(value) > 0 and all(_fits(item, get_args(kind)[0]) for item in value)
    return isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))


def _spoken(kinds: tuple[Any, ...]) -> str:
    words = [f"list of {get_args(k)[0].__name__}" if get_origin(k) is tuple else k.__name__ for k in kinds]
    return " or ".join(word for word in words if word != "NoneType")
