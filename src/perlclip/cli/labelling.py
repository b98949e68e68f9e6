"""Labels before they are trained on: `perlclip check | suggest`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import (
    BACKBONE,
    CLASS_LIST,
    CLASS_NAMES,
    FOLDER,
    ON_ERROR,
    POSITIVE,
    check_ending,
    fail_for,
    image_paths,
    options,
    print_table,
)

if TYPE_CHECKING:
    from perlclip.adapters.folder import Adapter
    from perlclip.data import Unreadable
    from perlclip.labels.checking import LabelCheck
    from perlclip.methods import Method

ROWS = 20  # of each kind, on the screen


@click.command()
@click.argument("data")
@click.option("--adapter", type=FOLDER, help="An adapter whose texts know the classes; zero-shot CLIP if not given.")
@click.option("--backbone", help=f"Hub name, Hugging Face folder, or 'tiny'; the adapter's, or {BACKBONE}.")
@click.option("--class-names", type=CLASS_NAMES, help="Names for DATA's folders, as in fit.")
@click.option("--template", help="Prompt, as in fit; the adapter's if there is one.")
@click.option("--out", type=FOLDER, metavar="FILE", help="Write all that was found to FILE.csv, .jsonl or .parquet.")
@click.option("--page", type=FOLDER, metavar="FILE", help="A page with the suspects to look at: FILE.html.")
@click.option("--json", "as_json", is_flag=True, help="All that was found as one JSON object.")
@click.option("--batch-size", type=POSITIVE, default=64)
@ON_ERROR
@options("data", "device", "dtype", "workers")
def check(
    data: str, adapter: Path | None, backbone: str | None, class_names: Any, template: str | None, out: Path | None,
    page: Path | None, as_json: bool, root: Path | None, device: str, dtype: str, **how: Any,
) -> None:  # fmt: skip
    """Labels of DATA that are probably wrong, images that are there twice, and images of no class.

    DATA is what `fit` takes; all of its splits are looked at, and nothing is changed. What is found is for you to look
    at: the exit code is 0 either way.
    """
    from perlclip.inference.row_files import check_row_file
    from perlclip.labels.checking import labelled_splits

    if out:
        check_row_file(out)
    check_ending(page, ".html")
    skipped: list[Unreadable] | None = [] if how["on_error"] == "skip" else None
    trained: Adapter | Method
    if adapter:
        trained = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
        template = template or trained.template
    images = labelled_splits(data, class_names=class_names, template=template, data=root, skipped=skipped)
    if not adapter:
        trained = _zero_shot(backbone, device, dtype)
    found = perlclip.check(trained, images, **how)
    unreadable = (*(skipped or ()), *found.skipped)
    if as_json:
        summary = {"images": len(found.images), "noise": found.noise, "accuracy": found.accuracy}
        lists = {"found": list(found.rows()), "skipped": [asdict(one) for one in unreadable]}
        click.echo(json.dumps(summary | lists, ensure_ascii=False))
    else:
        _show(found)
    if out:
        click.echo(f"written: {found.save(out)}", err=as_json)
    if page:
        from perlclip.files import write_files
        from perlclip.viz.suspects import suspects_page

        write_files({page: suspects_page(found, title=f"Labels of {data}").encode()})
        click.echo(f"written: {page}", err=as_json)
    fail_for(unreadable, len(found.images) + len(unreadable))


def _zero_shot(backbone: str | None, device: str, dtype: str) -> "Method":
    return perlclip.create_method("zero-shot", perlclip.load_backbone(backbone or BACKBONE, device=device, dtype=dtype))


def _show(found: "LabelCheck") -> None:
    rows = list(found.rows())

    def some(kind: str, *names: str) -> list[list[str]]:
        return [[str(row[name]) for name in names] for row in rows if row["kind"] == kind][:ROWS]

    if found.wrong:
        print_table(("image", "label", "rather", "wrong with"), some("label", "image", "label", "likely", "score"))
    if found.duplicates:
        columns = ("group", "image", "split", "label")
        print_table(("the same", *columns[1:]), some("duplicate", *columns))
    if found.outliers:
        print_table(("of no class", "label", "deviations"), some("outlier", "image", "label", "score"))
    click.echo(found)


@click.command()
@click.argument("adapter", type=FOLDER, metavar="ADAPTER|CLASSES")
@click.argument("images", nargs=-1, required=True)
@click.option("--count", type=POSITIVE, default=20, help="Images to suggest.")
@click.option("--labelled", metavar="DATA", help="Images that have a label already, as for `fit`: to learn from.")
@click.option("--backbone", help=f"Hub name, Hugging Face folder, or 'tiny'; the adapter's, or {BACKBONE}.")
@click.option("--template", help="Another prompt than the adapter's.")
@click.option("--out", type=FOLDER, metavar="FILE", help="Write to FILE.csv, .jsonl or .parquet.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--batch-size", type=POSITIVE, default=64)
@ON_ERROR
@options("data", "device", "dtype", "workers")
def suggest(
    adapter: Path, images: tuple[str, ...], labelled: str | None, backbone: str | None, template: str | None,
    out: Path | None, as_json: bool, root: Path | None, device: str, dtype: str, **how: Any,
) -> None:  # fmt: skip
    """Which of IMAGES to label next: files, folders, globs in quotes, or - for a path on each line of stdin.

    ADAPTER is what answers so far; before there is one, CLASSES is a file with a class name a line (or a JSON list).
    """
    from perlclip.inference.row_files import check_row_file, row_file
    from perlclip.labels.suggestions import COLUMNS

    if out:
        check_row_file(out)
    paths = image_paths(images)
    trained: Adapter | Method
    class_names = None
    if adapter.is_file():
        class_names = CLASS_LIST.convert(adapter, None, None)
        trained = _zero_shot(backbone, device, dtype)
    else:
        trained = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    known = perlclip.load_images(labelled, data=root) if labelled else None
    found = perlclip.suggest(trained, paths, class_names=class_names, template=template, labelled=known, **how)
    rows = [one.row() for one in found.chosen]
    if out:
        with row_file(out, COLUMNS) as write:
            for row in rows:
                write(row)
        click.echo(f"{len(rows)} of {found.images:,} images to label: {out}", err=as_json)
    if as_json:
        for row in rows:
            click.echo(json.dumps(row, ensure_ascii=False))
    elif not out:
        print_table(("image", "taken for", "probability", "new"), (
            (row["image"], row["answer"], f"{row['probability']:.2f}", f"{row['new']:.2f}") for row in rows
        ))  # fmt: skip
    fail_for(found.skipped, len(paths))
