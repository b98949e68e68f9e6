"""Using adapters, and what there is to know of them and of methods: `perlclip predict | eval | inspect | methods`."""

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import (
    FOLDER,
    POSITIVE,
    backbone_options,
    compile_option,
    console,
    data_option,
    image_paths,
    name_list,
    steps_options,
    table_of,
    workers_option,
)
from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.inference.classifier import Prediction

    Writer = Callable[[Path, Prediction], None]


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--top-k", type=POSITIVE, default=1, show_default=True, help="Labels for each image.")
@click.option("--json", "form", flag_value="json", help="One JSON object a line.")
@click.option("--csv", "form", flag_value="csv", help="CSV: image,rank,label,probability, and steps if asked for.")
@click.option("--class-names", type=FOLDER, help="Other classes than the adapter's: a name a line, or a JSON list.")
@click.option("--template", help="Another prompt than the adapter's.")
@click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives.")
@click.option("--batch-size", type=POSITIVE, default=32, show_default=True)
@steps_options
@click.option("--max-ms", type=float, metavar="X", help="Milliseconds for a batch; its base pass is always made.")
@backbone_options
@compile_option
@workers_option
def predict(
    adapter: Path, images: tuple[str, ...], top_k: int, form: str | None, class_names: Path | None,
    template: str | None, backbone: str | None, batch_size: int, device: str, dtype: str, compile: str,
    workers: int, **thinking: Any,
) -> None:  # fmt: skip
    """Label IMAGES: files, folders, or globs in quotes."""
    from perlclip.progress import progress_bar

    paths = image_paths(images)
    names = name_list(class_names)
    classifier = perlclip.Classifier.from_pretrained(
        adapter, class_names=names, template=template, backbone=backbone, device=device, dtype=dtype,
        compile=compile,
    )  # fmt: skip
    write = _WRITERS[form](any(value is not None for value in thinking.values()))
    with progress_bar("predict", len(paths), show=not sys.stdout.isatty()) as bar:
        predictions = classifier.predict_iter(paths, top_k=top_k, batch_size=batch_size, workers=workers, **thinking)
        for path, prediction in zip(paths, predictions, strict=True):
            write(path, prediction)
            bar()


def _write_text(with_steps: bool) -> "Writer":
    def write(path: Path, found: "Prediction") -> None:
        words = [f"{label}\t{p:.4f}" for label, p in found.top]
        click.echo("\t".join([str(path), *words, *([f"steps={found.steps}"] if with_steps else [])]))

    return write


def _write_json(with_steps: bool) -> "Writer":
    def write(path: Path, found: "Prediction") -> None:
        labels = [{"label": label, "probability": p} for label, p in found.top]
        steps = {"steps": found.steps} if with_steps else {}
        click.echo(json.dumps({"image": str(path), **labels[0], **steps, "top": labels}, ensure_ascii=False))

    return write


def _write_csv(with_steps: bool) -> "Writer":
    writer: Any = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "rank", "label", "probability", *(["steps"] if with_steps else [])])

    def write(path: Path, found: "Prediction") -> None:
        steps = [found.steps] if with_steps else []
        for rank, (label, p) in enumerate(found.top, start=1):
            writer.writerow([path, rank, label, f"{p:.6f}", *steps])

    return write


_WRITERS: dict[str | None, Callable[[bool], "Writer"]] = {None: _write_text, "json": _write_json, "csv": _write_csv}


@click.command("eval")
@click.argument("adapter", type=FOLDER)
@click.argument("data")
@click.option("--split", help="train, val or test, where DATA is split; test if not given.")
@click.option(
    "--class-names", type=FOLDER, help="Names for DATA's folders, as in fit; they replace the adapter's classes."
)
@click.option("--template", help="Another prompt than the adapter's.")
@click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives.")
@click.option("--batch-size", type=POSITIVE, default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The metrics as one JSON object.")
@steps_options
@data_option
@backbone_options
@compile_option
@workers_option
def eval_(
    adapter: Path, data: str, split: str | None, class_names: Path | None, template: str | None,
    backbone: str | None, batch_size: int, as_json: bool, device: str, dtype: str, compile: str, workers: int,
    steps: Any, max_mean_steps: float | None, root: Path | None,
) -> None:  # fmt: skip
    """Accuracy of ADAPTER on the labelled images of DATA: all that `fit` takes, of a split source the test images."""
    from perlclip.data import images_to_test, read_class_names
    from perlclip.text.classes import Classes

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    names = read_class_names(class_names) if class_names else None
    trained = Classes(loaded.class_names, loaded.template)
    images = images_to_test(data, trained, split=split, class_names=names, template=template, data=root)
    result = perlclip.evaluate(
        loaded, images, batch_size=batch_size, workers=workers, steps=steps, max_mean_steps=max_mean_steps,
        compile=compile,
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(result.metrics(), ensure_ascii=False))
    else:
        _print_evaluation(result.metrics())


def _print_evaluation(metrics: dict[str, Any]) -> None:
    table = table_of("class", "accuracy %")
    for name, accuracy in metrics["class_accuracy"].items():
        table.add_row(name, f"{accuracy:.1f}")
    console().print(table)
    steps = metrics["step_accuracy"]
    if len(steps) > 1:
        click.echo("by step k = 0, 1, …: " + "  ".join(f"{accuracy:.1f}" for accuracy in steps))
    if "mean_steps" in metrics:
        click.echo(f"{metrics['mean_steps']:.2f} refinement steps per image")
    click.echo(f"accuracy {metrics['accuracy']:.2f} % on {metrics['images']} images")


@click.command()
@click.argument("pattern", default="*")
@click.option("--backbone", help="Count the parameters on this backbone instead of on ViT-B/16.")
def methods(pattern: str, backbone: str | None) -> None:
    """The methods there are, with their trained parameters."""
    from perlclip.backbone.clip import vit_b16_shape

    loaded = perlclip.load_backbone(backbone) if backbone else vit_b16_shape()
    table = table_of("method", "published", f"parameters on {loaded.name}", "trains", "where", "recipes")
    for name in perlclip.list_methods(pattern):
        cls = perlclip.method_class(name)
        recipes = ", ".join(cls.recipes) or "–"
        try:
            count = f"{cls(loaded, cls.config_class()).num_trainable:,}"
        except PerlclipError:  # defaults made for twelve blocks
            count = "– (too few blocks)"
        table.add_row(name, cls.venue, count, cls.summary, cls.where, recipes)
    console().print(table)


@click.command()
@click.argument("adapter", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="The whole adapter_config.json.")
def inspect(adapter: Path, as_json: bool) -> None:
    """What an ADAPTER is, without loading its backbone."""
    from perlclip.adapters.card import flat
    from perlclip.adapters.folder import read_info

    info = read_info(adapter)
    if as_json:
        click.echo(json.dumps(info, indent=2, ensure_ascii=False))
        return
    table = table_of("what", "value")
    for key, value in flat(info):
        table.add_row(key, value)
    console().print(table)
