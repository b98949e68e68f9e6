"""Which runs a benchmark consists of: everything here is a list.

A suite is a row of `SUITES`: a source, targets, variants of the source, and how to load one of them. A protocol is a
row of `PROTOCOLS`: the data sets it trains on, the classes of them that training sees, and the tests. An ablation is a
row of `ABLATIONS`: values of one setting of PERL, run under base-to-novel. `perform` does a single run.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from perlclip.bench.store import Run, default_backbone
from perlclip.data.sets import ImageSet
from perlclip.data.suites import SUITES, Suite
from perlclip.errors import PerlclipError, unknown_name
from perlclip.methods.base import list_methods, method_class
from perlclip.methods.recipes import RECIPES
from perlclip.methods.recipes import settings as recipe_settings

# Classes of a data set; labels are counted from the first of them.
PARTS: dict[str, Callable[[ImageSet], ImageSet]] = {
    "all": lambda images: images,
    "base": ImageSet.base,
    "novel": ImageSet.novel,
}


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
    shots: tuple[int, ...] = (16,)
    original: str = "original"  # which of the authors' recipes is theirs for this


def _all_sets(suite: Suite) -> tuple[str, ...]:
    return (suite.source, *suite.targets)


def _halves(suite: Suite, dataset: str) -> list[Test]:
    return [Test("base", dataset, "base", novel=False), Test("novel", dataset, "novel", novel=True)]


def _elsewhere(source: str, others: Iterable[str]) -> list[Test]:
    """The source and sets that training has not seen; also variants count as novel, as MMRL's authors have it."""
    return [Test(source, source, "all", novel=False), *(Test(name, name, "all", novel=True) for name in others)]


PROTOCOLS: dict[str, Protocol] = {
    "base-to-novel": Protocol(datasets=_all_sets, trains="base", tests=_halves),
    "cross-dataset": Protocol(
        datasets=lambda suite: (suite.source,),
        trains="all",
        tests=lambda suite, dataset: _elsewhere(dataset, suite.targets),
        original="original-cross",
    ),
    "domain-shift": Protocol(
        datasets=lambda suite: (suite.source,),
        trains="all",
        tests=lambda suite, dataset: _elsewhere(dataset, suite.variants),
        original="original-cross",
    ),
    "few-shot": Protocol(
        datasets=_all_sets,
        trains="all",
        tests=lambda suite, dataset: [Test("all", dataset, "all", novel=False)],
        shots=(1, 2, 4, 8, 16),
        original="original-few-shot",
    ),
}
TOGETHER = {"all": ("base-to-novel", "cross-dataset", "domain-shift")}

# The paper's ablations: a setting of PERL and its values, the default among them.
ABLATED = "perl"
ABLATIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "ablation-modality": ("modalities", ("both", "text", "vision")),
    "ablation-depth": ("depth", (6, 7, 8, 9, 10, 11)),
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
    """The runs of other protocols that have the same training."""
    others = (replace(run, protocol=name) for name in PROTOCOLS if name != run.protocol)
    return (other for other in others if training_of(other) == training_of(run))


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A grid of runs: every method on every data set with every seed. No names stand for all there are.

    `protocol` may also be an ablation, or `all`. A recipe `original` is the authors' own for the protocol, as far as
    there is one; PERL, which has none, keeps `fast`, as in the paper.
    """

    protocol: str = "base-to-novel"
    suite: str = "toybox"
    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: Sequence[int] = (1, 2, 3)
    recipe: str = "fast"
    shots: Sequence[int] = ()
    backbone: str = ""  # the suite's
    precision: str = "float32"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # method -> its settings

    def runs(self) -> list[Run]:
        """The runs, those of one data set together; what has nothing to train is evaluated once for all seeds."""
        _check("suite", [self.suite], SUITES)
        _check("method", [*self.methods, *self.settings], list_methods())
        for method, settings in self.settings.items():
            _check(f"setting of method {method!r}:", settings, _defaults(method))
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

    def _datasets(self, protocol: str) -> Sequence[str]:
        suite = SUITES[self.suite]
        usual = PROTOCOLS[protocol].datasets(suite)
        _check(f"data set of suite {self.suite!r}:", self.datasets, suite.names)
        if self.datasets and usual == (suite.source,) != tuple(self.datasets):
            raise PerlclipError(f"{protocol} trains on {suite.source!r} alone, got {', '.join(self.datasets)}")
        return self.datasets or usual

    def _rows(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Methods with their settings."""
        if self.protocol in ABLATIONS:
            key, values = ABLATIONS[self.protocol]
            return [(ABLATED, {**self.settings.get(ABLATED, {}), key: value}) for value in values]
        return [(method, self.settings.get(method, {})) for method in self.methods or list_methods()]

    def _run(self, protocol: str, dataset: str, method: str, settings: Mapping[str, Any], shots: int, seed: int) -> Run:
        recipe = self._recipe(protocol, method)
        # PERL without a step is zero-shot CLIP: its projectors reach nothing and get no gradient.
        trained = method in RECIPES and (method, settings.get("steps")) != ("perl", 0)
        training: dict[str, Any] = {"recipe": recipe, "shots": shots, "seed": seed} if trained else {}
        backbone = self.backbone or default_backbone(self.suite)
        usual = _defaults(method) | recipe_settings(method, recipe, backbone, dataset)
        return Run(
            protocol=protocol,
            suite=self.suite,
            dataset=dataset,
            method=method,
            settings=tuple((key, value) for key, value in _plain(settings) if value != usual[key]),
            backbone=backbone,
            precision=self.precision,
            **training,
        )

    def _recipe(self, protocol: str, method: str) -> str:
        known = RECIPES.get(method, {})
        if self.recipe != "original":
            return self.recipe
        return next((name for name in (PROTOCOLS[protocol].original, "original") if name in known), "fast")


def _plain(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """In the order of the names, lists as tuples."""
    return ((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(settings.items()))


def _defaults(method: str) -> dict[str, Any]:
    return {f.name: f.default for f in fields(method_class(method).config_class)}


def _check(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
