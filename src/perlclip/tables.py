"""Tables from the records of a benchmark: Markdown to read and paste, CSV at full precision."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, pstdev
from typing import Any

from perlclip.protocols import ABLATIONS, protocols_of
from perlclip.runs import Record

Cell = tuple[float, ...]  # a number, or a number and its standard deviation over seeds; () where there is none
Row = tuple[str | Cell, ...]
Pair = tuple[float, float]  # accuracy on base and on novel classes
Namer = Callable[[Record], str]  # which row of a table a record belongs to


def harmonic(base: float, novel: float) -> float:
    """Harmonic mean of the two accuracies."""
    return 2 * base * novel / (base + novel) if base + novel else 0.0


def tables(bench: str, records: Sequence[Record]) -> str:
    """All tables of a protocol, an ablation, or `all`."""
    if bench in ABLATIONS:
        return ablation(bench, records)
    groups = ([r for r in records if r["run"]["protocol"] == protocol] for protocol in protocols_of(bench))
    return "\n".join(TABLES[group[0]["run"]["protocol"]](group) for group in groups if group)


def base_to_novel(records: Sequence[Record]) -> str:
    """A table for each data set, then the means over the sets; numbers stand only where no run is missing."""
    grid = _grid(records, _name)
    sets = list(dict.fromkeys(record["run"]["dataset"] for record in records))
    parts = [_caption(records, records[0]["run"]["protocol"])]
    for dataset in sets:
        rows: list[Row] = [(name, *_of_set(row.get(dataset))) for name, row in grid.items()]
        parts.append(f"### {dataset}\n\n" + markdown(("method", "base", "novel", "HM"), rows))
    return "\n".join([*parts, _means(records, _name, "method")])


def ablation(bench: str, records: Sequence[Record]) -> str:
    """The means over the sets for each value of the setting."""
    key, _ = ABLATIONS[bench]
    return "\n".join([_caption(records, bench), _means(records, lambda r: str(r["config"][key]), key)])


def _means(records: Sequence[Record], name: Namer, kind: str) -> str:
    sets = list(dict.fromkeys(record["run"]["dataset"] for record in records))
    rows: list[Row] = [
        (row, _parameters(records, name, row), *_of_sets([found.get(dataset) for dataset in sets]))
        for row, found in _grid(records, name).items()
    ]
    header = (kind, "parameters", "base", "novel", "mean of HMs", "HM of means")
    return _of(sets) + markdown(header, rows)


def transfer(records: Sequence[Record]) -> str:
    """A column for each test, the source first, and the mean over the others."""
    source, *others = records[0]["metrics"]
    rows: list[Row] = []
    for name, found in _by_row(records).items():
        seeds = {test: [record["metrics"][test]["accuracy"] for record in found] for test in (source, *others)}
        cells = [_cell(values)[:1] for values in seeds.values()]
        rows.append((name, _parameters(records, _name, name), *cells, _cell(_over([seeds[test] for test in others]))))
    header = ("method", "parameters", source, *others, f"mean of {len(others)}")
    return "\n".join([_caption(records, records[0]["run"]["protocol"]), markdown(header, rows)])


def few_shot(records: Sequence[Record]) -> str:
    """A table for each data set with a column for each number of shots, then the means over the sets."""
    sets = list(dict.fromkeys(record["run"]["dataset"] for record in records))
    shots = sorted({record["run"]["shots"] for record in records} - {0}) or [0]
    grid: dict[str, list[list[list[float]]]] = {}  # row -> set -> shots -> seeds
    for dataset in sets:
        for name in dict.fromkeys(map(_name, records)):
            grid.setdefault(name, []).append([_few_shot_cell(records, name, dataset, number) for number in shots])
    header = ("method", *(f"{number} shot{'s' * (number > 1)}" for number in shots))
    parts = [_caption(records, "few-shot")]
    for i, dataset in enumerate(sets):
        rows: list[Row] = [(name, *(_cell(seeds)[:1] for seeds in row[i])) for name, row in grid.items()]
        parts.append(f"### {dataset}\n\n" + markdown(header, rows))
    means: list[Row] = [
        (name, *(_cell(_over(list(column))) for column in zip(*row, strict=True))) for name, row in grid.items()
    ]
    return "\n".join([*parts, _of(sets) + markdown(header, means)])


def _few_shot_cell(records: Sequence[Record], name: str, dataset: str, shots: int) -> list[float]:
    """By seed; what was not trained has the same number in every column."""
    column = [r for r in records if r["run"]["dataset"] == dataset and r["run"]["shots"] in (0, shots)]
    return [record["metrics"]["all"]["accuracy"] for record in _by_row(column, _seeds(records)).get(name, [])]


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {
    "base-to-novel": base_to_novel,
    "cross-dataset": transfer,
    "domain-shift": transfer,
    "few-shot": few_shot,
}


def _caption(records: Sequence[Record], title: str) -> str:
    run = records[0]["run"]
    trained = [record["run"] for record in records if record["run"]["shots"]]
    recipe, shots, seeds = (_listed({run[key] for run in trained}) for key in ("recipe", "shots", "seed"))
    how = f", {recipe} recipe, {shots} shots, mean of seeds {seeds}" if trained else ""
    halves = "HM is of the row's base and novel; the mean of HMs is over the sets' own. " * (
        "base" in records[0]["metrics"]
    )
    return (
        f"## {title}, {run['suite']}\n\n"
        f"Test accuracy in %, backbone {run['backbone']} in {run['precision']}{how}. {halves}"
        "± is the standard deviation over seeds of a seed's mean over the sets.\n"
    )


def _of(sets: Sequence[str]) -> str:
    return f"### mean of {len(sets)} set{'s' * (len(sets) > 1)}\n\n"


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def _name(record: Record) -> str:
    """A record's row: its method and the settings it was given."""
    run = record["run"]
    return " ".join([run["method"], *(f"{key}={value}" for key, value in run["settings"].items())])


def _seeds(records: Sequence[Record]) -> int:
    """How many a trained row must have."""
    return len({record["run"]["seed"] for record in records if record["run"]["shots"]})


def _by_row(records: Sequence[Record], seeds: int | None = None) -> dict[str, list[Record]]:
    """The records of each row in the order of their seeds; none if one is missing."""
    rows: dict[str, list[Record]] = {}
    for record in records:
        rows.setdefault(_name(record), []).append(record)
    wanted = _seeds(records) if seeds is None else seeds
    return {
        name: sorted(found, key=lambda record: int(record["run"]["seed"]))
        if len(found) == (wanted if found[0]["run"]["shots"] else 1)
        else []
        for name, found in rows.items()
    }


def _cell(seeds: Sequence[float]) -> Cell:
    """Mean and, of several seeds, deviation."""
    return () if not seeds else (mean(seeds),) if len(seeds) == 1 else (mean(seeds), pstdev(seeds))


def _over(sets: Sequence[Sequence[float]]) -> list[float]:
    """Each seed's mean over the sets; nothing if a set is missing."""
    return [mean(seed) for seed in zip(*sets, strict=True)] if all(sets) else []


def _grid(records: Sequence[Record], name: Namer) -> dict[str, dict[str, list[Pair]]]:
    """Row, data set, seeds in order; without the sets that lack a seed."""
    grid: dict[str, dict[str, list[Pair]]] = {}
    wanted = {name(record): _seeds(records) if record["run"]["shots"] else 1 for record in records}
    for record in sorted(records, key=lambda record: int(record["run"]["seed"])):
        pair = record["metrics"]["base"]["accuracy"], record["metrics"]["novel"]["accuracy"]
        grid.setdefault(name(record), {}).setdefault(record["run"]["dataset"], []).append(pair)
    return {
        row: {dataset: pairs for dataset, pairs in grid[row].items() if len(pairs) == count}
        for row, count in wanted.items()
    }


def _mean(pairs: Sequence[Pair]) -> Pair:
    return mean(base for base, _ in pairs), mean(novel for _, novel in pairs)


def _of_set(seeds: Sequence[Pair] | None) -> list[Cell]:
    if not seeds:
        return [(), (), ()]
    base, novel = _mean(seeds)
    return [(base,), (novel,), (harmonic(base, novel),)]


def _of_sets(sets: Sequence[Sequence[Pair] | None]) -> list[Cell]:
    whole = [seeds for seeds in sets if seeds]
    if len(whole) < len(sets):
        return [(), (), (), ()]
    values = _averages([_mean(seeds) for seeds in whole])
    by_seed = [_averages(pairs) for pairs in zip(*whole, strict=True)]
    if len(by_seed) == 1:
        return [(value,) for value in values]
    return [(value, pstdev(spread)) for value, spread in zip(values, zip(*by_seed, strict=True), strict=True)]


def _averages(sets: Sequence[Pair]) -> Cell:
    """Base, novel, mean of the HMs, HM of the means."""
    return (*_mean(sets), mean(harmonic(*pair) for pair in sets), harmonic(*_mean(sets)))


def _parameters(records: Sequence[Record], name: Namer, row: str) -> str:
    counts = sorted({record["parameters"] for record in records if name(record) == row})
    return "–".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))


def markdown(header: Sequence[str], rows: Sequence[Row | Sequence[str]]) -> str:
    """A table with aligned columns; of numbers the best of each column is bold."""
    columns = zip(*rows, strict=True)
    texts = [header, *zip(*([_text(cell, column) for cell in column] for column in columns), strict=True)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [texts[0], ["-" * width for width in widths], *texts[1:]]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def _text(cell: str | Cell, column: Sequence[str | Cell]) -> str:
    if isinstance(cell, str):
        return cell
    if not cell:
        return "–"
    best = max(other[0] for other in column if other and not isinstance(other, str))
    value = f"**{cell[0]:.2f}**" if cell[0] == best else f"{cell[0]:.2f}"
    return " ± ".join([value, *(f"{spread:.2f}" for spread in cell[1:])])


def runs_csv(records: Sequence[Record]) -> str:
    """A line for each run at full precision: what it is, accuracy of every test and step, parameters, costs."""
    lines = [_line(record) for record in records]
    header = dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line)
    file = io.StringIO()
    writer = csv.DictWriter(file, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _line(record: Record) -> dict[str, Any]:
    settings = ";".join(f"{key}={value}" for key, value in record["run"]["settings"].items())
    line = {**record["run"], "settings": settings, "parameters": record["parameters"]}
    line |= {f"{part}_seconds": seconds for part, seconds in record["seconds"].items()} | record["memory"]
    line |= {test: metrics["accuracy"] for test, metrics in record["metrics"].items()}
    for test, metrics in record["metrics"].items():
        steps = metrics["step_accuracy"]
        line |= {f"{test}_k{k}": accuracy for k, accuracy in enumerate(steps) if len(steps) > 1}
    return line
