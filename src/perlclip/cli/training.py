"""Making adapters: `perlclip fit | set-thresholds`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import BACKBONE, CLASS_NAMES, FOLDER, NATURAL, POSITIVE, SEED, method_settings, options
from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.adapters.folder import Adapter

CHECKPOINT = "checkpoint.safetensors"


@click.command()
@click.argument("data")
@click.option("--out", type=FOLDER, required=True, help="Folder for the adapter.")
@click.option("--backbone", default=BACKBONE, help="Hub name, Hugging Face folder, or 'tiny'.")
@click.option("--method", default="perl", help="See `perlclip methods`.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting of the method, e.g. steps=2.")
@click.option("--recipe", help="fast (one epoch), original (the authors' own), strong (PERL's default).")
@click.option("--epochs", type=POSITIVE, help="Instead of the recipe's.")
@click.option("--lr", type=float, help="Instead of the recipe's.")
@click.option("--batch-size", type=POSITIVE, help="Instead of the recipe's.")
@click.option("--shots", type=POSITIVE, help="Training images of each class; all of them if not given.")
@click.option("--val", type=NATURAL, default=4, help="Images of each class held out to report accuracy on.")
@click.option("--seed", type=SEED, default=1, help="Of sampling, initialisation, order and augmentation.")
@click.option(
    "--class-names", type=CLASS_NAMES, help="File: a name a line in sorted folder order, or JSON {folder: name}."
)
@click.option("--template", help="Prompt; {} is the class name. The set's own, or 'a photo of a {}.', if not given.")
@click.option(
    "--head/--no-head", default=True, help="Make a head for the classes trained on, if shots held out are better off."
)
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    help="Train on three quarters of the shots as well, to choose the head by.",
)
@click.option("--resume", is_flag=True, help="Go on from an interrupted training in --out.")
@click.option("--overwrite", is_flag=True, help="Replace an adapter that is already in --out.")
@options("data", "device", "dtype", "compile", "workers")
def fit(
    data: str, out: Path, backbone: str, method: str, settings: tuple[str, ...], recipe: str | None, seed: int,
    shots: int | None, val: int, class_names: Any, template: str | None, head: bool, rehearse: bool,
    resume: bool, overwrite: bool,
    root: Path | None, device: str, dtype: str, compile: str, workers: int, **changes: Any,
) -> None:  # fmt: skip
    """Train an adapter on DATA: a folder of class folders, a CSV manifest with columns path,label, toybox:NAME,
    coop:NAME or a set of a suite file; with /base or /novel behind it, half of the classes."""
    from perlclip.adapters.folder import Adapter
    from perlclip.data.sources import published_name, train_and_val
    from perlclip.files import require_writable
    from perlclip.inference.cache import EvalCache
    from perlclip.methods.registry import default_recipe

    _check_out(out, resume, overwrite)
    own, cls = method_settings([method], settings)[method], perlclip.method_class(method)
    train, held_out = train_and_val(
        data, shots=shots, val=val, seed=seed, class_names=class_names, template=template, data=root
    )
    require_writable(out)
    if not resume:
        (out / CHECKPOINT).unlink(missing_ok=True)
    given = {key: value for key, value in changes.items() if value is not None}
    fitted: Adapter
    if not cls.recipes and not cls.trains(cls.config_class.checked(method, own)):
        # Without a head it is nothing but class names and prompt, so that `predict` and `eval` work here, too.
        loaded = perlclip.load_backbone(backbone, device=device, dtype=dtype)
        adapted = perlclip.create_method(method, loaded, **own)
        fitted = (
            perlclip.fit(adapted, train, seed=seed, workers=workers)
            if head
            else Adapter(method=adapted, class_names=train.class_names, template=train.template)
        )
        metrics: dict[str, Any] = {"validation": perlclip.evaluate(fitted, held_out).metrics()} if len(held_out) else {}
        perlclip.save_adapter(fitted, out, metrics=metrics)
        _report_fit(fitted, metrics, out)
        return
    recipe, dataset = recipe or default_recipe(method), published_name(data)
    number = shots or 0
    chosen = replace(perlclip.find_recipe(method, recipe, backbone, dataset, number)[0], **given)
    loaded = perlclip.load_backbone(backbone, device=device, dtype=dtype)
    adapted = perlclip.create_method(method, loaded, seed=seed, recipe=recipe, dataset=dataset, shots=number, **own)
    click.echo(
        f"{method}, {adapted.num_trainable:,} parameters, on {backbone}: {len(train)} images of "
        f"{len(train.class_names)} classes, {chosen.epochs} epoch{'s' * (chosen.epochs > 1)}",
        err=True,
    )
    with _resume_hint(out):
        result = perlclip.fit(
            adapted, train, recipe=chosen, seed=seed, head=head, rehearse=rehearse,
            checkpoint=out / CHECKPOINT, resume=resume, compile=compile, workers=workers,
        )  # fmt: skip
        last = result.losses[-10:]
        metrics = {"final_loss": sum(last) / len(last)} if last else {}
        if len(held_out):
            how: dict[str, Any] = dict(state=result.state, compile=compile, workers=workers)
            if result.head:  # looked at twice, loaded once
                how["cache"] = EvalCache().of("validation")
                metrics["validation_without_head"] = perlclip.evaluate(result, held_out, head=False, **how).metrics()
            metrics["validation"] = perlclip.evaluate(result, held_out, **how).metrics()
        training = {**result.training, "recipe_name": recipe}
        perlclip.save_adapter(result, out, training=training, metrics=metrics)
        (out / CHECKPOINT).unlink(missing_ok=True)
    _report_fit(result, metrics, out)


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("data")
@click.option("--val", type=NATURAL, default=4, help="As in fit.")
@click.option("--class-names", type=CLASS_NAMES, help="As in fit.")
@options("backbone", "data", "device", "dtype", "workers")
def set_thresholds(
    adapter: Path, data: str, val: int, class_names: Any, backbone: str | None, root: Path | None,
    device: str, dtype: str, workers: int,
) -> None:  # fmt: skip
    """Set the thresholds of adaptive thinking of a PERL ADAPTER on the images of DATA that it was trained on.

    `fit` has done so already, unless it was an older one.
    """
    from perlclip.data import train_and_val

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    training = loaded.training
    if "data" not in training:
        raise PerlclipError(
            f"{adapter} does not say what it was trained on; use perlclip.set_thresholds and save_adapter from Python"
        )
    shots, seed = training.get("shots"), training.get("seed", 1)
    train, _ = train_and_val(
        data, shots=shots, val=val, seed=seed, class_names=class_names, template=loaded.template, data=root
    )
    if train.fingerprint() != training["data"]:
        raise PerlclipError(
            f"{data} does not give the images that {adapter} was trained on; use fit's DATA and options"
        )
    found = perlclip.set_thresholds(loaded, train, seed=seed, workers=workers)
    perlclip.save_adapter(loaded, adapter, thresholds=found)
    click.echo(f"adaptive thinking takes {found.chosen.mean_steps:.1f} steps per image on {found.views} training views")


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


@contextmanager
def _resume_hint(out: Path) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, PerlclipError) as error:
        kept = (out / CHECKPOINT).exists()
        where = f"; the training so far is in {out}, go on with --resume" if kept else ""
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else PerlclipError
        raise kind(f"{str(error) or 'interrupted'}{where}") from error


def _report_fit(fitted: "Adapter", metrics: dict[str, Any], out: Path) -> None:
    from perlclip.methods.registry import plugins
    from perlclip.training.loop import FitResult

    seconds, choice = (fitted.seconds, fitted.choice) if isinstance(fitted, FitResult) else (0.0, None)
    if choice:
        click.echo(choice.sentence)
    if "validation" in metrics:
        found, plain = metrics["validation"], metrics.get("validation_without_head")
        steps, said = (plain or found)["step_accuracy"], []
        if len(steps) > 1:
            said.append(f"zero-shot {steps[0]:.1f} %")  # which the first step is
        if len(steps) > 1 or plain:
            said.append(f"{'adapted' if choice is None or choice.trained else 'zero-shot'} {steps[-1]:.1f} %")
        if plain or not said:
            said.append(f"{choice.answer if choice else 'all in all'} {found['accuracy']:.1f} %")
        click.echo(f"validation accuracy on {found['images']} images: {' → '.join(said)}")
    click.echo(f"trained in {seconds:.1f} s; adapter in {out}")
    more = "".join(f" --plugin {name}" for name in plugins())
    click.echo(f"next: perlclip predict {out} IMAGE…{more}")
