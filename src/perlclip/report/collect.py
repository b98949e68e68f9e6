"""What a report is made of: records, read, checked and put together where they may be compared, and analyses."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perlclip.bench.store import UNTRAINED, Record, Store
from perlclip.errors import PerlclipError
from perlclip.report.comparison import TRANSFER, Condition, Outcome, Row, Study, perl_settings, study
from perlclip.report.statistics import AVERAGES
from perlclip.viz.drawing import Drawing
from perlclip.viz.dynamics import TITLE, Dynamics, read_dynamics

DAMAGE = (KeyError, TypeError, ValueError, AttributeError)  # what taking a damaged record apart may raise


@dataclass
class Collected:
    """Everything that was found."""

    studies: list[Study]
    complete: list[Record]
    failed: list[Record]
    damaged: list[str]  # where and why
    notes: list[str]


def collect(folders: Sequence[Path]) -> Collected:
    """All records below the folders."""
    for folder in folders:
        if not folder.is_dir():
            raise PerlclipError(f"no such folder of runs: {folder}")
    found = [Store(folder).records() for folder in folders]
    damaged = [
        f"{path.relative_to(folder)}: not a record of this format"
        for folder, records in zip(folders, found, strict=True)
        for path in records.damaged
    ]
    failed = [record for records in found for record in records.failed]
    complete: list[Record] = []
    outcomes: list[Outcome] = []
    for record in (record for records in found for record in records.complete):
        try:
            outcomes.append(_outcome(record))
            complete.append(record)
        except DAMAGE as error:
            damaged.append(f"{name_of(record)}: {error if isinstance(error, ValueError) else repr(error)}")
    if not complete:
        where = ", ".join(map(str, folders))
        raise PerlclipError(f"no complete run below {where} ({len(failed)} failed, {len(damaged)} damaged)")
    outcomes, notes = _unique(outcomes)
    groups = _groups(outcomes, failed)
    order = sorted(groups, key=lambda c: (list(AVERAGES).index(c.protocol), c.name, c.backbone, c.weights))
    studies = [study(condition, groups[condition]) for condition in order]
    names: Counter[str] = Counter()
    for one in studies:
        names[one.condition.name] += 1
        one.number = names[one.condition.name]
    return Collected(studies, complete, failed, damaged, notes)


def name_of(record: Record) -> str:
    """The words that tell a run apart, as far as it has them."""
    run = record["run"] if isinstance(record["run"], dict) else {}
    words = [str(run.get(key, "?")) for key in ("protocol", "suite", "dataset", "method", "recipe")]
    return "/".join([*words, f"seed{run.get('seed', '?')}"])


def _outcome(record: Record) -> Outcome:
    outcome = _identified(record["run"], str(record["backbone"]), record["config"])
    if roles := record.get("roles"):
        outcome.suite = (roles["source"], *roles["targets"], *roles["variants"])
    outcome.parameters = int(record["parameters"])
    outcome.training = json.dumps([record["recipe"], record["config"]], sort_keys=True)
    if not record["metrics"]:
        raise ValueError("no metrics")
    protocol = outcome.condition.protocol
    for test, metrics in record["metrics"].items():
        accuracy, metric = float(metrics["accuracy"]), str(outcome.shots) if protocol == "few-shot" else test
        place = (test, "accuracy") if protocol in TRANSFER else (outcome.dataset, metric)
        if not 0 <= accuracy <= 100:
            raise ValueError(f"accuracy of {test} is {accuracy}")
        outcome.accuracy[place] = accuracy
        if test in record["predictions"]:
            outcome.hits[place] = _hits(test, record["predictions"][test], accuracy)
    return outcome


def _hits(test: str, answers: Mapping[str, Any], accuracy: float) -> tuple[bytes, Any]:
    labels, last = np.asarray(answers["labels"], np.int64), np.asarray(answers["last"], np.int64)
    hits = (labels == last).astype(np.float64) if labels.shape == last.shape else np.zeros(0)
    if not hits.size or not math.isclose(100 * hits.mean(), accuracy, abs_tol=1e-6):
        raise ValueError(f"the answers of {test} do not give its accuracy of {accuracy}")
    return labels.tobytes(), hits


def _identified(run: Mapping[str, Any], weights: str, config: Mapping[str, Any]) -> Outcome:
    """Whose outcome it is, without numbers."""
    protocol, method, dataset, shots = str(run["protocol"]), str(run["method"]), str(run["dataset"]), int(run["shots"])
    condition = Condition(
        protocol=protocol, suite=str(run["suite"]), source=dataset if protocol in TRANSFER else "",
        backbone=str(run["backbone"]), weights=weights, precision=str(run["precision"]),
        shots=0 if protocol == "few-shot" else shots,
    )  # fmt: skip
    settings, used = (
        {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        for values in (run["settings"], config)
    )
    own = perl_settings(settings, used) if method == "perl" else settings
    more = bool(run.get("head")), bool(run.get("lens"))
    row = Row(method, tuple(sorted(own.items())), str(run["recipe"]), *more)
    return Outcome(condition, row, dataset, int(run["seed"]), shots)


def _unique(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[str]]:
    """Every run once, of protocols that there are tables for."""
    first: dict[tuple[Any, ...], Outcome] = {}
    for outcome in outcomes:
        first.setdefault(outcome.key, outcome)
    notes = []
    again = [o for o in outcomes if first[o.key] is not o]
    if again:
        other = sum(o.accuracy != first[o.key].accuracy for o in again)
        notes.append(f"{len(again)} records repeat a run ({other} with other numbers); the first one counts.")
    unknown = sorted({o.condition.protocol for o in first.values()} - AVERAGES.keys())
    notes += [f"there is no table for protocol {protocol!r}: see runs.csv." for protocol in unknown]
    return [o for o in first.values() if o.condition.protocol in AVERAGES], notes


def _groups(outcomes: Iterable[Outcome], failed: Iterable[Record]) -> dict[Condition, list[Outcome]]:
    groups: dict[Condition, list[Outcome]] = {}
    untrained = []
    for outcome in outcomes:
        if outcome.row.recipe == UNTRAINED:
            untrained.append(outcome)
        else:
            groups.setdefault(outcome.condition, []).append(outcome)
    trained = list(groups)
    for outcome in untrained:
        fits = [c for c in trained if replace(c, shots=outcome.condition.shots) == outcome.condition]
        for condition in fits or [outcome.condition]:
            groups.setdefault(condition, []).append(outcome)
    for record in failed:  # they keep their places in the tables, without numbers
        try:
            outcome = _identified(record["run"], weights="", config={})
        except DAMAGE:
            continue
        for condition, group in groups.items():
            shots = condition.shots if outcome.row.recipe == UNTRAINED else outcome.condition.shots
            if replace(outcome.condition, weights=condition.weights, shots=shots) == condition:
                group.append(outcome)
    return groups


@dataclass(frozen=True)
class Chapter:
    """An analysis in a report; `name` is its anchor and how its files' names begin."""

    name: str
    title: str
    found: Dynamics
    drawings: list[Drawing]  # that of the averages first


def chapters(folders: Sequence[Path]) -> list[Chapter]:
    """The analyses in the folders, told apart by their runs where there are several."""
    made = []
    for i, folder in enumerate(folders, start=1):
        found, drawings = read_dynamics(folder)
        name = "dynamics" if i == 1 else f"dynamics-{i}"
        title = f"{TITLE}: {'; '.join(found.conditions)}" if len(folders) > 1 else TITLE
        made.append(Chapter(name, title, found, [replace(one, name=f"{name}-{one.name}") for one in drawings]))
    return made
