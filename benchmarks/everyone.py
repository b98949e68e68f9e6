"""Everyone on the same shots: the tables of docs/strong.md, from run stores that `perlclip bench` has made.

    python -m benchmarks.everyone commands [--suite FILE] [--more OPTIONS]    the benchmarks behind a table, to run
    python -m benchmarks.everyone collect STORE --out FILE                    every run's numbers, as one CSV file
    python -m benchmarks.everyone collect STORE --few-shot --out FILE         those of the protocol few-shot instead
    python -m benchmarks.everyone show FILE                                   the table, and differences with intervals
    python -m scripts.documents                                               both into the document

A row is a method with its recipe, without or with a head. Means are over sets and seeds, HM is that of the means, and
intervals (95 %, Student's t) are over sets, each of which is the mean of its seeds.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from perlclip.bench.store import Record, Store
from perlclip.data.suites import SUITES

COLUMNS = ("set", "shots", "seed", "row", "test", "accuracy", "numbers", "seconds")
OTHERS = ("coop", "cocoop", "kgcoop", "provp", "maple", "promptsrc", "tcp", "mma", "mmrl", "mmrl++")
TESTS = ("base-to-novel base", "base-to-novel novel", "generalised base", "generalised novel")
PARTS = ("lens", "fit", "head")  # of what is made of the shots
BEST_OTHERS = ("mma", "promptsrc", "mmrl++", "mmrl")  # by HM on the toybox and on photographs
PAIRS = (
    ("perl strong", "perl extended"),
    ("perl strong", "zero-shot"),
    ("perl strong", "promptsrc original"),
    ("perl strong + lens", "promptsrc original + lens"),
    ("perl strong + lens + head", "zero-shot"),
    ("perl strong + lens + head", "perl strong + head"),
    ("perl strong + lens + head", "gaussian + lens"),
    ("perl strong + lens + head", "mma original + lens + head"),
    ("perl strong + lens + head", "promptsrc original + lens + head"),
    ("perl strong + head", "zero-shot"),
    ("perl strong + head", "ridge"),
    ("perl strong + head", "gaussian"),
    ("perl strong + head", "mma original"),
    ("perl strong + head", "mma original + head"),
    ("perl strong + head", "mmrl++ original"),
    ("perl strong + head", "mmrl++ original + head"),
)
SHOWN = ("0", "1", "2", "3")  # seeds of the tables, with that of a row that trains nothing
T95 = {2: 4.303, 9: 2.262}  # two-sided, by degrees of freedom
Key = tuple[str, str]  # set, seed


def commands(suite: str, more: str) -> Iterator[str]:
    """What fills a store; the same command again goes on, and runs that share a training share its adapter."""
    sets = f" --datasets {','.join(SUITES['toybox'].targets)}" if suite == "toybox" else ""
    for protocol in ("base-to-novel", "generalised"):
        for methods, options in (
            ("perl", "--recipe strong --lens --head"),
            ("perl", "--recipe strong --lens"),
            ("gaussian,ridge", "--lens"),
            (",".join(BEST_OTHERS[:2]), "--recipe original --lens --head"),
            (",".join(BEST_OTHERS[:2]), "--recipe original --lens"),
            ("perl", "--recipe strong --head --seeds 1,2,3,4,5"),
            ("perl", "--recipe strong --seeds 1,2,3,4,5"),
            ("perl", "--recipe extended --seeds 1,2,3,4,5"),
            (f"zero-shot,ridge,gaussian,perl,{','.join(OTHERS)}", "--recipe original"),
            (",".join(BEST_OTHERS), "--recipe original --head"),
        ):
            yield f"perlclip bench {protocol} --suite {suite}{sets} --methods {methods} {options} {more}".strip()


def collect(stores: Sequence[Path], out: Path, *, few_shot: bool) -> None:
    """One line a test, also of a run that two stores have; what `out` has of other tests stays."""
    rows: dict[tuple[str, ...], tuple[Any, ...]] = {}
    if out.exists():
        with out.open() as file:
            rows = {tuple(line[:5]): tuple(line[5:]) for line in list(csv.reader(file))[1:]}
    for store in stores:
        found = Store(store).records()
        of = {home.relative_to(store).as_posix(): each for home, each in zip(found.homes, found.complete, strict=True)}
        for record in found.complete:
            run = record["run"]
            if (run["protocol"] == "few-shot") == few_shot:
                for part, metrics in record["metrics"].items():
                    test = run["dataset"], run["shots"], run["seed"], row_of(run), f"{run['protocol']} {part}"
                    time = seconds_of(record, of.get(record.get("adapter_of")))
                    rows[tuple(map(str, test))] = f"{metrics['accuracy']:.3f}", record["parameters"], time
    lines = [test + found for test, found in rows.items()]
    with out.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *sorted(lines, key=lambda line: [str(word) for word in line])])


def seconds_of(record: Record, trained: Record | None) -> str:
    """What training took, also in the run whose adapter was taken; empty where it is not known.

    A row without a head spends no time on one. What a run that was killed had almost done is not known.
    """
    seconds, own = (trained or record)["seconds"], not record.get("adapter_of")
    if record["run"]["method"] != "zero-shot" and (seconds["fit"] <= 0.05 or (trained is None and not own)):
        return ""
    return f"{sum(seconds.get(part, 0) for part in PARTS if own or part != 'head' or record['run'].get('head')):.1f}"


def row_of(run: dict[str, object]) -> str:
    """`mma original`, `perl strong + head`, `ridge`; the authors' recipe for few shots is `original`, too."""
    recipe = (
        f" {run['recipe']}".removesuffix("-few-shot") if run["method"] not in ("ridge", "gaussian", "zero-shot") else ""
    )
    return f"{run['method']}{recipe}" + " + lens" * bool(run.get("lens")) + " + head" * bool(run.get("head"))


class Table:
    """What a file of `collect` has, by row and test."""

    def __init__(self, path: Path) -> None:
        self.accuracy: dict[str, dict[str, dict[Key, float]]] = defaultdict(lambda: defaultdict(dict))
        self.numbers: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.seconds: dict[str, list[float]] = defaultdict(list)
        with path.open() as file:
            for line in csv.DictReader(file):
                self.accuracy[line["row"]][line["test"]][line["set"], line["seed"]] = float(line["accuracy"])
                if line["seed"] in SHOWN:
                    self.numbers[line["row"]][line["set"]].append(int(line["numbers"]))
                if line["seconds"] and line["test"] in TESTS[:2]:  # of one training, where both protocols made one
                    self.seconds[line["row"]].append(float(line["seconds"]))
        self.sets = sorted({name for tests in self.accuracy.values() for found in tests.values() for name, _ in found})

    def by_set(self, row: str, test: str) -> dict[str, float]:
        """Mean over seeds 1 to 3, of each set that has them."""
        found: dict[str, list[float]] = defaultdict(list)
        for (name, seed), accuracy in self.accuracy[row][test].items():
            if seed in SHOWN:
                found[name].append(accuracy)
        return {name: fmean(values) for name, values in found.items()}

    def rows(self) -> list[tuple[float, str, list[str]]]:
        """HM, name and cells of every row that has all sets, the best first; seeds 1 to 3."""
        found = []
        for row in self.accuracy:
            means = {test: self.by_set(row, test) for test in TESTS}
            if len(means[TESTS[0]]) < len(self.sets):
                continue
            base, novel, *among = (fmean(m.values()) if len(m) == len(self.sets) else None for m in means.values())
            assert base is not None and novel is not None
            cells = [f"{base:.1f}", f"{novel:.1f}", f"{harmonic(base, novel):.1f}"]
            a, b = among
            cells += ["–" if a is None or b is None else f"{harmonic(a, b):.1f}"]
            seconds = self.seconds[row]
            numbers = fmean(map(fmean, self.numbers[row].values()))
            cells += [f"{numbers:,.0f}", f"{median(seconds):.1f}" if seconds else "–"]
            found.append((harmonic(base, novel), row, cells))
        return sorted(found, reverse=True)

    def gains(self, row: str, other: str, test: str) -> dict[str, float]:
        """How much better a row is than another, by set: mean over the seeds that both have."""
        one, two = self.accuracy[row][test], self.accuracy[other][test]
        untrained = {name for name, seed in two if seed == "0"}
        found: dict[str, list[float]] = defaultdict(list)
        for (name, seed), accuracy in one.items():
            against = two.get((name, "0") if name in untrained else (name, seed))
            if against is not None:
                found[name].append(accuracy - against)
        return {name: fmean(values) for name, values in found.items()}


def with_interval(gains: Sequence[float]) -> str:
    """Their mean; a dash where they are not of as many sets as a suite has."""
    if len(gains) - 1 not in T95:
        return "–"
    interval = T95[len(gains) - 1] * stdev(gains) / sqrt(len(gains))
    return f"{fmean(gains):+.1f} ± {interval:.1f}".replace("-", "−")


def harmonic(a: float, b: float) -> float:
    """The harmonic mean of two accuracies."""
    return 2 * a * b / (a + b) if a + b else 0.0


HEAD = ("", "base", "novel", "HM", "HM among all", "numbers learned", "seconds")
DIFFERENCES = ("", "base", "novel", "worst set, base")


def means(path: Path) -> list[list[str]]:
    """The rows of the table under HEAD, the best first."""
    return [[row, *cells] for _, row, cells in Table(path).rows()]


def by_set(path: Path) -> list[list[str]]:
    """Base / novel of every row and set, then the same among all classes; a dash where it was not run; seeds 1 to 3."""
    table = Table(path)
    made = [["", *table.sets, *(f"{name}, among all" for name in table.sets)]]
    for row in sorted(table.accuracy):
        base, novel, *among = (table.by_set(row, test) for test in TESTS)
        pairs = [(part, name) for part in ((base, novel), among) for name in table.sets]
        made.append([row, *(f"{a[name]:.1f} / {b[name]:.1f}" if name in a else "–" for (a, b), name in pairs)])
    return made


def differences(path: Path) -> list[list[str]]:
    """The rows of the table under DIFFERENCES."""
    table, made = Table(path), []
    for row, other in PAIRS:
        base, novel = (table.gains(row, other, test) for test in TESTS[:2])
        cells = [with_interval(list(each.values())) for each in (base, novel)]
        if cells[0] != "–":  # both rows have all sets
            gain, worst = min((gain, name) for name, gain in base.items())
            made.append([f"{row} − {other}", *cells, f"{gain:+.1f} ({worst})".replace("-", "−")])
    return made


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["commands", "collect", "show"])
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--few-shot", action="store_true")
    parser.add_argument("--suite", default="toybox")
    parser.add_argument("--more", default="--out everyone")
    options = parser.parse_args()
    if options.what == "commands":
        print("\n".join(commands(options.suite, options.more)))
    elif options.what == "collect":
        collect(options.paths, options.out, few_shot=options.few_shot)
    else:
        for row in (HEAD, *means(options.paths[0]), DIFFERENCES, *differences(options.paths[0])):
            print("".join(f"{word:>34}" if i == 0 else f"{word:>18}" for i, word in enumerate(row)))


if __name__ == "__main__":
    main()
