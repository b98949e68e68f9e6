"""Making adapters: `perlclip fit | set-thresholds | calibrate`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import BACKBONE, CLASS_NAMES, FOLDER, NATURAL, POSITIVE, SEED, method_settings, options
from perlclip.errors import PerlclipError, shell_word

if TYPE_CHECKING:
    from perlclip.adapters.folder import Adapter
    from perlclip.backbone import Backbone
    from perlclip.data import ImageSet
    from perlclip.data.surveys import Survey

CHECKPOINT = "checkpoint.safetensors"


@click.command()
@click.argument("data")
@click.option("--out", type=FOLDER, help="Folder for the adapter; needed unless --dry-run is given.")
@click.option(
    "--backbone", default=BACKBONE, help="Hub name, folder (Hugging Face, OpenCLIP), 'tiny' or 'tiny-siglip'."
)
@click.option("--image-size", type=POSITIVE, help="Pixels a side, if not those that the backbone is for.")
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
    "--lens", default="auto",
    help="How images are shown to the backbone: plain, smooth, negative, near, or auto, chosen by the shots.",
)  # fmt: skip
@click.option(
    "--head/--no-head", default=True, help="Make a head for the classes trained on, if shots held out are better off."
)
@click.option(
    "--rehearse/--no-rehearse",
    default=True,
    help="Train on a part of the shots as well, to choose the head by.",
)
@click.option("--check", is_flag=True, help="Warn of labels that are probably wrong, as `perlclip check` finds them.")
@click.option("--resume", is_flag=True, help="Go on from an interrupted training in --out, if there is one.")
@click.option("--overwrite", is_flag=True, help="Replace an adapter that is already in --out.")
@click.option("--dry-run", is_flag=True, help="Say what was found in DATA, every image decoded, and train nothing.")
@options("on-error", "data", "device", "dtype", "compile", "workers")
def fit(
    data: str, out: Path | None, backbone: str, image_size: int | None, method: str, settings: tuple[str, ...],
    recipe: str | None, seed: int, shots: int | None, val: int, class_names: Any, template: str | None, lens: str,
    head: bool, rehearse: bool, check: bool, resume: bool, overwrite: bool, dry_run: bool, on_error: str,
    root: Path | None, device: str, dtype: str, compile: str, workers: int, **changes: Any,
) -> None:  # fmt: skip
    """Train an adapter on DATA: a folder, zip or tar of class folders, a CSV manifest with columns path,label, a
    parquet file, toybox:NAME, coop:NAME or a set of a suite file; with /base or /novel behind it, half of the
    classes."""
    from perlclip.adapters.folder import Adapter
    from perlclip.data.sources import published_name
    from perlclip.data.surveys import survey
    from perlclip.files import remove, require_writable
    from perlclip.methods.registry import default_recipe, ruled_datasets
    from perlclip.training.loop import FitResult

    load = partial(perlclip.load_backbone, backbone, device=device, dtype=dtype, image_size=image_size)
    look: dict[str, Any] = dict(
        shots=shots, val=val, seed=seed, class_names=class_names, template=template, data=root, on_error=on_error
    )
    if dry_run:
        found = survey(data, **look)
        click.echo(found)
        if check:
            click.echo(_check_labels(load(), found, workers))
        _list_skipped(found)
        return
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    if out.is_dir():
        _hold(out)
    if _check_out(out, resume, overwrite):
        click.echo(f"{out} holds a complete adapter: nothing to resume; start anew with --overwrite")
        return
    own, cls = method_settings([method], settings)[method], perlclip.method_class(method)
    own |= {} if lens == "auto" else {"lens": lens}
    clock = _Clock()
    found = survey(data, **look)
    train, held_out = found.train, found.val
    clock("reading images")
    click.echo(found, err=True)
    require_writable(out)
    _hold(out)
    if not resume:
        remove(out / CHECKPOINT)
    given = {key: value for key, value in changes.items() if value is not None}
    fitted: Adapter
    if not cls.recipes and not cls.trains(cls.config_class.checked(method, own)):
        # Without a head it is nothing but class names and prompt, so that `predict` and `eval` work here, too.
        loaded = load()
        clock("loading the backbone")
        if check:
            click.echo(_check_labels(loaded, found, workers), err=True)
            clock("checking labels")
        adapted = perlclip.create_method(method, loaded, **own)
        fitted = (
            perlclip.fit(adapted, train, seed=seed, workers=workers)
            if head
            else Adapter(method=adapted, class_names=train.class_names, template=train.template)
        )
        clock("head", lens=fitted.lens_seconds if isinstance(fitted, FitResult) else 0.0)
        metrics: dict[str, Any] = {}
        zero_shot = _validate(fitted, held_out, metrics, workers=workers)
        perlclip.save_adapter(fitted, out, metrics=metrics)
        clock("validation")
        _report_fit(fitted, metrics, out, clock, zero_shot)
        _list_skipped(found)
        return
    recipe, dataset = recipe or default_recipe(method), published_name(data)
    dataset = dataset if dataset in ruled_datasets() else ""
    number = train.shots_each
    chosen = replace(perlclip.find_recipe(method, recipe, backbone, dataset, number, len(train))[0], **given)
    loaded = load()
    clock("loading the backbone")
    if check:
        click.echo(_check_labels(loaded, found, workers), err=True)
        clock("checking labels")
    adapted = perlclip.create_method(method, loaded, seed=seed, recipe=recipe, dataset=dataset, shots=number, **own)
    click.echo(
        f"{method}, {adapted.num_trainable:,} parameters, on {backbone}: {len(train)} images of "
        f"{len(train.class_names)} classes, {chosen.epochs} epoch{'s' * (chosen.epochs > 1)}",
        err=True,
    )
    if resume:
        click.echo(_where_resumed(out), err=True)
    with _resume_hint(out):
        result = perlclip.fit(
            adapted, train, recipe=chosen, seed=seed, head=head, rehearse=rehearse,
            checkpoint=out / CHECKPOINT, resume=resume, compile=compile, workers=workers,
        )  # fmt: skip
        parts = {"lens": result.lens_seconds, "head": result.head_seconds, "thresholds": result.threshold_seconds}
        clock("training", **parts)
        last = result.losses[-10:]
        metrics = {"final_loss": sum(last) / len(last)} if last else {}
        zero_shot = _validate(result, held_out, metrics, state=result.state, compile=compile, workers=workers)
        training = {**result.training, "recipe_name": recipe}
        perlclip.save_adapter(result, out, training=training, metrics=metrics)
        remove(out / CHECKPOINT)
    clock("validation")
    _report_fit(result, metrics, out, clock, zero_shot)
    _list_skipped(found)


def _validate(
    fitted: "Adapter", held_out: "ImageSet", metrics: dict[str, Any], *, state: Any = None, **how: Any
) -> float | None:
    """Accuracy on images held out, with and without the head; that of zero-shot CLIP, unless a step says it."""
    from perlclip.backbone import PLAIN
    from perlclip.inference.cache import EvalCache

    if not len(held_out):
        return None
    method = fitted.method
    # What PERL's first step says, and a method that trains nothing, is zero-shot CLIP, though through lens and center.
    apart = method.config.lens != PLAIN or bool(method.center) or (method.num_trainable > 0 and not method.image_steps)
    if apart:
        how["cache"] = EvalCache().of("validation")
    found = perlclip.evaluate(fitted, held_out, state=state, **how)
    if found.without_head:
        metrics["validation_without_head"] = found.without_head.metrics()
    metrics["validation"] = found.metrics()
    if not apart:
        return None
    return perlclip.evaluate(perlclip.create_method("zero-shot", method.backbone), held_out, **how).accuracy


class _Clock:
    """Where the time of a command goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, what: str, **parts: float) -> None:
        """Everything since the last call was this, but for parts of it that have names of their own."""
        now = time.perf_counter()
        self.seconds |= {what: now - self.last - sum(parts.values()), **parts}
        self.last = now

    def __str__(self) -> str:
        said = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self.seconds.items() if seconds >= 0.05)
        return f"{said}; {sum(self.seconds.values()):.1f} s in all"


def _check_labels(backbone: "Backbone", found: "Survey", workers: int) -> str:
    """What `perlclip check` says of the images that are trained on and held out."""
    splits = {"train": found.train, "val": found.val}
    return str(perlclip.check(perlclip.create_method("zero-shot", backbone), splits, workers=workers))


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
    """Set the thresholds of adaptive thinking of a PERL ADAPTER, best on the images of DATA that it was trained on.

    `fit` has done so already, unless it was an older one. Where DATA gives other images, or the adapter does not say
    which ones it saw, all of them are taken: the thresholds need their classes' names, not their labels.
    """
    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    seed = loaded.training.get("seed", 1)
    shots = loaded.training.get("shots")
    if not isinstance(seed, int) or not isinstance(shots, int | None):
        raise PerlclipError(f"{adapter} has a training record that is damaged: shots {shots!r}, seed {seed!r}")
    same = _trained_on(loaded, data, val=val, seed=seed, class_names=class_names, data=root)
    train = same or _all_images(loaded, data, class_names=class_names, data=root)
    if not same:
        click.echo(
            f"{data} is not what {adapter} was trained on, as far as that is known: the thresholds are set on "
            f"{len(train)} images of it, which adaptive thinking should not be tested on",
            err=True,
        )
    found = perlclip.set_thresholds(loaded, train, seed=seed, workers=workers)
    perlclip.save_adapter(loaded, adapter, thresholds=found)
    views = f"{found.views} {'training ' * bool(same)}views"
    click.echo(f"adaptive thinking takes {found.chosen.mean_steps:.1f} steps per image on {views}")


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("data")
@click.option("--split", help="train, val or test, where DATA is split; val if not given, and there is one.")
@click.option("--val", type=NATURAL, default=4, help="As in fit.")
@click.option("--class-names", type=CLASS_NAMES, help="As in fit.")
@click.option("--batch-size", type=POSITIVE, default=64)
@options("backbone", "data", "device", "dtype", "workers")
def calibrate(
    adapter: Path, data: str, split: str | None, val: int, class_names: Any, batch_size: int, backbone: str | None,
    root: Path | None, device: str, dtype: str, workers: int,
) -> None:  # fmt: skip
    """Calibrate an ADAPTER on labelled images of DATA that it was not trained on: how sure its answers may be, which
    images to reject, sets of labels.

    `fit` has done so already on shots that it held out. Of DATA that the adapter was trained on, the images that it has
    not seen are taken.
    """
    from perlclip.data import for_classes, has_split, readable

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype)
    if split is None and has_split(data, "val", data=root):
        split = "val"
    chosen = perlclip.load_images(data, split=split, class_names=class_names, template=loaded.template, data=root)
    seed = loaded.training.get("seed", 1)
    seen = _trained_on(loaded, data, val=val, seed=seed, class_names=class_names, data=root) if split is None else None
    if seen:
        known = set(map(str, seen.images))
        chosen = chosen.select(i for i, image in enumerate(chosen.images) if str(image) not in known)
    images = readable(for_classes(chosen, loaded.class_names))[0]
    if not len(images):
        raise PerlclipError(f"{adapter} was trained on all images of {data}: calibrate it on others")
    found = perlclip.Classifier(loaded).calibrate(images, batch_size=batch_size, workers=workers)
    perlclip.save_adapter(loaded, adapter, trust=found)
    click.echo(f"calibrated on {found.images} images: temperature {found.calibration.temperature:.2f}")


def _trained_on(adapter: "Adapter", source: str, **how: Any) -> "ImageSet | None":
    """The images that an adapter was trained on, if the source gives just these."""
    from perlclip.data.surveys import survey

    try:
        # What fit left out is left out here as well; whether it is the same, the fingerprint says.
        shots, template = adapter.training.get("shots"), adapter.template
        train = survey(source, shots=shots, template=template, on_error="skip", **how).train
    except PerlclipError:  # too few images for its shots, say; what is wrong with the source itself is found again
        return None
    return train if train.fingerprint() == adapter.training.get("data") else None


def _all_images(adapter: "Adapter", source: str, **how: Any) -> "ImageSet":
    """The training images of a source, or all if it is not split, of the adapter's classes."""
    from perlclip.data import for_classes, readable

    images = perlclip.load_images(source, template=adapter.template, **how)
    return readable(for_classes(images, adapter.class_names))[0]


def _list_skipped(found: "Survey") -> None:
    """What could not be read, and the exit code that says so."""
    if found.skipped:
        click.echo(f"skipped {len(found.skipped)} of the images:", err=True)
        for each in found.skipped:
            click.echo(f"  {each.reason}", err=True)
        click.get_current_context().exit(1)


def _hold(out: Path) -> None:
    """Keep other processes from training into the same folder until this command ends, however it ends."""
    from perlclip.files import held_folder

    if not click.get_current_context().with_resource(held_folder(out)):
        raise PerlclipError(f"another process is training into {out}: choose another --out, or wait for it")


def _check_out(out: Path, resume: bool, overwrite: bool) -> bool:
    """Nothing of the user's is replaced unasked; a stale checkpoint never outlives the start of another training.

    Whether there is nothing left to do: a job that is started again by the same command may have come to its end.
    """
    from perlclip.adapters.folder import CARD, CONFIG, WEIGHTS

    interrupted = (out / CHECKPOINT).exists()
    if overwrite or (resume and interrupted):
        return False
    if interrupted:
        raise PerlclipError(f"{out} holds an interrupted training; go on with --resume or start anew with --overwrite")
    if resume and (out / CONFIG).exists():
        return True
    for name in (CONFIG, WEIGHTS, CARD):
        if (out / name).exists():
            kind = "an adapter" if name == CONFIG else f"a file {name}"
            raise PerlclipError(f"{out} already holds {kind}; choose another --out or pass --overwrite")
    return False


def _where_resumed(out: Path) -> str:
    from perlclip.training.checkpoint import read_checkpoint

    if not (out / CHECKPOINT).exists():
        return f"no checkpoint in {out} yet: starting from the beginning"
    return f"going on after step {len(read_checkpoint(out / CHECKPOINT).losses)} of the training in {out}"


@contextmanager
def _resume_hint(out: Path) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, PerlclipError) as error:
        kept = (out / CHECKPOINT).exists()
        where = f"; the training so far is in {out}, go on with --resume" if kept else ""
        kind = type(error) if isinstance(error, KeyboardInterrupt) else PerlclipError
        raise kind(f"{str(error) or 'interrupted'}{where}") from error


def _report_fit(
    fitted: "Adapter", metrics: dict[str, Any], out: Path, clock: _Clock, zero_shot: float | None = None
) -> None:
    from perlclip.backbone import PLAIN
    from perlclip.methods.registry import plugins
    from perlclip.training.loop import FitResult

    method, choice = fitted.method, fitted.choice if isinstance(fitted, FitResult) else None
    if isinstance(fitted, FitResult) and fitted.lens and fitted.lens.name != PLAIN:
        click.echo(fitted.lens.sentence)
    if choice:
        click.echo(choice.sentence)
    if "validation" in metrics:
        found, plain = metrics["validation"], metrics.get("validation_without_head")
        steps, trained = (plain or found)["step_accuracy"], method.num_trainable > 0
        seen = " and ".join(["through the lens"] * (method.config.lens != PLAIN) + ["centered"] * bool(method.center))
        frozen = steps[0] if len(steps) > 1 or not trained else None
        if not seen and frozen is not None:
            zero_shot = frozen
        said = [] if zero_shot is None else [f"zero-shot {zero_shot:.1f} %"]
        if seen and frozen is not None:
            said.append(f"{seen} {frozen:.1f} %")
        if trained:
            said.append(f"adapted {steps[-1]:.1f} %")
        if plain and choice:
            said.append(f"{choice.answer} {found['accuracy']:.1f} %")
        click.echo(f"validation accuracy on {found['images']} images: {' → '.join(said)}")
        if zero_shot is not None and found["accuracy"] < zero_shot:
            click.echo(
                f"this is worse than not adapting: zero-shot CLIP answers {zero_shot:.1f} % of these "
                f"{found['images']} images right, the adapter {found['accuracy']:.1f} %; try more shots, another "
                "--recipe or fewer --epochs"
            )
    click.echo(f"time: {clock}")
    click.echo(f"adapter in {out}")
    more = "".join(f" --plugin {shell_word(name)}" for name in plugins())
    click.echo(f"next: perlclip predict {shell_word(out)} IMAGE…{more}")
