"""Tables from the records of a benchmark: Markdown to read and paste, CSV at full precision."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, pstdev
from typing import Any

from perlclip.runs import Record

Cell = tuple[float, ...]  # a number, or a number and its standard deviation over seeds; () where there is none
Row = tuple[str | Cell, ...]
Pair = tuple[float, float]  # accuracy on base and on novel classes


def harmonic(base: float, novel: float) -> float:
    """Harmonic mean of the two accuracies."""
    return 2 * base * novel / (base + novel) if base + novel else 0.0


def base_to_novel(records: Sequence[Record]) -> str:
    """A table for each data set, then the means over the sets; numbers stand only where no run is missing."""
    grid = _grid(records)
    sets = list(dict.fromkeys(record["run"]["dataset"] for record in records))
    parts = [_caption(records)]
    for dataset in sets:
        rows: list[Row] = [(name, *_of_set(row.get(dataset))) for name, row in grid.items()]
        parts.append(f"### {dataset}\n\n" + markdown(("method", "base", "novel", "HM"), rows))
    rows = [(name, _parameters(records, name), *_of_sets([row.get(d) for d in sets])) for name, row in grid.items()]
    header = ("method", "parameters", "base", "novel", "mean of HMs", "HM of means")
    parts.append(f"### mean of {len(sets)} set{'s' * (len(sets) > 1)}\n\n" + markdown(header, rows))
    return "\n".join(parts)


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {"base-to-novel": base_to_novel}


def _caption(records: Sequence[Record]) -> str:
    run = records[0]["run"]
    trained = [record["run"] for record in records if record["run"]["shots"]]
    recipe, shots, seeds = (_listed({run[key] for run in trained}) for key in ("recipe", "shots", "seed"))
    how = f", {recipe} recipe, {shots} shots, mean of seeds {seeds}" if trained else ""
    return (
        f"## {run['protocol']}, {run['suite']}\n\n"
        f"Test accuracy in %, backbone {run['backbone']} in {run['precision']}{how}. "
        "HM is of the row's base and novel; the mean of HMs is over the sets' own. "
        "± is the standard deviation over seeds of a seed's mean over the sets.\n"
    )


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def _name(record: Record) -> str:
    """A record's row: its method and the settings it was given."""
    run = record["run"]
    return " ".join([run["method"], *(f"{key}={value}" for key, value in run["settings"].items())])


def _grid(records: Sequence[Record]) -> dict[str, dict[str, list[Pair]]]:
    """Row, data set, seeds in order; without the sets that lack a seed."""
    seeds = {record["run"]["seed"] for record in records if record["run"]["shots"]}
    grid: dict[str, dict[str, list[Pair]]] = {}
    wanted = {_name(record): len(seeds) if record["run"]["shots"] else 1 for record in records}
    for record in sorted(records, key=lambda record: record["run"]["seed"]):
        pair = record["metrics"]["base"]["accuracy"], record["metrics"]["novel"]["accuracy"]
        grid.setdefault(_name(record), {}).setdefault(record["run"]["dataset"], []).append(pair)
    return {
        name: {dataset: pairs for dataset, pairs in grid[name].items() if len(pairs) == count}
        for name, count in wanted.items()
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


def _parameters(records: Sequence[Record], name: str) -> str:
    counts = sorted({record["parameters"] for record in records if _name(record) == name})
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
