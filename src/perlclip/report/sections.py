"""The tables that a study is shown in, and the sentences that go with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perlclip.bench.store import UNTRAINED
from perlclip.report import paper
from perlclip.report.comparison import Row, Scores, Study, rank, shown
from perlclip.report.paper import Published
from perlclip.report.statistics import AVERAGES, DRAWS, HALVES, Array, by_set, interval, over_seeds
from perlclip.report.tables import OUTSIDE, SAME, Cell, Column, Line, Table
from perlclip.viz.markup import MISSING

# Settings of PERL's that ablations vary: what they are, and the paper's symbol.
VARIED = {
    "vision_depth": ("injection depth of the vision tower", "J"),
    "text_depth": ("injection depth of the text tower", "J"),
    "depth": ("injection depth", "J"),
    "steps": ("refinement steps", "K"),
    "modalities": ("towers that think", ""),
    "variant": ("variants", ""),
    "anchor": ("weight of the anchor", "λ"),
    "rank": ("rank of the projector", "r"),
    "init": ("initialisation", ""),
}


@dataclass(frozen=True)
class Section:
    """A study on paper: its heading, what has to be said once about all its tables, and these."""

    study: Study
    title: str
    sentences: list[str]
    notes: list[str]
    summary: Table
    sets: list[Table]
    ablations: list[tuple[str, Table]]  # with the setting that is varied, or nothing
    layout: Table | None  # as the paper has it, for LaTeX

    @property
    def short(self) -> str:
        """Its heading where there is little room."""
        c = self.study.condition
        backbone = c.backbone.rstrip("/").rpartition("/")[2]
        return capital(f"{c.protocol}, {c.suite}, {backbone}" + (f", {_shots(c.shots)}" if c.shots else ""))

    @property
    def tables(self) -> list[Table]:
        """All that have lines."""
        return [t for t in (self.summary, *self.sets, *(table for _, table in self.ablations)) if t.lines]


def section(study: Study) -> Section:
    """Everything to show of a study."""
    title = capital(_conditions(study))
    return Section(
        study, title, sentences(study), study.notes, summary(study), sets(study), ablations(study), layout(study)
    )


def summary(study: Study) -> Table:
    """Averages over all sets."""
    source, count = study.condition.source, len(study.sets)
    over = f"from {source} to {_sets(count - 1)}" if source else f"mean of {_sets(count)}"
    lines = [(row, row.label, None) for row in study.compared]
    return replace(
        _averages(study, lines, range(count), study.reference()),
        name=f"{study.name}-summary",
        title=capital(over),
        caption=capital(f"{_conditions(study)}: {over}."),
    )


def sets(study: Study) -> list[Table]:
    """One table for each metric, a column for each set."""
    found = {row: over_seeds(by_set, study.rows[row].accuracy_SD) for row in study.compared}
    columns, tables = tuple(Column(name) for name in study.sets), []
    for metric in next(iter(found.values()), {}):
        lines = []
        for row, spreads in found.items():
            printed = [_paper(study, row, name, metric.lower()) for name in study.sets]
            value_D, spread_D = spreads[metric]
            spreads_D = [None] * len(value_D) if spread_D is None else spread_D
            cells = [_cell(*one, row) for one in zip(value_D, spreads_D, printed, strict=True)]
            lines.append(Line(row, row.label, study.rows[row].seeds, tuple(cells)))
        name, title = f"{study.name}-sets-{metric.lower()}", f"{_metric(study, metric)}, set by set"
        caption = capital(f"{_conditions(study)}: {title}.")
        tables.append(Table(name, capital(title), caption, "method", columns, tuple(lines)))
    return tables


def layout(study: Study) -> Table | None:
    """The paper's main table: every set (of two halves the HM), the averages, and the difference where it belongs."""
    single, whole = sets(study)[:1], summary(study)
    if study.condition.protocol not in paper.AVERAGED_OVER or not whole.lines:
        return None
    kept = [c for c, column in enumerate(whole.columns) if column.kind != "accuracy" or column.title in paper.CALLED]
    first, rest = kept[:2], kept[2:]  # parameters and their ratio stand first
    heads = {"parameters": "#Params", "× PERL": "×PERL", "Δ HM to PERL": "ΔHM", "Δ to PERL": "ΔAvg."} | paper.CALLED
    columns = [replace(whole.columns[c], title=heads[whole.columns[c].title]) for c in kept]
    lines = []
    for line, beside in zip(whole.lines, single[0].lines, strict=True):
        cells = [*(line.cells[c] for c in first), *beside.cells, *(line.cells[c] for c in rest)]
        bare = [replace(cell, spread=None, span=None, paper=None, word=cell.word and MISSING) for cell in cells]
        if line.row.recipe == UNTRAINED:
            bare[1] = Cell()  # no ratio of nothing
        lines.append(replace(line, cells=tuple(bare)))
    return replace(
        whole,
        name=f"{study.name}-paper",
        caption=f"{whole.caption} Means over seeds; Δ is the gap to PERL.",
        columns=(*columns[:2], *single[0].columns, *columns[2:]),
        lines=tuple(lines),
    )


def ablations(study: Study) -> list[tuple[str, Table]]:
    """A table for each recipe and each setting of PERL's that was varied alone, and one for the rest."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in study.rows:
        if row.is_ablation:
            key = row.settings[0][0] if len(row.settings) == 1 else ""
            groups.setdefault((row.recipe, key), []).append(row)
    # What is not trained, PERL without a step, stands beside what is, by whatever recipe.
    for untrained, key in [group for group in groups if group[0] == UNTRAINED]:
        others = [rows for (recipe, k), rows in groups.items() if k == key and recipe != UNTRAINED]
        for rows in others:
            rows += groups[untrained, key]
        if others:
            del groups[untrained, key]
    keys = sorted(groups, key=lambda g: (g[0] != paper.RECIPE, g[0], not g[1], *rank(g[1], list(VARIED))))
    return [(key, _ablation(study, recipe, key, groups[recipe, key])) for recipe, key in keys]


def _ablation(study: Study, recipe: str, key: str, rows: Sequence[Row]) -> Table:
    """The default stands among the others, and all are averaged over the sets that the others have."""
    what, symbol = VARIED.get(key, (key or "other settings", ""))
    default = study.reference(recipe)
    settings: dict[Row, Any] = {row: dict(row.settings).get(key, row.setting) for row in rows}
    if default is not None and default.recipe == recipe:
        settings[default] = (
            paper.PERL["depth"] if key in ("vision_depth", "text_depth") else paper.PERL.get(key, "none")
        )
    else:
        default = None
    lines = [
        (row, shown(setting) + " (default)" * (row == default), setting)
        for row, setting in sorted(settings.items(), key=lambda item: _order(item[1]))
    ]
    places = range(len(study.sets))
    columns = [d for d in places if any(_there(study.rows[row], d) for row in rows)] or places
    which = "" if len(columns) == len(places) else f" ({', '.join(study.sets[d] for d in columns)})"
    told = f"PERL's {what} {symbol}".rstrip() + ("" if recipe == paper.RECIPE else f", recipe {recipe}")
    found = _averages(study, lines, columns, default)
    return replace(
        _with_traits(found) if key == "variant" else found,
        name=f"{study.name}-ablation-{key or 'other'}-{recipe}",
        head=symbol or what,
        title=f"{told}: mean of {_sets(len(columns))}{which}",
        caption=capital(f"{_conditions(study)}: {told}, mean of {_sets(len(columns))}{which}."),
    )


def _with_traits(table: Table) -> Table:
    """The paper's columns on what a variant is, behind the parameters."""
    columns = (Column("J", "word"), *(Column(trait, "word") for trait in paper.TRAITS))
    lines = []
    for line in table.lines:
        has, depth = paper.VARIANTS.get(line.setting, ()), paper.DEPTHS.get(line.setting, MISSING)
        words = [shown(depth), *("yes" if trait in has else "no" for trait in paper.TRAITS)]
        lines.append(replace(line, cells=(line.cells[0], *(Cell(word=word) for word in words), *line.cells[1:])))
    return replace(table, columns=(table.columns[0], *columns, *table.columns[1:]), lines=tuple(lines))


def _there(scores: Scores, d: int) -> bool:
    return any(not np.isnan(accuracy[:, d]).all() for accuracy in scores.accuracy_SD.values())


def _order(setting: Any) -> tuple[Any, ...]:
    """Numbers by size, several of them after one, words in the paper's order."""
    if isinstance(setting, str):
        return 2, *rank(setting, paper.WORDS)
    return (1, *setting) if isinstance(setting, tuple) else (0, setting)


def _averages(
    study: Study, lines: Sequence[tuple[Row, str, Any]], columns: Sequence[int], reference: Row | None
) -> Table:
    """Parameters, averages over some of the sets and, for what methods are compared by, the difference to PERL."""
    formula, main = AVERAGES[study.condition.protocol]
    names = list(formula(next(iter(study.rows.values())).accuracy_SD))
    gap = "Δ HM to PERL" if main == "mean of HMs" else "Δ to PERL"
    heads = [Column("parameters", "count"), Column("× PERL", "ratio")]
    heads += [Column(_metric(study, name)) for name in names] + [Column(gap, "difference")] * bool(main)
    perls = _parameters(study.rows[reference], None).value if reference else None
    found = []
    for row, label, setting in lines:
        scores = study.rows[row]
        printed = {name: _paper_average(study, row, name, len(columns)) for name in (*names, "parameters", gap)}
        spreads = over_seeds(formula, scores.of(columns))
        ours = _parameters(scores, printed["parameters"])
        times = paper.ratio(printed["parameters"]) if printed["parameters"] and row.recipe != UNTRAINED else None
        cells = [ours, Cell(ours.value / perls if ours.value is not None and perls else None, paper=times)]
        cells += [_cell(*spreads[name], printed[name], row) for name in names]
        if main:
            cells.append(_difference(study, row, reference, columns, printed[gap]))
        found.append(Line(row, label, scores.seeds, tuple(cells), setting))
    return Table("", "", "", "method", tuple(heads), tuple(found))


def _cell(number: Any, spread: Any = None, printed: Published | None = None, row: Row | None = None) -> Cell:
    if np.isnan(number):
        return Cell(paper=printed)
    untrained = printed is not None and row is not None and row.recipe == UNTRAINED
    return Cell(float(number), None if spread is None else float(spread), paper=printed, untrained=untrained)


def _parameters(scores: Scores, printed: Published | None) -> Cell:
    counts = scores.parameters
    if not counts:
        return Cell(paper=printed)
    return Cell(sum(counts) / len(counts), span=(counts[0], counts[-1]) if len(counts) > 1 else None, paper=printed)


def _difference(
    study: Study, row: Row, reference: Row | None, columns: Sequence[int], printed: Published | None
) -> Cell:
    if reference is None or row == reference:
        return Cell(word="reference" if reference else "")
    formula, main = AVERAGES[study.condition.protocol]

    def of(one: Row) -> tuple[Array, Array]:
        drawn = {metric: accuracy_BD[:, list(columns)] for metric, accuracy_BD in study.resampled[one].items()}
        return over_seeds(formula, study.rows[one].of(columns))[main][0], formula(drawn)[main]

    (ours, ours_B), (perls, perls_B) = of(row), of(reference)
    cell = _cell(ours - perls, None, printed)
    return cell if cell.value is None else replace(cell, span=interval(ours_B - perls_B))


# The paper's averages by our columns; its HM is the mean of the HMs.
_PAPER = {
    "base": "base", "novel": "novel", "mean of HMs": "hm", "mean of targets": "accuracy",
    "Δ HM to PERL": "delta_hm", "Δ to PERL": "delta",
}  # fmt: skip


def _paper_average(study: Study, row: Row, column: str, count: int) -> Published | None:
    """Averages are comparable only over all the paper's sets."""
    if column == "source":
        return _paper(study, row, study.condition.source, "accuracy")
    if column == "parameters":
        return _paper(study, row, "average", column)
    whole = count == paper.AVERAGED_OVER.get(study.condition.protocol)
    return _paper(study, row, "average", _PAPER[column]) if whole and column in _PAPER else None


def _paper(study: Study, row: Row, dataset: str, metric: str) -> Published | None:
    if not study.condition.has_paper:
        return None
    recipe = "original" if row.recipe.startswith("original") else row.recipe
    if row.head or row.lens:
        return None
    return paper.value(study.condition.protocol, recipe, row.method, dataset, metric, row.setting)


# ---- words ----


def capital(text: str) -> str:
    """With a capital letter."""
    return text[:1].upper() + text[1:]


def _sets(count: int) -> str:
    return f"{count} set{'s' * (count != 1)}"


def _shots(count: int | str) -> str:
    return f"{count} shot{'s' * (str(count) != '1')}"


def _metric(study: Study, metric: str) -> str:
    return _shots(metric) if study.condition.protocol == "few-shot" else metric


def _conditions(study: Study) -> str:
    c = study.condition
    weights = f" (weights {c.weights[:8]})" if study.number > 1 else ""
    shots = f", {_shots(c.shots)}" if c.shots else ""
    return f"{c.protocol} on {c.suite}, {c.backbone}{weights} in {c.precision}{shots}"


def sentences(study: Study) -> list[str]:
    """What the tables show, and how to read them."""
    c, (_, main) = study.condition, AVERAGES[study.condition.protocol]
    reference = study.reference()
    said = [
        f"Test accuracy in % of backbone {c.backbone} (weights {c.weights[:8]}) in {c.precision} on suite {c.suite}"
        f"{_training(study)}.",
        _seeds(study),
        f"In each column the best number is bold and the second best underlined; {MISSING} is where a run is missing.",
    ]
    if c.protocol in HALVES:
        said.append(
            "The HM of a set is that of its mean base and novel accuracy; “mean of HMs” averages it over the sets, as "
            "the paper does, “HM of means” is that of the averages."
        )
    if main and reference:
        said.append(
            f"Δ is the difference to {reference.label} in {main}, with the 95 % interval of a paired bootstrap over "
            f"test images: {DRAWS:,} draws, each the same for all methods and seeds."
        )
    if c.has_paper:
        said.append(
            f"In parentheses is what the paper prints, with {OUTSIDE} where that is more than two standard deviations "
            f"over our seeds away from ours, or {SAME} points from what is not trained; a number from a single seed is "
            "not judged. Its × PERL is the ratio of rounded counts (4.9M / 6K), ours that of the exact ones."
        )
    else:
        said.append("The paper has no numbers for these conditions, so none stand beside ours.")
    return [sentence for sentence in said if sentence]


def _training(study: Study) -> str:
    c, recipes = study.condition, sorted({row.recipe for row in study.rows} - {UNTRAINED})
    if not recipes:
        return ", untrained"
    shots = _shots(c.shots) if c.shots else "a few shots"
    classes = "base class" if c.protocol in HALVES else "class"
    source = f" of {c.source}" if c.source else ""
    unless = " unless a row names another" if len(recipes) > 1 else ""
    recipe = paper.RECIPE if paper.RECIPE in recipes else recipes[0]
    return f", trained on {shots} of each {classes}{source} by recipe {recipe}{unless}"


def _seeds(study: Study) -> str:
    trained = {row: scores.seeds for row, scores in study.rows.items() if row.recipe != UNTRAINED}
    untrained = len(trained) < len(study.rows)
    alone = " What is not trained is evaluated once and serves for all seeds." if untrained else ""
    if not trained:
        return alone.strip()
    usual = max(trained.values(), key=len)
    others = [f"{row.label}: {_listed(seeds)}" for row, seeds in trained.items() if seeds != usual]
    unless = f" ({'; '.join(others)})" if others else ""
    if len(usual) == 1:
        return f"Numbers are those of seed {_listed(usual)}{unless}, with no spread over seeds.{alone}"
    means = f"Numbers are means over seeds {_listed(usual)}{unless}"
    return f"{means} ± the standard deviation over seeds (population).{alone}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
