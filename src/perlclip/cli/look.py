"""Seeing PERL think: `perlclip explain | analyze`."""

from pathlib import Path
from typing import Any

import click

import perlclip
from perlclip.cli.common import (
    FOLDER,
    NATURAL,
    POSITIVE,
    backbone_options,
    image_paths,
    name_list,
    workers_option,
)
from perlclip.errors import PerlclipError


def _look_options(command: Any) -> Any:
    for option in (
        click.option("--template", help="Another prompt than the adapter's."),
        click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives."),
        click.option(
            "--how", type=click.Choice(["gradient", "occlusion"]), default="gradient", show_default=True,
            help="Evidence maps: gradient x activation where thoughts enter, or by hiding patch after patch (slow).",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for a PNG, an SVG and a JSON file of each image.")
@click.option("--class", "shown", default="", metavar="NAME", help="Map this class instead of the first answer.")
@click.option("--class-names", type=FOLDER, help="Other classes than the adapter's: a name a line, or a JSON list.")
@_look_options
@backbone_options
def explain(
    adapter: Path, images: tuple[str, ...], out: Path, shown: str, class_names: Path | None, how: str,
    template: str | None, backbone: str | None, device: str, dtype: str,
) -> None:  # fmt: skip
    """How a PERL ADAPTER came to its answer on IMAGES: confidence and evidence at every step."""
    from perlclip.analysis import explain as explain_images

    paths, names = image_paths(images), name_list(class_names)
    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    cases = explain_images(loaded, paths, out, how=how, shown=shown, class_names=names, template=template)
    for path, case in zip(paths, cases, strict=True):
        click.echo(f"{path}\t" + " → ".join(case.answers))
    click.echo(f"figures: {out}")


@click.command()
@click.argument("adapter", type=FOLDER, metavar="ADAPTER|STORE")
@click.argument("data", required=False)
@click.option(
    "--out", type=FOLDER, required=True, help="Folder for page, figures and tables; it also makes it resumable."
)
@click.option("--max-images", type=POSITIVE, help="So many at most, drawn at random: 1000; of a STORE 200 a test set.")
@click.option("--cases", type=NATURAL, default=6, show_default=True, help="Images of each transition in the gallery.")
@click.option("--split", help="train, val or test, where DATA is split.")
@click.option("--class-names", type=FOLDER, help="File with names for DATA's classes, as for `perlclip eval`.")
@click.option("--data", "root", type=FOLDER, metavar="ROOT", help="Where the data sets of suite coop are.")
@click.option("--suite", "suites", multiple=True, metavar="FILE", help="Own suite of a STORE's runs; may be repeated.")
@_look_options
@backbone_options
@workers_option
def analyze(
    adapter: Path, data: str | None, out: Path, root: Path | None, suites: tuple[str, ...], device: str, **options: Any
) -> None:
    """Metrics, drift and evidence by step of a PERL ADAPTER on DATA, or of all PERL runs of a STORE.

    DATA is a folder of class folders, a CSV manifest, or a set of a suite: toybox:tiny_toys, coop:eurosat; /base or
    /novel behind it is half of its classes. A STORE is a folder of `perlclip bench`. Stopped? The same command goes on.
    """
    from perlclip.data.suites import suite

    for file in suites:
        suite(file)
    if data is not None:
        _analyze_data(adapter, data, out, root, device, **options)
        return
    from perlclip.analysis import analyze_store

    if not adapter.is_dir() or next(adapter.rglob("run.json"), None) is None:
        raise PerlclipError(f"{adapter} is no folder of runs; to analyze an adapter, name DATA as well")
    source = click.get_current_context().get_parameter_source
    for name in set(options) - {"max_images", "workers"}:
        if source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is for an ADAPTER and DATA: a STORE's runs have theirs")
    limit = {"images": options["max_images"]} if options["max_images"] else {}
    averages = analyze_store(adapter, out, device=device, root=root, workers=options["workers"], **limit)
    for setting, found in averages.items():
        click.echo(f"{setting}: accuracy " + " → ".join(f"{value:.1f}" for value in found["accuracy"].mean))
    click.echo(f"page: {out / 'index.html'}   numbers: {out / 'settings.csv'}")


def _analyze_data(
    adapter: Path, data: str, out: Path, root: Path | None, device: str, *, max_images: int | None, cases: int,
    split: str | None, class_names: Path | None, template: str | None, backbone: str | None, how: str, dtype: str,
    workers: int,
) -> None:  # fmt: skip
    from perlclip.analysis.single import MAX_IMAGES, findings
    from perlclip.analysis.single import analyze as analyze_images
    from perlclip.analysis.trajectories import require_perl
    from perlclip.data import images_to_test, read_class_names
    from perlclip.text.classes import Classes

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    require_perl(loaded.method)
    names = read_class_names(class_names) if class_names else None
    images = images_to_test(
        data, Classes(loaded.class_names, loaded.template), split=split, class_names=names, template=template, data=root
    )
    done = analyze_images(
        loaded, images, out, max_images=max_images or MAX_IMAGES, cases=cases, how=how, workers=workers
    )
    for sentence in findings(done):
        click.echo(sentence)
    click.echo(f"page: {out / 'index.html'}   numbers: {out / 'analysis.json'}")
