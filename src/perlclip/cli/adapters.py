"""Using adapters, and what there is to know of them and of methods: `perlclip predict | eval | inspect | methods`."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import CLASS_NAMES, FOLDER, POSITIVE, image_paths, options, print_table
from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.inference.classifier import Prediction


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--top-k", type=POSITIVE, default=1, help="Labels for each image.")
@click.option("--json", "form", flag_value="json", help="One JSON object a line.")
@click.option("--csv", "form", flag_value="csv", help="CSV: image,rank,label,probability, and steps if asked for.")
@options("class-names", "template", "backbone")
@click.option("--batch-size", type=POSITIVE, default=32)
@options("steps", "max-mean-steps", "head")
@click.option("--max-ms", type=float, metavar="X", help="Milliseconds for a batch; its base pass is always made.")
@options("device", "dtype", "compile", "workers")
def predict(
    adapter: Path, images: tuple[str, ...], top_k: int, form: str | None, batch_size: int, workers: int,
    steps: Any, max_mean_steps: float | None, max_ms: float | None, **loading: Any,
) -> None:  # fmt: skip
    """Label IMAGES: files, folders, globs in quotes, or - for a path on each line of stdin."""
    from perlclip.progress import progress_bar

    paths = image_paths(images)
    classifier = perlclip.Classifier.from_pretrained(adapter, **loading)
    with_steps = any(limit is not None for limit in (steps, max_mean_steps, max_ms))
    if form == "csv":
        click.echo("image,rank,label,probability" + ",steps" * with_steps)
    with progress_bar("predict", len(paths), show=not sys.stdout.isatty()) as bar:
        predictions = classifier.predict_iter(
            paths, top_k=top_k, batch_size=batch_size, workers=workers, steps=steps, max_mean_steps=max_mean_steps,
            max_ms=max_ms,
        )  # fmt: skip
        for path, prediction in zip(paths, predictions, strict=True):
            _write(path, prediction, form, with_steps)
            bar()


def _write(path: Path, found: "Prediction", form: str | None, with_steps: bool) -> None:
    steps = {"steps": found.steps} if with_steps else {}
    if form == "csv":
        ranked = enumerate(found.top, start=1)
        rows = ([path, rank, label, f"{p:.6f}", *steps.values()] for rank, (label, p) in ranked)
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    elif form == "json":
        labels = [{"label": label, "probability": p} for label, p in found.top]
        click.echo(json.dumps({"image": str(path), **labels[0], **steps, "top": labels}, ensure_ascii=False))
    else:
        words = [f"{label}\t{p:.4f}" for label, p in found.top]
        click.echo("\t".join([str(path), *words, *(f"steps={taken}" for taken in steps.values())]))


@click.command("eval")
@click.argument("adapter", type=FOLDER)
@click.argument("data")
@click.option("--split", help="train, val or test, where DATA is split; test if not given.")
@click.option(
    "--class-names", type=CLASS_NAMES, help="Names for DATA's folders, as in fit; they replace the adapter's classes."
)
@options("template", "backbone")
@click.option("--batch-size", type=POSITIVE, default=64)
@click.option("--json", "as_json", is_flag=True, help="The metrics as one JSON object.")
@options("steps", "max-mean-steps", "head", "data", "device", "dtype", "compile", "workers")
def eval_(
    adapter: Path, data: str, split: str | None, class_names: Any, template: str | None, root: Path | None,
    backbone: str | None, device: str, dtype: str, as_json: bool, **how: Any,
) -> None:  # fmt: skip
    """Accuracy of ADAPTER on the labelled images of DATA: all that `fit` takes, of a split source the test images."""
    from perlclip.data import images_to_test
    from perlclip.text.classes import Classes

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    trained = Classes(loaded.class_names, loaded.template)
    images = images_to_test(data, trained, split=split, class_names=class_names, template=template, data=root)
    metrics = perlclip.evaluate(loaded, images, **how).metrics()
    if as_json:
        click.echo(json.dumps(metrics, ensure_ascii=False))
        return
    print_table(("class", "accuracy %"), ((name, f"{value:.1f}") for name, value in metrics["class_accuracy"].items()))
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
    rows = []
    for name in perlclip.list_methods(pattern):
        cls = perlclip.method_class(name)
        try:
            count = f"{cls(loaded, cls.config_class()).num_trainable:,}"
        except PerlclipError:  # defaults made for twelve blocks
            count = "– (too few blocks)"
        rows.append((name, cls.venue, count, cls.summary, cls.where, ", ".join(cls.recipes) or "–"))
    print_table(("method", "published", f"parameters on {loaded.name}", "trains", "where", "recipes"), rows)


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
    else:
        print_table(("what", "value"), flat(info))
