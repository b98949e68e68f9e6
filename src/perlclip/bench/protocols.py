"""Which runs a benchmark consists of: everything here is a list.

A suite has data sets by role: a source, targets, variants of the source. A protocol is a row of `PROTOCOLS`: the data
sets it trains on, the classes of them that training sees, and the tests. An ablation is a row of `ABLATIONS`: values of
one setting of PERL, run under base-to-novel.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from perlclip.bench.store import UNTRAINED, Run
from perlclip.data.sets import PARTS, ImageSet, for_classes
from perlclip.data.suites import Suite, suite
from perlclip.errors import PerlclipError, unknown_name
from perlclip.methods import list_methods, method_class
from perlclip.methods.registry import find_recipe, ruled_datasets


class Test(NamedTuple):
    """One thing to measure: a part of a set's test images; `novel` classes are not those that were trained."""

    name: str
    dataset: str
    classes: str
    novel: bool


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is trained on and what is tested."""

    datasets: Callable[[Suite], tuple[str, ...]]  # one after the other, to train on
    trains: str  # of the shots, the classes that training sees
    tests: Callable[[Suite, str], Sequence[Test]]  # of what was trained on a data set
    needs: tuple[str, ...] = ()  # roles that a suite must have sets for
    shots: tuple[int, ...] = (16,)
    original: str = "original"  # which of the authors' recipes is theirs for this


def _all_sets(sets: Suite) -> tuple[str, ...]:
    return (*_source(sets), *sets.targets)


def _source(sets: Suite) -> tuple[str, ...]:
    return (sets.source,) if sets.source else ()


def _halves(sets: Suite, dataset: str) -> list[Test]:
    return [Test("base", dataset, "base", novel=False), Test("novel", dataset, "novel", novel=True)]


def _elsewhere(role: str) -> Protocol:
    """Trained on the source, tested there and elsewhere; also variants count as novel, as MMRL's authors have it."""
    return Protocol(
        datasets=_source,
        trains="all",
        tests=lambda sets, dataset: [
            Test(dataset, dataset, "all", novel=False),
            *(Test(name, name, "all", novel=True) for name in getattr(sets, role)),
        ],
        needs=("source", role),
        original="original-cross",
    )


def _halves_among_all(sets: Suite, dataset: str) -> list[Test]:
    return [Test(half, dataset, f"{half} among all", novel=True) for half in ("base", "novel")]


# Of a test set, the classes and images that are asked for; `among all` are half of the images, and all of the classes.
ASKED: dict[str, Callable[[ImageSet], ImageSet]] = {
    **PARTS,
    "base among all": lambda images: for_classes(images.base(), images.class_names),
    "novel among all": lambda images: for_classes(images.novel(), images.class_names),
}

PROTOCOLS: dict[str, Protocol] = {
    "base-to-novel": Protocol(datasets=_all_sets, trains="base", tests=_halves),
    "generalised": Protocol(datasets=_all_sets, trains="base", tests=_halves_among_all),
    "cross-dataset": _elsewhere("targets"),
    "domain-shift": _elsewhere("variants"),
    "few-shot": Protocol(
        datasets=_all_sets,
        trains="all",
        tests=lambda sets, dataset: [Test("all", dataset, "all", novel=False)],
        shots=(1, 2, 4, 8, 16),
        original="original-few-shot",
    ),
}
TOGETHER = {"all": ("base-to-novel", "cross-dataset", "domain-shift")}

# The paper's ablations: a setting of PERL and its values, the default among them.
ABLATED = "perl"
ABLATIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ablation-modality": ("modalities", ("both", "text", "vision")),
    "ablation-depth": ("vision_depth", (5, 6, 7, 8, 9, 10, 11)),  # the paper moves the visual encoder's alone
    "ablation-depth-both": ("depth", (5, 6, 7, 8, 9, 10, 11)),
    "ablation-steps": ("steps", (0, 1, 2, 3, 4, 5, 6, 7, 8)),
    "ablation-variant": ("variant", ("shared", "early", "deep", "step", "layer", "layerstep")),
    "ablation-anchor": ("anchor", (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)),
    "ablation-rank": ("rank", (1, 2, 4, 8, 16)),
}


def protocols_of(bench: str) -> tuple[str, ...]:
    """The protocols behind a name on the command line: itself, base-to-novel for an ablation, three for `all`."""
    known = [*PROTOCOLS, *ABLATIONS, *TOGETHER]
    if bench not in known:
        raise unknown_name("protocol", bench, known)
    return ("base-to-novel",) if bench in ABLATIONS else TOGETHER.get(bench, (bench,))


def training_of(run: Run) -> Run:
    """What identifies the run's training: everything but its tests. Two runs of which it is equal train the same."""
    return replace(run, protocol=PROTOCOLS[run.protocol].trains)


def siblings(run: Run) -> Iterator[Run]:
    """The runs of other protocols that have the same training; a head is made after it, and can be left out again."""
    trained = training_of(run).protocol
    for head in (run.head, True) if not run.head and run.recipe != UNTRAINED else (run.head,):
        for name in PROTOCOLS:
            other = replace(run, protocol=name, head=head)
            if other != run and training_of(other).protocol == trained:
                yield other


def tests_of(run: Run) -> Sequence[Test]:
    """What the run is tested on."""
    return PROTOCOLS[run.protocol].tests(suite(run.suite), run.dataset)


def known_dataset(suite_name: str, dataset: str) -> str:
    """The name for which methods have settings of their own; a user's set that has the same name is another."""
    return dataset if suite(suite_name).published and dataset in ruled_datasets() else ""


def recipe_of(method: str, settings: Mapping[str, Any], wanted: str, protocol: str) -> str:
    """The recipe that a method is trained with; `original` is the authors' for the protocol, as far as there is one."""
    cls = method_class(method)
    if not cls.trains(cls.config_class.checked(method, dict(settings))):
        return UNTRAINED
    known = cls.recipes
    if wanted == "original":
        wanted = next((name for name in (PROTOCOLS[protocol].original, "original") if name in known), "fast")
    if wanted not in known:
        raise unknown_name(f"recipe of method {method!r}:", wanted, known)
    return wanted


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A grid of runs: every method on every data set with every seed. No names stand for all there are.

    `protocol` may also be an ablation, or `all`; `suite` a name, or a file that describes one. A recipe `original` is
    the authors' own for the protocol, as far as there is one; PERL, which has none, keeps `fast`, as in the paper. With
    `head`, whatever is trained gets one for the classes trained on, with `lens` the lens that its shots want; the
    paper's tables are without both.
    """

    protocol: str = "base-to-novel"
    suite: str = "toybox"
    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    recipe: str = "fast"
    shots: Sequence[int] = ()
    backbone: str = ""  # the suite's
    dtype: str = "float32"
    head: bool = False  # also for methods that can do without
    lens: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # method -> its settings

    def runs(self) -> list[Run]:
        """The runs, those of one data set together; what has nothing to train is evaluated once for all seeds."""
        _check("method", [*self.methods, *self.settings], list_methods())
        for method, settings in self.settings.items():
            known = [f.name for f in fields(method_class(method).config_class)]
            _check(f"setting of method {method!r}:", settings, known)
        if not self.seeds:
            raise PerlclipError("a benchmark needs at least one seed")
        if self.protocol in ABLATIONS and set(self.methods) - {ABLATED}:
            raise PerlclipError(f"{self.protocol} is about {ABLATED} alone: it takes no other methods")
        return list(dict.fromkeys(run for protocol in protocols_of(self.protocol) for run in self._under(protocol)))

    def _under(self, protocol: str) -> Iterator[Run]:
        shots = self.shots or PROTOCOLS[protocol].shots
        if protocol != "few-shot" and len(shots) > 1:
            raise PerlclipError(f"{protocol} takes one number of shots, got {', '.join(map(str, shots))}")
        return (
            self._run(protocol, dataset, method, settings, number, seed)
            for dataset in self._datasets(protocol)
            for method, settings in self._rows()
            for number in shots
            for seed in self.seeds
        )

    @cached_property
    def _suite(self) -> Suite:
        return suite(self.suite)

    def _datasets(self, protocol: str) -> Sequence[str]:
        sets, needs = self._suite, PROTOCOLS[protocol].needs
        for role in needs:
            if not getattr(sets, role):
                raise PerlclipError(f"suite {sets.name!r} has no {role}, which {protocol} needs")
        _check(f"data set of suite {sets.name!r}:", self.datasets, sets.names)
        if self.datasets and needs and tuple(self.datasets) != (sets.source,):
            raise PerlclipError(f"{protocol} trains on {sets.source!r} alone, got {', '.join(self.datasets)}")
        found = self.datasets or PROTOCOLS[protocol].datasets(sets)
        if not found:
            raise PerlclipError(f"suite {sets.name!r} has neither a source nor targets, on which {protocol} trains")
        return found

    def _rows(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Methods with their settings."""
        if self.protocol in ABLATIONS:
            key, values = ABLATIONS[self.protocol]
            return [(ABLATED, {**self.settings.get(ABLATED, {}), key: value}) for value in values]
        return [(method, self.settings.get(method, {})) for method in self.methods or list_methods()]

    def _run(self, protocol: str, dataset: str, method: str, settings: Mapping[str, Any], shots: int, seed: int) -> Run:
        recipe, sets = recipe_of(method, settings, self.recipe, protocol), self._suite
        training: dict[str, Any] = {} if recipe == UNTRAINED else {"recipe": recipe, "shots": shots, "seed": seed}
        backbone = self.backbone or sets.backbone
        head = bool(training) and self.head and not method_class(method).head_alone
        lens = bool(training) and self.lens
        where = (backbone, known_dataset(sets.name, dataset), shots)
        usual = find_recipe(method, recipe, *where)[1] if training else {}
        return Run(
            protocol=protocol, suite=sets.name, dataset=dataset, method=method,
            settings=_telling(method, settings, usual), backbone=backbone, precision=self.dtype, head=head, lens=lens,
            **training,
        )  # fmt: skip


def _telling(method: str, settings: Mapping[str, Any], usual: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings without which the method would be another, in the order of their names, lists as tuples."""

    def config(kept: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(method_class(method).config_class(**{**usual, **kept}))

    kept = {key: tuple(value) if isinstance(value, list) else value for key, value in sorted(settings.items())}
    whole = config(kept)
    for key in list(kept):
        without = {name: value for name, value in kept.items() if name != key}
        try:
            kept = without if config(without) == whole else kept
        except PerlclipError:  # the others make no sense without it
            continue
    return tuple(kept.items())


def _check(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
