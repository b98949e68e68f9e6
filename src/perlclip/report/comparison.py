"""Studies: runs that may stand in one table, as arrays of accuracies over seeds and data sets.

Runs share a study if they agree in protocol, suite, source, backbone and its weights, precision and shots; nothing is
averaged over different ones. What has not been trained, such as zero-shot CLIP, belongs to every study it fits.
A run that is missing is NaN, and so is every average over it.

Shapes: S seeds, D data sets, N images, B bootstrap draws.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from perlclip.bench.store import UNTRAINED
from perlclip.report import paper
from perlclip.report.statistics import Array, resample

TRANSFER = ("cross-dataset", "domain-shift")
Place = tuple[str, str]  # data set and metric


@dataclass(frozen=True)
class Row:
    """What a line of a table is about."""

    method: str
    settings: tuple[tuple[str, Any], ...]
    recipe: str
    head: bool = False
    lens: bool = False

    @property
    def label(self) -> str:
        """`perl (extended) depth=6 + lens + head`; the paper's recipe goes without saying."""
        recipe = [] if self.recipe in (paper.RECIPE, UNTRAINED) else [f"({self.recipe})"]
        more = ["+ lens"] * self.lens + ["+ head"] * self.head
        return " ".join([self.method, *recipe, *([self.setting] if self.settings else []), *more])

    @property
    def setting(self) -> str:
        """`depth=3,7,11;steps=2`."""
        return ";".join(f"{key}={shown(value)}" for key, value in self.settings)

    @property
    def is_paper_perl(self) -> bool:
        """Whether it is PERL with the paper's settings, by whatever recipe."""
        return self.method == "perl" and not self.settings and not self.head and not self.lens

    @property
    def is_ablation(self) -> bool:
        """PERL with other settings than the paper's has tables of its own."""
        return self.method == "perl" and bool(self.settings)

    @property
    def order(self) -> tuple[Any, ...]:
        """Zero-shot first, PERL last, as in the paper."""
        last = (self.recipe != UNTRAINED) + (self.method == "perl")
        return (
            last,
            *rank(self.method, paper.METHODS),
            self.recipe != paper.RECIPE,
            self.recipe,
            self.setting,
            self.head,
            self.lens,
        )


def shown(value: Any) -> str:
    """A setting's value: `7`, `3,7,11`, `text`."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def perl_settings(given: Mapping[str, Any], used: Mapping[str, Any]) -> dict[str, Any]:
    """PERL's settings without those that say what the paper did; a variant's own depth is no setting.

    `used` is what the run was done with: in 0.1.0 `depth=7` gave a variant its own depth.
    """
    given = {key: used.get(key, value) if key == "depth" else value for key, value in given.items()}
    usual = {**paper.PERL, "depth": paper.DEPTHS.get(given.get("variant", "shared"), paper.PERL["depth"])}
    return {key: value for key, value in given.items() if key not in usual or usual[key] != value}


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What the runs of one study have in common."""

    protocol: str
    suite: str
    source: str  # what a transfer starts from; else empty
    backbone: str
    weights: str  # fingerprint
    precision: str
    shots: int  # 0 where they vary within the study

    @property
    def has_paper(self) -> bool:
        """Whether the paper did the same; its precision is not known."""
        same = (self.suite, self.backbone) == (paper.SUITE, paper.BACKBONE) and self.source in ("", paper.SOURCE)
        return same and self.shots in (0, paper.SHOTS) and self.protocol in paper.AVERAGED_OVER

    @property
    def name(self) -> str:
        """`base-to-novel-toybox-tiny-float32-16shot`, for file names."""
        backbone = self.backbone.rstrip("/").rpartition("/")[2]
        shots = f"{self.shots}shot" if self.shots else ""
        words = [self.protocol, self.suite, self.source, backbone, self.precision, shots]
        return "-".join("".join(c if c.isalnum() or c in "-_" else "_" for c in word) for word in words if word)


@dataclass
class Outcome:
    """One run, taken apart; a failed one has no numbers."""

    condition: Condition
    row: Row
    dataset: str
    seed: int
    shots: int
    parameters: int | None = None
    accuracy: dict[Place, float] = field(default_factory=dict)
    hits: dict[Place, tuple[bytes, Array]] = field(default_factory=dict)  # labels, and 1 where the answer was right
    training: str = ""  # recipe and settings in full
    suite: tuple[str, ...] = ()  # all sets of the suite in its order, if the record tells

    @property
    def key(self) -> tuple[Any, ...]:
        """Two outcomes with the same key are the same run."""
        return self.condition, self.row, self.dataset, self.seed, self.shots


@dataclass
class Scores:
    """A row's numbers, by metric."""

    seeds: tuple[int, ...]
    parameters: list[int]  # one, unless it depends on the data set
    accuracy_SD: dict[str, Array]
    hits_DN: dict[str, list[Array | None]]  # how often each image was answered right, mean over seeds

    def of(self, columns: Sequence[int]) -> dict[str, Array]:
        """Accuracies on some of the data sets."""
        return {metric: accuracy[:, list(columns)] for metric, accuracy in self.accuracy_SD.items()}


@dataclass
class Study:
    """Runs under one condition: rows in the order to print them, data sets in the suite's order, the source first."""

    condition: Condition
    sets: tuple[str, ...]
    rows: dict[Row, Scores]
    notes: list[str]
    number: int = 1  # of those whose conditions have the same name, such as other weights of one backbone

    @property
    def name(self) -> str:
        """For file names."""
        return self.condition.name + (f"-{self.number}" if self.number > 1 else "")

    @property
    def compared(self) -> list[Row]:
        """The rows of the main tables."""
        return [row for row in self.rows if not row.is_ablation]

    def reference(self, recipe: str = paper.RECIPE) -> Row | None:
        """PERL with the paper's settings: trained by this recipe, else by whatever there is."""
        rows = [row for row in self.rows if row.is_paper_perl]
        return min(rows, key=lambda row: row.recipe != recipe, default=None)

    @cached_property
    def resampled(self) -> dict[Row, dict[str, Array]]:
        """Accuracies (B, D) of every row and metric on bootstrap draws of the test images, the same for all rows."""
        metrics = next(iter(self.rows.values())).hits_DN
        cube = {m: np.stack([self._resampled(m, d) for d in range(len(self.sets))], axis=-1) for m in metrics}
        return {row: {m: cube[m][r] for m in metrics} for r, row in enumerate(self.rows)}

    def _resampled(self, metric: str, d: int) -> Array:
        hits = [scores.hits_DN[metric][d] for scores in self.rows.values()]
        images = max((len(h) for h in hits if h is not None), default=1)
        unknown = np.full(images, np.nan)
        return resample(np.stack([unknown if h is None else h for h in hits]), f"{self.sets[d]}/{metric}")


def study(condition: Condition, outcomes: Sequence[Outcome]) -> Study:
    """Arrays from the runs of one condition."""
    names = {o.dataset for o in outcomes} | {name for o in outcomes for name, _ in o.accuracy}
    known = [*(name for o in outcomes for name in o.suite), *paper.SETS]
    sets = tuple(sorted(names, key=lambda name: (name != condition.source, *rank(name, known))))
    by_row: dict[Row, list[Outcome]] = {}
    for outcome in outcomes:
        by_row.setdefault(outcome.row, []).append(outcome)
    metrics = _metrics(condition, outcomes)
    perl_last = sorted(outcomes, key=lambda o: o.row.method == "perl")
    labels = {place: hits[0] for o in perl_last for place, hits in o.hits.items()}  # PERL's, where it is there
    rows = {row: _scores(by_row[row], sets, metrics, labels) for row in sorted(by_row, key=lambda row: row.order)}
    return Study(condition, sets, rows, _notes(by_row, rows, sets))


def rank(name: str, known: Sequence[str]) -> tuple[int, str]:
    """Known names in their order, then the others."""
    return (known.index(name) if name in known else len(known)), name


def _metrics(condition: Condition, outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    """Of the few-shot protocol, every number of shots is a metric."""
    if condition.protocol == "few-shot":
        return tuple(map(str, sorted({o.shots for o in outcomes if o.shots} or {0})))
    return ("accuracy",) if condition.protocol in TRANSFER else ("base", "novel")


def _scores(
    outcomes: Sequence[Outcome], sets: Sequence[str], metrics: Sequence[str], labels: Mapping[Place, bytes]
) -> Scores:
    """Arrays of one row; answers count only if they were given to the images with these labels."""
    seeds = tuple(sorted({o.seed for o in outcomes}))
    accuracy_SD = {metric: np.full((len(seeds), len(sets)), np.nan) for metric in metrics}
    hits: dict[Place, list[Array]] = {}
    for outcome in outcomes:
        for (name, metric), value in outcome.accuracy.items():
            # What is untrained has the same numbers for every number of shots.
            for m in metrics if metric == "0" else {metric}.intersection(metrics):
                accuracy_SD[m][seeds.index(outcome.seed), sets.index(name)] = value
                images, right = outcome.hits.get((name, metric), (None, None))
                if right is not None and images == labels[name, metric]:
                    hits.setdefault((name, m), []).append(right)
    return Scores(
        seeds=seeds,
        parameters=sorted({o.parameters for o in outcomes if o.parameters is not None}),
        accuracy_SD=accuracy_SD,
        hits_DN={m: [_mean(hits.get((name, m), []), len(seeds)) for name in sets] for m in metrics},
    )


def _mean(hits: Sequence[Array], seeds: int) -> Array | None:
    return np.mean(hits, axis=0) if len(hits) == seeds else None


def _notes(by_row: Mapping[Row, Sequence[Outcome]], rows: Mapping[Row, Scores], sets: Sequence[str]) -> list[str]:
    """What a reader of the tables has to know about the runs behind them."""
    missing, unpaired, mixed = [], [], []
    for row, scores in rows.items():
        own = {o.dataset for o in by_row[row]}
        for d, name in enumerate(sets):
            holes = np.any([np.isnan(accuracy[:, d]) for accuracy in scores.accuracy_SD.values()], axis=0)
            if not row.is_ablation or name in own:  # ablations may be on fewer sets
                lacking = [seed for seed, hole in zip(scores.seeds, holes, strict=True) if hole]
                seeds = f" (seed {', '.join(map(str, lacking))})" if row.recipe != UNTRAINED else ""
                missing += [f"{row.label} on {name}{seeds}"] * bool(lacking)
            if not holes.any() and any(hits[d] is None for hits in scores.hits_DN.values()):
                unpaired.append(f"{row.label} on {name}")
            used = {(o.shots, o.training) for o in by_row[row] if o.dataset == name and o.training}
            if len(used) > len({shots for shots, _ in used}):
                mixed.append(f"{row.label} on {name}")
    found = {
        "Missing": missing,
        "No answers to the same images as PERL's, so no interval": unpaired,
        "Trained with different settings for different seeds": mixed,
    }
    return [f"{what}: {_some(where)}." for what, where in found.items() if where]


def _some(items: Sequence[str], most: int = 6) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more
