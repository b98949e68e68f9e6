"""Comparing methods: `perlclip bench | data | report | demo`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import BACKBONE, FOLDER, POSITIVE, SEED, method_settings, options
from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.bench.machines import Machines
    from perlclip.bench.store import Run, Store


class _NumberLists(click.Command):
    """A command where `--seeds 1 2 3` is `--seeds 1,2,3`: numbers after the option's value belong to it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            if words[-2:-1] in (["--seeds"], ["--shots"]) and word.replace(",", "").isdigit():
                words[-1] += f",{word}"
            else:
                words.append(word)
        return super().parse_args(ctx, words)


def _names(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[str]:
    """`a,b` and repeated options as one list; `all` as an empty one."""
    words = [word.strip() for value in values for word in value.split(",")]
    if not all(words):
        raise click.BadParameter("a name is empty", ctx, param)
    return [] if "all" in words else words


def _numbers(kind: click.IntRange) -> Any:
    """`1,2,3` and repeated options as one list."""

    def parse(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> list[int]:
        return [kind(word, param, ctx) for word in _names(ctx, param, values)]

    return parse


@click.command(cls=_NumberLists)
@click.argument("protocol")
@click.option(
    "--out", type=FOLDER, default=Path("perlclip-bench"),
    help="Folder for runs and tables; what is complete there is kept.",
)  # fmt: skip
@click.option(
    "--suite", default="toybox",
    help="toybox, drawn on the spot, coop, the real sets, or a file that describes your own.",
)  # fmt: skip
@click.option("--methods", multiple=True, default=["all"], callback=_names, help="a,b,c or repeated.")
@click.option("--datasets", multiple=True, default=["all"], callback=_names, help="a,b,c or repeated.")
@click.option("--seeds", multiple=True, default=["1,2,3"], callback=_numbers(SEED), help="1,2,3 or 1 2 3 or repeated.")
@click.option(
    "--recipe", default="fast",
    help="fast, or original: the authors' own for the protocol (PERL keeps fast); see `perlclip methods`.",
)  # fmt: skip
@click.option(
    "--shots", multiple=True, callback=_numbers(POSITIVE),
    help="Training images of each class: 16, or for few-shot 1 2 4 8 16, if not given.",
)  # fmt: skip
@click.option(
    "--backbone", default="", show_default=False,
    help=f"The suite's if not given: tiny for toybox, {BACKBONE} for coop.",
)  # fmt: skip
@click.option(
    "--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting, for those of the methods that have it."
)
@click.option("--head", is_flag=True, help="With a head for the classes trained on: rows of their own, `+ head`.")
@click.option("--lens", is_flag=True, help="With the lens that the shots want: rows of their own, `+ lens`.")
@click.option("--dry-run", is_flag=True, help="Only list the runs that would be done, with an estimate of time.")
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="ROOT",
    help="Folder that holds the data sets' folders, for --suite coop.",
)  # fmt: skip
@click.option("--jobs", type=POSITIVE, help="Runs at a time, in processes; if not given, one a GPU, or one.")
@click.option(
    "--cache-gib", type=click.FloatRange(min=0), default=2.0,
    help="Of each process, for what tests of the same images have in common.",
)  # fmt: skip
@click.option("--executor", default="local", help="local (processes) or ray (a cluster).")
@click.option(
    "--address", default="", show_default=False, help="With ray: an existing cluster; else one for --jobs is started."
)
@click.option(
    "--gpus-per-run", type=click.FloatRange(0, 1), metavar="SHARE",
    help="With ray: 0.25 lets four runs share a GPU; if not given, one GPU each where there are any.",
)  # fmt: skip
@options("device", "dtype", "workers")
def bench(
    out: Path, methods: list[str], pairs: tuple[str, ...], dry_run: bool, executor: str, jobs: int | None, device: str,
    data: Path | None, workers: int, cache_gib: float, address: str,
    gpus_per_run: float | None, **grid: Any,
) -> None:  # fmt: skip
    """Run PROTOCOL for several methods, data sets and seeds. The same command again goes on.

    PROTOCOL is base-to-novel, cross-dataset, domain-shift, or all, these three; few-shot; generalised, which is
    base-to-novel with all classes to choose from; or for PERL ablation-modality, -depth (of the vision tower, as in
    the paper), -depth-both, -steps, -variant, -anchor or -rank, which vary one setting under base-to-novel.
    """
    from perlclip.bench.machines import Machines, cuda_cards
    from perlclip.bench.protocols import ABLATED, ABLATIONS, Benchmark
    from perlclip.bench.schedule import run_all
    from perlclip.bench.store import Store
    from perlclip.methods.registry import plugins

    machines = Machines(
        executor=executor, jobs=jobs or max(1, cuda_cards(device)), device=device, data=data, workers=workers,
        cache_bytes=int(cache_gib * 2**30), plugins=plugins(), suites=(grid["suite"],), address=address,
        gpus_per_run=gpus_per_run,
    )  # fmt: skip
    machines.load()
    usual = [ABLATED] if grid["protocol"] in ABLATIONS else perlclip.list_methods()
    runs = Benchmark(methods=methods, settings=method_settings(methods or usual, pairs), **grid).runs()
    store = Store(out / "runs")
    if dry_run:
        _print_plan(runs, store, machines)
        return
    records = run_all(runs, store, machines)
    if any(record["status"] == "complete" for record in records):
        _write_report([store.folder], out)
    failed = [record for record in records if record["status"] == "failed"]
    if failed:
        raise PerlclipError(f"{len(failed)} of {len(records)} runs failed, the first with: {failed[0]['error']}")


def _print_plan(runs: "Sequence[Run]", store: "Store", machines: "Machines") -> None:
    from perlclip.bench.schedule import complete, estimate
    from perlclip.data.suites import suite

    lookup, stored = machines.lookup(store), store.records()
    done = complete(runs, lookup, weights=False)
    todo = [run for run in runs if run not in done]
    for run in todo:
        click.echo(run.name)
    if done:
        unknown = machines.data is None and any(suite(run.suite).on_disk for run in done)
        click.echo(f"not compared: the backbone's weights{' and, without --data, the data' if unknown else ''}")
    seconds = estimate(todo, stored.complete, machines.jobs)
    time = "an unknown time" if seconds is None else f"about {seconds / 60:.1f} min"
    click.echo(f"{len(runs)} runs: {len(done)} complete, {len(todo)} to do, {time} with --jobs {machines.jobs}")
    if stored.failed or stored.damaged:
        click.echo(f"in the store: {len(stored.failed)} failed and {len(stored.damaged)} damaged records", err=True)


@click.group()
def data() -> None:
    """The fifteen data sets of CoOp's protocol, in CoOp's folders: see docs/data.md."""


@data.command()
@click.argument("root", type=FOLDER)
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_context
def check(ctx: click.Context, root: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Look for every file of the data sets NAMES below ROOT; exit code 1 if one is incomplete.

    Without NAMES all fifteen are looked for, and one that is wholly absent is no failure.
    """
    from dataclasses import asdict

    from perlclip.data import check_dataset, dataset_names

    failed = False
    for name in names or dataset_names():
        report = check_dataset(name, root)
        click.echo(json.dumps(asdict(report), ensure_ascii=False) if as_json else str(report))
        failed |= report.status == "incomplete" or (bool(names) and report.status == "absent")
    ctx.exit(1 if failed else 0)


@data.command()
@click.argument("name")
@click.option("--data", "root", type=FOLDER, required=True, help="Folder that holds the data sets' folders.")
@click.option("--shots", type=POSITIVE, default=16, help="Training images of each class.")
@click.option("--seed", type=SEED, default=1, help="CoOp's are 1, 2 and 3.")
@click.option("--out", type=FOLDER, required=True, help="JSON file to write.")
def sample(name: str, root: Path, shots: int, seed: int, out: Path) -> None:
    """Write the few-shot lists of data set NAME, CoOp's to the file, for others to use with `load_shots`."""
    from perlclip.data import shots_json
    from perlclip.files import write_files

    content = shots_json(name, root, shots, seed)
    if out.exists() and not (out.is_file() and out.read_bytes() == content):
        raise PerlclipError(f"{out} already exists and holds something else")
    write_files({out: content})
    lists = json.loads(content)
    click.echo(f"{out}: {len(lists['train'])} train and {len(lists['val'])} val images, sha256 {lists['sha256']}")


@click.command()
@click.argument("runs", type=FOLDER, nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for report.md, index.html, tables and figures.")
@click.option(
    "--analysis", type=FOLDER, multiple=True, metavar="DIR",
    help="Folder of `perlclip analyze STORE`, for a section on PERL's steps; may be repeated.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path, analysis: tuple[Path, ...]) -> None:
    """Tables and figures of all RUNS (folders of `perlclip bench`), beside the paper's numbers."""
    _write_report(runs, out, analysis)


def _write_report(runs: Sequence[Path], out: Path, analysis: Sequence[Path] = ()) -> None:
    from perlclip.report.write import write_report

    click.echo(write_report(runs, out, analysis=analysis).summary)
    click.echo(f"report: {out / 'report.md'}   page: {out / 'index.html'}   tables: {out / 'tables'}")


@click.command()
@click.option("--full", is_flag=True, help="All eleven base-to-novel sets instead of three.")
@click.option("--task", "tasks", multiple=True, help="A toybox set to run; may be given several times.")
@click.option("--seed", "seeds", multiple=True, type=SEED, default=[1], help="May be repeated.")
@click.option("--modalities", multiple=True, type=click.Choice(["both", "vision", "text"]), default=["both"])
@click.option("--recipe", default="strong", help="fast (the paper's) or strong.")
@click.option("--out", type=FOLDER, default=Path("perlclip-demo"), help="Folder for runs and figure.")
def demo(
    full: bool, tasks: tuple[str, ...], seeds: tuple[int, ...], modalities: tuple[str, ...], recipe: str, out: Path
) -> None:
    """Zero-shot CLIP against PERL on drawn data with the embedded backbone; offline, in a few minutes."""
    from perlclip.cli import demonstration

    chosen = tasks or (demonstration.ALL_TASKS if full else demonstration.THREE_TASKS)
    demonstration.run_demo(chosen, out, seeds=seeds, modalities=modalities, recipe=recipe)
