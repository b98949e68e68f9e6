"""Methods by name: those of the package, of installed packages, and of a user's own files.

A package makes its methods known by an entry point of the group `perlclip.methods` that names a module; a file or
module by `load_plugin`, on the command line `--plugin`. Either calls `register` when it is imported.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from perlclip.backbone import Backbone
from perlclip.errors import PerlclipError, first_line, unknown_name
from perlclip.methods.base import Method
from perlclip.methods.recipe import Recipe, Rule, apply_rules
from perlclip.methods.seeding import Seeded

GROUP = "perlclip.methods"
_REGISTRY: dict[str, type[Method]] = {}
_PLUGINS: list[str] = []


def register(
    name: str,
    *,
    summary: str,
    where: str,
    venue: str,
    recipes: Mapping[str, Recipe] | None = None,
    rules: Sequence[Rule] = (),
) -> Callable[[type[Method]], type[Method]]:
    """Class decorator: make a method known by name, with what it trains, where in the towers, its paper and recipes.

    `rules` say what a recipe, a data set or a backbone changes of recipe and settings, the later ones last.
    """

    def add(cls: type[Method]) -> type[Method]:
        if name in _REGISTRY:
            raise PerlclipError(f"there is a method {name!r} already, in {_REGISTRY[name].__module__}")
        cls.name, cls.summary, cls.where, cls.venue = name, summary, where, venue
        cls.recipes, cls.rules = dict(recipes or {}), tuple(rules)
        _REGISTRY[name] = cls
        return cls

    return add


def load_plugin(name: str) -> None:
    """Import a module, or a file ending in .py, that registers methods; once, however often it is named."""
    path = Path(name).resolve()
    name = str(path) if name.endswith(".py") else name
    if name in _PLUGINS:
        return
    try:
        if name.endswith(".py"):
            module_name = f"perlclip_plugin_{path.stem}"  # never that of another module
            spec = importlib.util.spec_from_file_location(module_name, path)
            if spec is None or spec.loader is None:
                raise ImportError("it cannot be imported")
            module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[module_name]
                raise
        else:
            importlib.import_module(name)
    except Exception as error:  # whatever its author's code raises
        raise PerlclipError(f"cannot load plugin {name!r}: {first_line(error)}") from error
    _PLUGINS.append(name)


def plugins() -> tuple[str, ...]:
    """What `load_plugin` has loaded, for processes that must load it as well."""
    return tuple(_PLUGINS)


@cache
def _known() -> dict[str, type[Method]]:
    """All methods; those of installed packages are looked for when a name is first asked for."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # somebody else's package; the other methods work all the same
            sentence = f"going on without the methods of {point.value!r}: {first_line(error)}"
            warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return _REGISTRY


def list_methods(pattern: str = "*") -> list[str]:
    """Names of the methods, or of those that match a pattern such as `mm*`."""
    return [name for name in _known() if fnmatch(name, pattern)]


def method_class(name: str) -> type[Method]:
    """The class registered under a name."""
    known = _known()
    if name not in known:
        raise unknown_name("method", name, known)
    return known[name]


def default_recipe(method: str) -> str:
    """What `fit` uses: our `strong` for PERL, the authors' own for the others."""
    known = method_class(method).recipes
    return next((name for name in ("strong", "original") if name in known), next(iter(known), ""))


def ruled_datasets() -> set[str]:
    """Data sets for which some method has settings of its own."""
    return {rule.dataset for cls in _known().values() for rule in cls.rules} - {""}


def find_recipe(
    method: str, name: str, backbone: str = "", dataset: str = "", shots: int = 0, images: int = 0
) -> tuple[Recipe, dict[str, Any]]:
    """A recipe of a method on a backbone and a data set, and the settings it wants of the method.

    Some authors train otherwise on fewer `shots` than their usual 16, which 0 stands for. PERL's `strong` has more
    epochs for few `images`; 0 are as many as need no more.
    """
    cls = method_class(method)
    if not cls.recipes:
        raise PerlclipError(f"method {method!r} has no recipes to train by")
    if name not in cls.recipes:
        raise unknown_name(f"recipe of method {method!r}:", name, cls.recipes)
    if dataset and dataset not in ruled_datasets():
        raise unknown_name("data set with settings of its own:", dataset, ruled_datasets())
    return apply_rules(cls.recipes[name], cls.rules, name, backbone, dataset, shots, images)


def create_method(
    name: str,
    backbone: Backbone,
    *,
    seed: int = 1,
    recipe: str = "",
    dataset: str = "",
    shots: int = 0,
    **settings: Any,
) -> Method:
    """A method by name, its parameters initialised from `seed` (alike on every device).

    With a `recipe`, and a `dataset` of CoOp's fifteen or a number of `shots`, it has the settings that they want, and
    `fit` trains it so.
    """
    cls = method_class(name)
    if (dataset or shots) and not recipe:
        said = f"dataset={dataset!r}" if dataset else f"shots={shots}"
        raise PerlclipError(f"{said} goes with a recipe, whose settings for that are taken")
    wanted = find_recipe(name, recipe, backbone.name, dataset, shots)[1] if recipe else {}
    config = cls.config_class.checked(name, wanted | settings)
    with Seeded(seed):
        method = cls(backbone, config)
    method.made_for, method.given = (recipe, dataset, shots), frozenset(settings)
    return method.to(backbone.device)
