"""Making adapters: `perlclip fit | calibrate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import (
    BACKBONE,
    FOLDER,
    NATURAL,
    POSITIVE,
    SEED,
    backbone_options,
    compile_option,
    method_settings,
    workers_option,
)
from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.data import ImageSet
    from perlclip.methods.recipes import Recipe

CHECKPOINT = "checkpoint.safetensors"
UNTRAINED_METHOD = "zero-shot"


@click.command()
@click.argument("data", type=FOLDER)
@click.option("--out", type=FOLDER, required=True, help="Folder for the adapter.")
@click.option("--backbone", default=BACKBONE, show_default=True, help="Hub name, Hugging Face folder, or 'tiny'.")
@click.option("--method", default="perl", show_default=True, help="See `perlclip methods`.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the method, e.g. steps=2.")
@click.option(
    "--recipe",
    "recipe_name",
    help="fast (one epoch), original (the authors' own), extended (PERL's default); see `perlclip methods`.",
)
@click.option("--epochs", type=POSITIVE, help="Instead of the recipe's.")
@click.option("--lr", type=float, help="Instead of the recipe's.")
@click.option("--batch-size", type=POSITIVE, help="Instead of the recipe's.")
@click.option("--shots", type=POSITIVE, help="Training images of each class; all of them if not given.")
@click.option(
    "--val", type=NATURAL, default=4, show_default=True, help="Images of each class held out to report accuracy on."
)
@click.option(
    "--seed", type=SEED, default=1, show_default=True, help="Of sampling, initialisation, order and augmentation."
)
@click.option("--class-names", type=FOLDER, help="File: a name a line in sorted folder order, or JSON {folder: name}.")
@click.option("--template", default="a photo of a {}.", show_default=True, help="Prompt; {} is the class name.")
@click.option("--resume", is_flag=True, help="Go on from an interrupted training in --out.")
@click.option("--overwrite", is_flag=True, help="Replace an adapter that is already in --out.")
@backbone_options
@compile_option
@workers_option
def fit(
    data: Path, out: Path, backbone: str, method: str, settings: tuple[str, ...], recipe_name: str | None, seed: int,
    shots: int | None, val: int, class_names: Path | None, template: str, resume: bool, overwrite: bool,
    device: str, precision: str, compile: str, workers: int, **changes: Any,
) -> None:  # fmt: skip
    """Train an adapter on DATA: a folder of class folders, or a CSV manifest with columns path,label."""
    from perlclip.bench.environment import environment
    from perlclip.files import require_writable
    from perlclip.methods.recipes import settings as recipe_settings
    from perlclip.thinking.policy import image_steps

    _check_out(out, resume, overwrite)
    train, held_out = _train_and_val(data, class_names, template, shots, val, seed)
    if method == UNTRAINED_METHOD:
        _keep_zero_shot(train, held_out, out, method_settings(method, settings), backbone, device, precision)
        return
    recipe_name, recipe = _recipe(method, recipe_name, backbone, changes)
    config = recipe_settings(method, recipe_name, backbone) | method_settings(method, settings)
    require_writable(out)
    if not resume:
        (out / CHECKPOINT).unlink(missing_ok=True)
    loaded = perlclip.load_backbone(backbone, device=device, dtype=precision)
    adapted = perlclip.create_method(method, loaded, seed=seed, **config)
    click.echo(
        f"{method}, {adapted.num_trainable:,} parameters, on {backbone}: {len(train)} images of "
        f"{len(train.class_names)} classes, {recipe.epochs} epoch{'s' * (recipe.epochs > 1)}",
        err=True,
    )
    with _resume_hint(out):
        result = perlclip.fit(
            adapted, train, recipe=recipe, seed=seed, precision=precision, checkpoint=out / CHECKPOINT, resume=resume,
            compile=compile, workers=workers,
        )  # fmt: skip
        metrics: dict[str, Any] = {"final_loss": sum(result.losses[-10:]) / len(result.losses[-10:])}
        if len(held_out):
            metrics["validation"] = perlclip.evaluate(adapted, held_out, compile=compile, workers=workers).metrics()
        settings_used = {
            key: value for key, value in result.settings.items() if key not in ("method", "config", "backbone")
        }
        training = {"source": data.name, "shots": shots, "recipe_name": recipe_name, **settings_used}
        training |= {"seconds": round(result.seconds, 2), "environment": environment(loaded.device)}
        adaptive = perlclip.calibrate(adapted, train, seed=seed, workers=workers) if image_steps(adapted) else None
        perlclip.save_adapter(
            adapted, out, class_names=train.class_names, templates=template, training=training, metrics=metrics,
            adaptive=adaptive,
        )  # fmt: skip
        (out / CHECKPOINT).unlink(missing_ok=True)
    _report_fit(metrics, result.seconds, out)


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("data", type=FOLDER)
@click.option("--val", type=NATURAL, default=4, show_default=True, help="As in fit.")
@click.option("--class-names", type=FOLDER, help="As in fit.")
@click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives.")
@backbone_options
@workers_option
def calibrate(
    adapter: Path, data: Path, val: int, class_names: Path | None, backbone: str | None, device: str, precision: str,
    workers: int,
) -> None:  # fmt: skip
    """Set the thresholds of adaptive thinking of a PERL ADAPTER on the images of DATA that it was trained on.

    `fit` has done so already, unless it was an older one.
    """
    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=precision)
    training = loaded.info["training"]
    shots, seed = training.get("shots"), training.get("seed", 1)
    train, _ = _train_and_val(data, class_names, loaded.template, shots, val, seed)
    if "data" not in training:
        raise PerlclipError(
            f"{adapter} does not say what it was trained on; use perlclip.calibrate and save_adapter from Python"
        )
    if train.fingerprint() != training["data"]:
        raise PerlclipError(
            f"{data} does not give the images that {adapter} was trained on; use fit's DATA and options"
        )
    found = perlclip.calibrate(loaded.method, train, seed=seed, workers=workers)
    perlclip.save_adapter(
        loaded.method, adapter, class_names=loaded.class_names, templates=loaded.template, training=training,
        metrics=loaded.info["metrics"], adaptive=found,
    )  # fmt: skip
    click.echo(f"adaptive thinking takes {found.chosen.mean_steps:.1f} steps an image on {found.views} training views")


def _keep_zero_shot(
    train: "ImageSet",
    held_out: "ImageSet",
    out: Path,
    config: dict[str, Any],
    backbone: str,
    device: str,
    precision: str,
) -> None:
    """An adapter of nothing but class names and prompt, so that `predict` and `eval` work for zero-shot CLIP, too."""
    loaded = perlclip.load_backbone(backbone, device=device, dtype=precision)
    method = perlclip.create_method(UNTRAINED_METHOD, loaded, **config)
    metrics = {"validation": perlclip.evaluate(method, held_out).metrics()} if len(held_out) else {}
    perlclip.save_adapter(method, out, class_names=train.class_names, templates=train.template, metrics=metrics)
    _report_fit(metrics, 0.0, out)


def _check_out(out: Path, resume: bool, overwrite: bool) -> None:
    """Nothing of the user's is replaced unasked; a stale checkpoint never outlives the start of another training."""
    from perlclip.adapters.folder import CARD, CONFIG, WEIGHTS

    interrupted = (out / CHECKPOINT).exists()
    if resume and not interrupted:
        raise PerlclipError(f"nothing to resume in {out}")
    if not (resume or overwrite):
        if interrupted:
            raise PerlclipError(
                f"{out} holds an interrupted training; go on with --resume or start anew with --overwrite"
            )
        for name in (CONFIG, WEIGHTS, CARD):
            if (out / name).exists():
                kind = "an adapter" if name == CONFIG else f"a file {name}"
                raise PerlclipError(f"{out} already holds {kind}; choose another --out or pass --overwrite")


def _train_and_val(
    data: Path, class_names: Path | None, template: str, shots: int | None, val: int, seed: int
) -> "tuple[ImageSet, ImageSet]":
    from perlclip.data import read_class_names, train_and_val

    names = read_class_names(class_names) if class_names else None
    return train_and_val(data, shots=shots, val=val, seed=seed, class_names=names, template=template)


def _recipe(method: str, name: str | None, backbone: str, changes: dict[str, Any]) -> "tuple[str, Recipe]":
    from perlclip.methods import method_class
    from perlclip.methods.recipes import default_recipe, recipe

    method_class(method)  # an unknown name is an error of its own
    name = name or default_recipe(method)
    given = {key: value for key, value in changes.items() if value is not None}
    return name, replace(recipe(method, name, backbone), **given)


@contextmanager
def _resume_hint(out: Path) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, PerlclipError) as error:
        kept = (out / CHECKPOINT).exists()
        where = f"; the training so far is in {out}, go on with --resume" if kept else ""
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else PerlclipError
        raise kind(f"{str(error) or 'interrupted'}{where}") from error


def _report_fit(metrics: dict[str, Any], seconds: float, out: Path) -> None:
    if "validation" in metrics:
        steps = metrics["validation"]["step_accuracy"]
        path = f"zero-shot {steps[0]:.1f} % → {steps[-1]:.1f} %" if len(steps) > 1 else f"{steps[0]:.1f} %"
        click.echo(f"validation accuracy on {metrics['validation']['images']} images: {path}")
    click.echo(f"trained in {seconds:.1f} s; adapter in {out}")
    click.echo(f"next: perlclip predict {out} IMAGE…")
