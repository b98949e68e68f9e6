"""Seeing PERL think: `perlclip explain | analyze`."""

from pathlib import Path
from typing import Any

import click

import perlclip
from perlclip.cli.common import CLASS_NAMES, FOLDER, NATURAL, POSITIVE, image_paths, options
from perlclip.errors import PerlclipError


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for a PNG, an SVG and a JSON file of each image.")
@click.option("--class", "shown", metavar="NAME", help="Map this class instead of the first answer.")
@click.option("--max-images", type=POSITIVE, default=12, help="Of a set of a suite so many, drawn at random.")
@options("data", "class-names", "how", "backbone", "template", "device", "dtype")
def explain(
    adapter: Path, images: tuple[str, ...], out: Path, shown: str | None, max_images: int, root: Path | None,
    class_names: list[str] | None, how: str, template: str | None, backbone: str | None, device: str, dtype: str,
) -> None:  # fmt: skip
    """How a PERL ADAPTER came to its answer on IMAGES: confidence and evidence at every step.

    IMAGES are files, folders and globs, or the test images of a set of a suite: toybox:tiny_toys, coop:eurosat/novel.
    """
    from perlclip.analysis import explain as explain_images

    suite_set = len(images) == 1 and ":" in images[0] and not Path(images[0]).exists()
    paths = [] if suite_set else image_paths(images)
    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    if suite_set:
        from perlclip.analysis.chunks import spread
        from perlclip.data import images_to_test
        from perlclip.text.classes import Classes

        trained = Classes(loaded.class_names, loaded.template)
        found = images_to_test(images[0], trained, class_names=class_names, template=template, data=root)
        cases = explain_images(loaded, spread(found, max_images), out, how=how, shown=shown or "")
        told = [f"{case.name} ({case.label}, {case.transition})" for case in cases]
    else:
        words: dict[str, Any] = {"class_names": class_names, "template": template}
        cases = explain_images(loaded, paths, out, how=how, shown=shown or "", **words)
        told = list(map(str, paths))
    for name, case in zip(told, cases, strict=True):
        click.echo(f"{name}\t" + " → ".join(case.answers))
    click.echo(f"figures: {out}")


@click.command()
@click.argument("adapter", type=FOLDER, metavar="ADAPTER|STORE")
@click.argument("data", required=False)
@click.option(
    "--out", type=FOLDER, required=True, help="Folder for page, figures and tables; it also makes it resumable."
)
@click.option("--max-images", type=POSITIVE, help="So many at most, drawn at random: 1000; of a STORE 200 a test set.")
@click.option("--cases", type=NATURAL, default=6, help="Images of each transition in the gallery.")
@click.option("--split", help="train, val or test, where DATA is split.")
@click.option("--class-names", type=CLASS_NAMES, help="File with names for DATA's classes, as for `perlclip eval`.")
@click.option("--data", "root", type=FOLDER, metavar="ROOT", help="Where the data sets of suite coop are.")
@click.option("--suite", "suites", multiple=True, metavar="FILE", help="Own suite of a STORE's runs; may be repeated.")
@click.option("--recipe", default="", help="Of a STORE only PERL by this recipe, with no setting changed.")
@options("how", "backbone", "template", "device", "dtype", "workers")
def analyze(
    adapter: Path, data: str | None, out: Path, root: Path | None, suites: tuple[str, ...], recipe: str, device: str,
    **options: Any,
) -> None:  # fmt: skip
    """Metrics, drift and evidence by step of a PERL ADAPTER on DATA, or of all PERL runs of a STORE.

    DATA is a folder of class folders, a CSV manifest, or a set of a suite: toybox:tiny_toys, coop:eurosat; /base or
    /novel behind it is half of its classes. A STORE is a folder of `perlclip bench`. Stopped? The same command goes on.
    """
    from perlclip.data.suites import suite

    for file in suites:
        suite(file)
    if data is not None:
        if recipe:
            raise click.UsageError("--recipe is for a STORE: an ADAPTER has its own")
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
    averages = analyze_store(adapter, out, recipe=recipe, device=device, root=root, workers=options["workers"], **limit)
    for setting, found in averages.items():
        click.echo(f"{setting}: accuracy " + " → ".join(f"{value:.1f}" for value in found["accuracy"].mean))
    click.echo(f"page: {out / 'index.html'}   numbers: {out / 'settings.csv'}")


def _analyze_data(
    adapter: Path, data: str, out: Path, root: Path | None, device: str, *, max_images: int | None, cases: int,
    split: str | None, class_names: Any, template: str | None, backbone: str | None, how: str, dtype: str,
    workers: int,
) -> None:  # fmt: skip
    from perlclip.analysis.single import MAX_IMAGES, findings
    from perlclip.analysis.single import analyze as analyze_images
    from perlclip.analysis.trajectories import require_perl
    from perlclip.data import images_to_test
    from perlclip.text.classes import Classes

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    require_perl(loaded.method)
    trained = Classes(loaded.class_names, loaded.template)
    images = images_to_test(data, trained, split=split, class_names=class_names, template=template, data=root)
    limit = max_images or MAX_IMAGES
    done = analyze_images(loaded, images, out, max_images=limit, cases=cases, how=how, workers=workers)
    for sentence in findings(done):
        click.echo(sentence)
    click.echo(f"page: {out / 'index.html'}   numbers: {out / 'analysis.json'}")
