"""The figures of docs/strong.md, from the tables of benchmarks/strong.py, .lenses and .everyone.

python -m benchmarks.strong_figure docs/results/strong
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import perlclip
from benchmarks.strong import CENTERS, ROUNDS, harmonic, means
from perlclip.backbone import PLAIN
from perlclip.data.images import read_image
from perlclip.data.toybox import load_toybox
from perlclip.files import write_files
from perlclip.methods.parts import CENTER
from perlclip.viz.drawing import draw
from perlclip.viz.style import BLUE, GREY, VERMILION, look

# Title, file, and the sets of it, if not all.
SHOTS = (
    ("toybox, eleven sets", "shots-toybox.csv", ()),
    ("EuroSAT", "shots-photographs.csv", ("eurosat",)),
    ("DTD", "shots-photographs.csv", ("dtd",)),
    ("Tiny ImageNet, 80 classes", "shots-photographs.csv", ("tinyimagenet",)),
)
Means = Mapping[tuple[str, str, str], float]
SUITES = {"factors-toybox.csv": "toybox, ten sets", "factors-photographs.csv": "photographs, three sets"}


def hm(found: Means, setting: str, readout: str) -> float:
    """Of base and novel."""
    return harmonic(found[setting, readout, "base"], found[setting, readout, "novel"])


def factors(folder: Path) -> bytes:
    """HM of every setting, after the last step and for the mean of the probabilities; the line is zero-shot CLIP."""

    def paint(figure: Figure) -> None:
        settings = list(ROUNDS["factors"])[::-1]
        for panel, (file, title) in zip(figure.subplots(1, 2, sharey=True), SUITES.items(), strict=True):
            found = means(folder / file)
            for colour, marker, readout, label in (
                (BLUE, "o", "step 4", "last step"),
                (VERMILION, "D", "probabilities", "mean of probabilities"),
            ):
                places = [i for i, setting in enumerate(settings) if (setting, readout, "base") in found]
                values = [hm(found, settings[i], readout) for i in places]
                panel.plot(values, places, marker, color=colour, label=label)
            panel.axvline(hm(found, "centre", "step 0"), color=GREY, lw=1)
            panel.set(title=title, xlabel="HM on validation images, %")
            panel.set_yticks(range(len(settings)), settings)
        panel.legend(loc="lower left")

    return draw("factors", "", (10, 7.2), paint).png


def steps(folder: Path) -> bytes:
    """Base and novel accuracy by step; dashed, the mean of the probabilities of all."""

    def paint(figure: Figure) -> None:
        for row, (file, title) in zip(figure.subplots(2, 2, sharex=True), SUITES.items(), strict=True):
            found = means(folder / file)
            for panel, part in zip(row, ("base", "novel"), strict=True):
                for rank, setting in enumerate(("extended", "centre", "anchor 4", "random steps")):
                    style = look(rank)
                    panel.plot(range(5), [found[setting, f"step {k}", part] for k in range(5)], label=setting, **style)
                    panel.axhline(found[setting, "probabilities", part], color=style["color"], ls="--", lw=1)
                panel.set(title=f"{title}: {part}", ylabel="accuracy, %")
        for panel in row:
            panel.set(xlabel="step", xticks=range(5))
        panel.legend()

    return draw("steps", "", (9, 6.4), paint).png


def center(folder: Path) -> bytes:
    """Base and novel accuracy by the share of the shots' mean that is taken off images."""

    def paint(figure: Figure) -> None:
        for row, suite in zip(figure.subplots(2, 2, sharex=True), ("toybox", "photographs"), strict=True):
            found = means(folder / f"center-{suite}.csv")
            for panel, part in zip(row, ("base", "novel"), strict=True):
                for rank, (label, setting, readout) in enumerate(CENTERED):
                    told = [f"{readout}, center {share:g}" if share else readout for share in CENTERS]
                    panel.plot(CENTERS, [found[setting, name, part] for name in told], label=label, **look(rank))
                panel.axvline(CENTER, color=GREY, lw=1)
                panel.set(title=f"{suite}: {part}", ylabel="accuracy, %")
        for panel in row:
            panel.set(xlabel="share of the shots' mean taken off", xticks=CENTERS)
        figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(CENTERED))

    return draw("center", "", (9, 6.4), paint).png


CENTERED = (
    ("zero-shot CLIP", "strong", "step 0"),
    ("PERL, mean of steps", "strong", "probabilities"),
    ("PERL, last step", "strong", "step 4"),
    ("PERL trained so, mean", "through 0.75", "probabilities"),
)


def shots(folder: Path) -> bytes:
    """Accuracy against the shots of each class, all classes trained on: means over sets, where all were run."""
    files = {name: list(csv.DictReader((folder / name).read_text().splitlines())) for _, name, _ in SHOTS}
    rows = sorted({line["row"] for lines in files.values() for line in lines})

    def paint(figure: Figure) -> None:
        panels, drawn = figure.subplots(1, len(SHOTS)), dict[str, Line2D]()
        for panel, (title, name, some) in zip(panels, SHOTS, strict=True):
            lines = [line for line in files[name] if not some or line["set"] in some]
            found: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(
                lambda: defaultdict(lambda: defaultdict(list))
            )
            for line in lines:
                found[line["row"]][int(line["shots"])][line["set"]].append(float(line["accuracy"]))
            sets = {line["set"] for line in lines}
            counts = sorted({int(line["shots"]) for line in lines} - {0})
            for rank, row in enumerate(rows):  # the same colour in all panels
                by_shots = {n: means_of(by_set) for n, by_set in found[row].items() if by_set.keys() == sets}
                if 0 in by_shots:
                    panel.axhline(by_shots[0], label=row, color=GREY, ls="--", lw=1)
                elif by_shots:
                    panel.plot(sorted(by_shots), [by_shots[n] for n in sorted(by_shots)], label=row, **look(rank))
            panel.set(title=title, xscale="log", xlabel="shots of each class", ylabel="accuracy, %")
            panel.set_xticks(counts, [str(count) for count in counts])
            drawn |= {str(line.get_label()): line for line in panel.get_lines()}
        there = [row for row in rows if row in drawn]
        figure.legend([drawn[row] for row in there], there, loc="outside lower center", ncols=-(-len(there) // 3))

    return draw("shots", "", (16, 4.6), paint).png


EXAMPLES = (("noisy_shapes", "smooth"), ("negative_toys", "negative"), ("cluttered_toys", "near"))


def lenses(folder: Path) -> bytes:
    """Drawn pictures as they are and as a lens shows them, with what zero-shot CLIP and a head make of their sets."""
    backbone = perlclip.load_backbone("tiny")
    lines = list(csv.DictReader((folder / "lenses-toybox.csv").read_text().splitlines()))

    def told(name: str, lens: str) -> str:
        mine = [line for line in lines if (line["set"], line["shots"], line["lens"]) == (name, "16", lens)]
        base, novel = (fmean(float(line[part]) for line in mine) for part in ("base", "novel"))
        return f"{lens}: {base:.0f} / {novel:.0f}"

    def paint(figure: Figure) -> None:
        outer = figure.subfigures(1, len(EXAMPLES))
        for part, (name, lens) in zip(outer, EXAMPLES, strict=True):
            part.suptitle(name, fontsize=10)
            train = load_toybox(name).train
            first = [where[0] for where in train.by_class().values()][:3]
            pixels = torch.stack([backbone.preprocess.test_view(read_image(train.images[i])) for i in first])
            for panels, kind in zip(part.subplots(2, 3), (PLAIN, lens), strict=True):
                for panel, view in zip(panels, backbone.frozen(pixels, kind).shown, strict=True):
                    panel.imshow(backbone.preprocess.picture(view))
                    panel.set_axis_off()
                panels[1].set_title(told(name, kind), fontsize=9)

    return draw("lenses", "", (9, 2.8), paint).png


def means_of(by_set: Mapping[str, list[float]]) -> float:
    """Over the seeds of each set, then over sets."""
    return fmean(fmean(values) for values in by_set.values())


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_files({folder / "factors.png": factors(folder), folder / "steps.png": steps(folder)})
    write_files({folder / "shots.png": shots(folder), folder / "lenses.png": lenses(folder)})
    write_files({folder / "center.png": center(folder)})


if __name__ == "__main__":
    main()
