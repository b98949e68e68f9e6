"""Everything that the documents show of the toybox, from one store: runs, analyses, report, figures, tables.

    python -m scripts.results --jobs 16 --device cuda    # 2,500 runs: half an hour on one H200, a night on 8 cores
    python -m scripts.results --stages tables            # only the documents, from the results that are committed

Stopped at any moment, the same command goes on: runs and chunks of analyses that are complete stay. `--datasets
tiny_toys --seeds 1 --docs /tmp/try` is a slice that leaves the repository alone. The stages, in their order:

    runs        all methods under the three protocols, PERL's other recipes, its ablations, by `fast` and `extended`
    dynamics    PERL's steps, averaged over each setting
    report      tables and figures of all that
    adaptive    accuracy against refinement passes (docs/adaptive.md; its times are of the machine at hand)
    depth       three sets in depth (docs/analysis.md)
    demo        the README's first picture
    tables      the tables in the documents (`scripts/documents.py`)
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import perlclip
from perlclip.analysis import analyze, analyze_store
from perlclip.bench.machines import Machines
from perlclip.bench.protocols import ABLATIONS, Benchmark
from perlclip.bench.schedule import run_all
from perlclip.bench.store import Record, Run, Store
from perlclip.cli.demonstration import THREE_TASKS, draw_figure
from perlclip.data import load_images
from perlclip.errors import PerlclipError
from perlclip.files import write_files
from perlclip.report.write import write_report
from scripts.documents import write_tables

ROOT = Path(__file__).parent.parent
RECIPE = "extended"  # of PERL, in what looks at its steps: by `fast` it hardly moves on drawn pictures
IMAGES = 60  # of each test set, for the dynamics
KEPT = ("analysis.json", "curves.csv", "curves.png", "drift.csv", "drift.png")  # of an analysis in depth

ZERO_SHOT = Benchmark(protocol="base-to-novel", methods=["zero-shot"])
STRONG = replace(ZERO_SHOT, methods=["perl"], recipe="strong")  # as `fit` trains PERL
GRIDS = (
    Benchmark(protocol="all"),
    Benchmark(protocol="all", methods=["perl"], recipe=RECIPE),
    STRONG,
    *(
        Benchmark(protocol=name, recipe=recipe)
        for recipe in ("fast", RECIPE)
        for name in ABLATIONS
        if name != "ablation-depth-both"  # the paper's moves the vision tower alone
    ),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is made, and where."""

    out: Path  # runs and chunks
    docs: Path  # what is committed of it
    machines: Machines
    seeds: tuple[int, ...]
    datasets: tuple[str, ...]  # none: all

    @property
    def store(self) -> Store:
        """Of the runs."""
        return Store(self.out / "runs")

    def runs(self) -> list[Run]:
        """All of them, each once."""
        grids = [replace(grid, seeds=self.seeds, datasets=self.datasets) for grid in GRIDS]
        if self.datasets:  # transfer is from the source alone
            grids = [replace(grid, protocol="base-to-novel") if grid.protocol == "all" else grid for grid in grids]
        return list(dict.fromkeys(run for grid in grids for run in grid.runs()))

    def complete(self, grid: Benchmark) -> Iterator[Record]:
        """The complete runs of one of the grids, in the order of the suite."""
        for run in replace(grid, seeds=self.seeds, datasets=self.datasets).runs():
            record = self.store.find(run, {})
            if record is None:
                raise PerlclipError(f"run {run.name} is not complete: the stage `runs` comes first")
            yield record


def runs(job: Job) -> None:
    """Do what is not complete yet; a run that fails is named, and the rest is done all the same."""
    records = run_all(job.runs(), job.store, job.machines)
    for record in records:
        if record["status"] == "failed":
            print(f"failed: {record['run']}: {record['error']}", file=sys.stderr)


def dynamics(job: Job) -> None:
    """PERL's steps by setting."""
    analyze_store(job.store.folder, job.out / "dynamics", images=IMAGES, recipe=RECIPE, device=job.machines.device)


def report(job: Job) -> None:
    """Of the whole store."""
    write_report([job.store.folder], job.docs / "toybox" / "bench", analysis=[job.out / "dynamics"])


def adaptive(job: Job) -> None:
    """Each image as many steps as it needs."""
    words = [job.store.folder, "--recipe", RECIPE, "--out", job.docs / "adaptive", "--seeds", *job.seeds]
    subprocess.run([sys.executable, "-m", "benchmarks.adaptive", *map(str, words)], check=True, cwd=ROOT)


def depth(job: Job) -> None:
    """Three sets, both halves; maps also by occlusion, and how well maps find the object."""
    for task in [task for task in THREE_TASKS if task in (job.datasets or THREE_TASKS)]:
        (run,) = replace(GRIDS[1], protocol="base-to-novel", seeds=job.seeds[:1], datasets=[task]).runs()
        adapter = perlclip.load_adapter(job.store.home(run), device=job.machines.device)
        for half, how in (("base", "gradient"), ("novel", "gradient"), ("base", "occlusion")):
            images = load_images(f"toybox:{task}/{half}", split="test")
            folder = job.out / "depth" / f"{task}-{half}-{how}"
            analyze(adapter, images, folder, how=how)
            kept = {job.docs / "analysis" / f"{task}-{half}" / name: folder / name for name in KEPT}
            if how == "occlusion":
                kept = {job.docs / "analysis" / "occlusion" / f"{task}-{half}.json": folder / "analysis.json"}
            elif (task, half) == (THREE_TASKS[0], "base"):
                grid = "cases-wrong-to-correct.png"
                kept[job.docs / "analysis" / f"{task}-{half}" / grid] = folder / grid
            write_files({there: here.read_bytes() for there, here in kept.items() if here.exists()})
        if task == THREE_TASKS[0]:
            words = [sys.executable, "-m", "scripts.evidence_on_object", str(job.store.home(run))]
            found = subprocess.run(words, check=True, cwd=ROOT, capture_output=True).stdout
            write_files({job.docs / "analysis" / "evidence-on-object.csv": found})


def demo(job: Job) -> None:
    """Accuracy by step of every set, and images that were put right."""
    clip = {str(record["run"]["dataset"]): record for record in job.complete(ZERO_SHOT)}
    write_files({job.docs / "toybox" / "demo.png": draw_figure(list(job.complete(STRONG)), clip).png})


def tables(job: Job) -> None:
    """In the documents, if it is theirs that were made."""
    if job.docs == ROOT / "docs" / "results":
        print(*write_tables(), sep="\n")


STAGES: dict[str, Callable[[Job], None]] = {
    "runs": runs, "dynamics": dynamics, "report": report, "adaptive": adaptive, "depth": depth, "demo": demo,
    "tables": tables,
}  # fmt: skip


def main() -> None:
    """All stages, or some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "results", help="store and chunks; git ignores it")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "results", help="what is committed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--datasets", nargs="+", default=[])
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    given = parser.parse_args()
    job = Job(
        out=given.out.resolve(), docs=given.docs.resolve(), seeds=tuple(given.seeds), datasets=tuple(given.datasets),
        machines=Machines(jobs=given.jobs, device=given.device),
    )  # fmt: skip
    try:
        for name, stage in STAGES.items():
            if name in given.stages:
                print(f"== {name}", flush=True)
                stage(job)
    except PerlclipError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
