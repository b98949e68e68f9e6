"""The command line: `perlclip fit | predict | eval | methods | inspect | demo | bench | data | report
| explain | analyze`.

Only `click` is imported here at the top, so that `--help` answers at once. Errors of the user's are one sentence and
exit code 1, wrong usage is 2, Ctrl-C is 130; `--debug` shows the traceback.
"""

import csv
import glob
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.data import ImageSet
    from perlclip.recipes import Recipe
    from perlclip.runs import Run, Store

FOLDER = click.Path(path_type=Path)
CHECKPOINT = "checkpoint.safetensors"
BACKBONE = "openai/clip-vit-base-patch16"
UNTRAINED_METHOD = "zero-shot"


class _Commands(click.Group):
    """A group whose commands fail with one sentence."""

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.params.get("debug", False)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `| head` has seen enough; click ends quietly
            raise
        except (PerlclipError, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            if debug or (isinstance(error, RuntimeError) and not _out_of_memory(error)):
                raise
            click.echo(f"error: {_sentence(error)}", err=True)
            ctx.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _out_of_memory(error: RuntimeError) -> bool:
    """torch has no class of its own for this on the CPU."""
    return "memory" in str(error)


def _sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError | RuntimeError):
        return f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more to be had'}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error) or "interrupted"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(perlclip.__version__)
def main(debug: bool) -> None:
    """Adapt a frozen CLIP from a handful of images, and use what came out."""


NATURAL, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
SEED = click.IntRange(0, 2**63 - 1)


def _workers_option(command: Any) -> Any:
    option = click.option("--workers", type=NATURAL, default=0, show_default=True, help="Processes that decode images.")
    return option(command)


def _backbone_options(command: Any) -> Any:
    for option in (
        click.option(
            "--precision", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
            help="What the frozen towers compute in.",
        ),
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, mps or auto."),
    ):  # fmt: skip
        command = option(command)
    return command


@main.command()
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
@_backbone_options
@_workers_option
def fit(
    data: Path, out: Path, backbone: str, method: str, settings: tuple[str, ...], recipe_name: str | None, seed: int,
    shots: int | None, val: int, class_names: Path | None, template: str, resume: bool, overwrite: bool,
    device: str, precision: str, workers: int, **changes: Any,
) -> None:  # fmt: skip
    """Train an adapter on DATA: a folder of class folders, or a CSV manifest with columns path,label."""
    from perlclip.files import require_writable
    from perlclip.recipes import settings as recipe_settings
    from perlclip.runs import environment

    _check_out(out, resume, overwrite)
    train, held_out = _train_and_val(data, class_names, template, shots, val, seed)
    if method == UNTRAINED_METHOD:
        _keep_zero_shot(train, held_out, out, _settings(method, settings), backbone, device, precision)
        return
    recipe_name, recipe = _recipe(method, recipe_name, backbone, changes)
    config = recipe_settings(method, recipe_name, backbone) | _settings(method, settings)
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
            workers=workers,
        )  # fmt: skip
        metrics: dict[str, Any] = {"final_loss": sum(result.losses[-10:]) / len(result.losses[-10:])}
        if len(held_out):
            metrics["validation"] = perlclip.evaluate(adapted, held_out, workers=workers).metrics()
        settings_used = {
            key: value for key, value in result.settings.items() if key not in ("method", "config", "backbone")
        }
        training = {"source": data.name, "shots": shots, "recipe_name": recipe_name, **settings_used}
        training |= {"seconds": round(result.seconds, 2), "environment": environment(loaded.device)}
        perlclip.save_adapter(
            adapted, out, class_names=train.class_names, templates=template, training=training, metrics=metrics
        )
        (out / CHECKPOINT).unlink(missing_ok=True)
    _report_fit(metrics, result.seconds, out)


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
    from perlclip.adapter import CARD, CONFIG, WEIGHTS

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
    from perlclip.data import load_images, read_class_names, train_val
    from perlclip.data.folder import has_split, match_classes, rename_classes

    names = read_class_names(class_names) if class_names else None
    pool = load_images(data, template=template)
    if has_split(data, "val"):
        held_out = match_classes(load_images(data, split="val", template=template), pool.class_names)
        train = train_val(pool, shots=shots, val=0, seed=seed)[0]
    else:
        train, held_out = train_val(pool, shots=shots, val=val, seed=seed)
    return (train, held_out) if names is None else (rename_classes(train, names), rename_classes(held_out, names))


def _recipe(method: str, name: str | None, backbone: str, changes: dict[str, Any]) -> "tuple[str, Recipe]":
    from perlclip.methods import method_class
    from perlclip.recipes import default_recipe, recipe

    method_class(method)  # an unknown name is an error of its own
    name = name or default_recipe(method)
    given = {key: value for key, value in changes.items() if value is not None}
    return name, replace(recipe(method, name, backbone), **given)


def _settings(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """`steps=2` as the type that the method's setting has."""
    from dataclasses import fields

    from perlclip.errors import unknown_name
    from perlclip.methods import method_class
    from perlclip.methods.base import parse_setting

    config = method_class(method).config_class
    known = [f.name for f in fields(config)]
    settings = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise PerlclipError(f"--set takes NAME=VALUE, got {pair!r}")
        if name not in known:
            raise unknown_name(f"setting of method {method!r}:", name, known)
        settings[name] = parse_setting(config, name, text)
    return settings


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


@main.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--top-k", type=POSITIVE, default=1, show_default=True, help="Labels for each image.")
@click.option("--json", "form", flag_value="json", help="One JSON object a line.")
@click.option("--csv", "form", flag_value="csv", help="CSV: image,rank,label,probability.")
@click.option("--class-names", type=FOLDER, help="Other classes than the adapter's: a name a line, or a JSON list.")
@click.option("--template", help="Another prompt than the adapter's.")
@click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives.")
@click.option("--batch-size", type=POSITIVE, default=32, show_default=True)
@_backbone_options
def predict(
    adapter: Path, images: tuple[str, ...], top_k: int, form: str | None, class_names: Path | None,
    template: str | None, backbone: str | None, batch_size: int, device: str, precision: str,
) -> None:  # fmt: skip
    """Label IMAGES: files, folders, or globs in quotes."""
    from perlclip.progress import progress_bar

    paths = _image_paths(images)
    names = _name_list(class_names)
    classifier = perlclip.Classifier.from_pretrained(
        adapter, class_names=names, template=template, backbone=backbone, device=device, dtype=precision
    )
    write = _WRITERS[form]()
    with progress_bar("predict", len(paths), show=not sys.stdout.isatty()) as bar:
        predictions = classifier.predict_iter(paths, top_k=top_k, batch_size=batch_size)
        for path, prediction in zip(paths, predictions, strict=True):
            write(path, prediction.top)
            bar()


def _image_paths(given: Sequence[str]) -> list[Path]:
    """Files as they are, folders and globs opened up."""
    paths: list[Path] = []
    for item in given:
        if item and (Path(item).exists() or not glob.has_magic(item)):
            matches = [Path(item)]
        else:
            matches = sorted(Path(match) for match in glob.glob(item, recursive=True))
            if not matches:
                raise PerlclipError(f"no file matches {item!r}")
        for path in matches:
            paths += _images_of(path)
    return paths


def _images_of(path: Path) -> list[Path]:
    from perlclip.data.images import images_under

    if path.is_file():
        return [path]
    if not path.is_dir():
        raise PerlclipError(f"no such image: {path}")
    found = images_under(path)
    if not found:
        raise PerlclipError(f"folder {path} holds no images")
    return found


def _name_list(path: Path | None) -> list[str] | None:
    from perlclip.data import read_class_names

    names = read_class_names(path) if path else None
    if isinstance(names, dict):
        raise PerlclipError(f"{path} must hold a list of class names here, not an object")
    return names


def _write_text() -> Any:
    def write(path: Path, top: Sequence[tuple[str, float]]) -> None:
        click.echo(f"{path}\t" + "\t".join(f"{label}\t{p:.4f}" for label, p in top))

    return write


def _write_json() -> Any:
    def write(path: Path, top: Sequence[tuple[str, float]]) -> None:
        labels = [{"label": label, "probability": p} for label, p in top]
        click.echo(json.dumps({"image": str(path), **labels[0], "top": labels}, ensure_ascii=False))

    return write


def _write_csv() -> Any:
    writer: Any = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "rank", "label", "probability"])

    def write(path: Path, top: Sequence[tuple[str, float]]) -> None:
        writer.writerows((path, rank, label, f"{p:.6f}") for rank, (label, p) in enumerate(top, start=1))

    return write


_WRITERS: dict[str | None, Any] = {None: _write_text, "json": _write_json, "csv": _write_csv}


@main.command("eval")
@click.argument("adapter", type=FOLDER)
@click.argument("data", type=FOLDER)
@click.option("--split", help="train, val or test, where DATA is split.")
@click.option(
    "--class-names", type=FOLDER, help="Names for DATA's folders, as in fit; they replace the adapter's classes."
)
@click.option("--template", help="Another prompt than the adapter's.")
@click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives.")
@click.option("--batch-size", type=POSITIVE, default=64, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The metrics as one JSON object.")
@_backbone_options
@_workers_option
def eval_(
    adapter: Path, data: Path, split: str | None, class_names: Path | None, template: str | None,
    backbone: str | None, batch_size: int, as_json: bool, device: str, precision: str, workers: int,
) -> None:  # fmt: skip
    """Accuracy of ADAPTER on the labelled images of DATA."""
    from perlclip.data import load_images, read_class_names
    from perlclip.data.folder import match_classes
    from perlclip.prompts import are_novel

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=precision)
    names = read_class_names(class_names) if class_names else None
    images = load_images(data, split=split, class_names=names, template=template or loaded.template)
    if names is None:
        images = match_classes(images, loaded.class_names)
    novel = are_novel(images.class_names, loaded.class_names)
    result = perlclip.evaluate(loaded.method, images, novel=novel, batch_size=batch_size, workers=workers)
    if as_json:
        click.echo(json.dumps(result.metrics(), ensure_ascii=False))
    else:
        _print_evaluation(result.metrics())


def _print_evaluation(metrics: dict[str, Any]) -> None:
    table = _table("class", "accuracy %")
    for name, accuracy in metrics["class_accuracy"].items():
        table.add_row(name, f"{accuracy:.1f}")
    _console().print(table)
    steps = metrics["step_accuracy"]
    if len(steps) > 1:
        click.echo("by step k = 0, 1, …: " + "  ".join(f"{accuracy:.1f}" for accuracy in steps))
    click.echo(f"accuracy {metrics['accuracy']:.2f} % on {metrics['images']} images")


@main.command()
@click.option("--full", is_flag=True, help="All eleven base-to-novel sets instead of three.")
@click.option("--task", "tasks", multiple=True, help="A toybox set to run; may be given several times.")
@click.option("--seed", "seeds", multiple=True, type=SEED, default=[1], show_default=True, help="May be repeated.")
@click.option(
    "--modalities", multiple=True, type=click.Choice(["both", "vision", "text"]), default=["both"], show_default=True
)
@click.option("--recipe", default="extended", show_default=True, help="fast (the paper's) or extended.")
@click.option(
    "--out", type=FOLDER, default=Path("perlclip-demo"), show_default=True, help="Folder for runs and figure."
)
def demo(
    full: bool, tasks: tuple[str, ...], seeds: tuple[int, ...], modalities: tuple[str, ...], recipe: str, out: Path
) -> None:
    """Zero-shot CLIP against PERL on drawn data with the embedded backbone; offline, in about two minutes."""
    from perlclip import demo as demonstration

    chosen = tasks or (demonstration.ALL_TASKS if full else demonstration.THREE_TASKS)
    demonstration.run_demo(chosen, out, seeds=seeds, modalities=modalities, recipe=recipe)


@main.command()
@click.argument("pattern", default="*")
@click.option("--backbone", help="Count the parameters on this backbone instead of on ViT-B/16.")
def methods(pattern: str, backbone: str | None) -> None:
    """The methods there are, with their trained parameters."""
    from perlclip.backbone.clip import vit_b16_shape
    from perlclip.methods import method_class

    loaded = perlclip.load_backbone(backbone) if backbone else vit_b16_shape()
    table = _table("method", "published", f"parameters on {loaded.name}", "trains", "where", "recipes")
    for name in perlclip.list_methods(pattern):
        cls = method_class(name)
        recipes = ", ".join(perlclip.RECIPES.get(name, {})) or "–"
        try:
            count = f"{cls(loaded, cls.config_class()).num_trainable:,}"
        except PerlclipError:  # defaults made for twelve blocks
            count = "– (too few blocks)"
        table.add_row(name, cls.venue, count, cls.summary, cls.where, recipes)
    _console().print(table)


@main.command()
@click.argument("adapter", type=FOLDER)
@click.option("--json", "as_json", is_flag=True, help="The whole adapter_config.json.")
def inspect(adapter: Path, as_json: bool) -> None:
    """What an ADAPTER is, without loading its backbone."""
    from perlclip.adapter import read_info
    from perlclip.card import flat

    info = read_info(adapter)
    if as_json:
        click.echo(json.dumps(info, indent=2, ensure_ascii=False))
        return
    table = _table("what", "value")
    for key, value in flat(info):
        table.add_row(key, value)
    _console().print(table)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console() -> Any:
    from rich.console import Console

    # In a pipe there is no terminal width to respect: let rows be as long as they are.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)


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


def _machine_options(command: Any) -> Any:
    for option in (
        click.option(
            "--gpus-per-run", type=click.FloatRange(0, 1), metavar="SHARE",
            help="With ray: 0.25 lets four runs share a GPU; if not given, one GPU each where there are any.",
        ),
        click.option("--address", default="", help="With ray: an existing cluster; else one for --jobs is started."),
        click.option("--executor", default="local", show_default=True, help="local (processes) or ray (a cluster)."),
        click.option("--jobs", type=POSITIVE, help="Runs at a time, in processes; if not given, one a GPU, or one."),
        click.option(
            "--data", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="ROOT",
            help="Folder that holds the data sets' folders, for --suite coop.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@main.command(cls=_NumberLists)
@click.argument("protocol")
@click.option(
    "--out",
    type=FOLDER,
    default=Path("perlclip-bench"),
    show_default=True,
    help="Folder for runs and tables; what is complete there is kept.",
)
@click.option("--suite", default="toybox", show_default=True, help="toybox, drawn on the spot, or coop, the real sets.")
@click.option(
    "--methods", multiple=True, default=["all"], show_default=True, callback=_names, help="a,b,c or repeated."
)
@click.option(
    "--datasets", multiple=True, default=["all"], show_default=True, callback=_names, help="a,b,c or repeated."
)
@click.option(
    "--seeds",
    multiple=True,
    default=["1,2,3"],
    show_default=True,
    callback=_numbers(SEED),
    help="1,2,3 or 1 2 3 or repeated.",
)
@click.option(
    "--recipe",
    default="fast",
    show_default=True,
    help="fast, or original: the authors' own for the protocol (PERL keeps fast); see `perlclip methods`.",
)
@click.option(
    "--shots",
    multiple=True,
    callback=_numbers(POSITIVE),
    help="Training images of each class: 16, or for few-shot 1 2 4 8 16, if not given.",
)
@click.option("--backbone", default="", help=f"tiny for toybox and {BACKBONE} for coop, if not given.")
@click.option(
    "--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting, for those of the methods that have it."
)
@click.option("--dry-run", is_flag=True, help="Only list the runs that would be done, with an estimate of time.")
@_machine_options
@_backbone_options
@_workers_option
def bench(
    out: Path, methods: list[str], pairs: tuple[str, ...], dry_run: bool, executor: str, jobs: int | None,
    device: str, data: Path | None, workers: int, address: str, gpus_per_run: float | None, **grid: Any,
) -> None:  # fmt: skip
    """Run PROTOCOL for several methods, data sets and seeds. The same command again goes on.

    PROTOCOL is base-to-novel, cross-dataset, domain-shift, few-shot, or all, the first three of these; or for PERL
    ablation-modality, -depth, -steps, -variant, -anchor or -rank, which vary one setting under base-to-novel.
    """
    from perlclip.executor import Machines, default_jobs, run_all
    from perlclip.protocols import ABLATED, ABLATIONS, Benchmark
    from perlclip.runs import Store

    usual = [ABLATED] if grid["protocol"] in ABLATIONS else perlclip.list_methods()
    runs = Benchmark(methods=methods, settings=_settings_of(methods or usual, pairs), **grid).runs()
    store, jobs = Store(out / "runs"), jobs or default_jobs(device)
    if dry_run:
        _print_plan(runs, store, jobs)
        return
    machines = Machines(
        executor=executor, jobs=jobs, device=device, data=data, workers=workers, address=address,
        gpus_per_run=gpus_per_run,
    )  # fmt: skip
    records = run_all(runs, store, machines)
    if any(record["status"] == "complete" for record in records):
        _write_report([store.folder], out)
    failed = [record for record in records if record["status"] == "failed"]
    if failed:
        raise PerlclipError(f"{len(failed)} of {len(records)} runs failed, the first with: {failed[0]['error']}")


def _settings_of(methods: Sequence[str], pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--set` for several methods: each gets what it has, and every setting must be somebody's."""
    from dataclasses import fields

    from perlclip.errors import unknown_name
    from perlclip.methods import method_class

    known = {method: {f.name for f in fields(method_class(method).config_class)} for method in methods}
    for pair in pairs:
        name = pair.partition("=")[0]
        if not any(name in names for names in known.values()):
            raise unknown_name("setting of these methods:", name, set().union(*known.values()))
    return {
        method: _settings(method, [pair for pair in pairs if pair.partition("=")[0] in names])
        for method, names in known.items()
    }


def _print_plan(runs: "Sequence[Run]", store: "Store", jobs: int) -> None:
    from perlclip.executor import complete, estimate
    from perlclip.perform import Workspace, resolve

    workspace, stored = Workspace(), store.records()
    done = complete({run: resolve(run, workspace) for run in runs}, store)
    todo = [run for run in runs if run not in done]
    for run in todo:
        click.echo(run.name)
    seconds = estimate(todo, stored.complete, jobs)
    time = "an unknown time" if seconds is None else f"about {seconds / 60:.1f} min"
    click.echo(f"{len(runs)} runs: {len(done)} complete, {len(todo)} to do, {time} with --jobs {jobs}")
    if stored.failed or stored.damaged:
        click.echo(f"in the store: {len(stored.failed)} failed and {len(stored.damaged)} damaged records", err=True)


@main.group()
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
@click.option("--shots", type=POSITIVE, default=16, show_default=True, help="Training images of each class.")
@click.option("--seed", type=SEED, default=1, show_default=True, help="CoOp's are 1, 2 and 3.")
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


@main.command()
@click.argument("runs", type=FOLDER, nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for report.md, index.html, tables and figures.")
def report(runs: tuple[Path, ...], out: Path) -> None:
    """Tables and figures of all RUNS (folders of `perlclip bench`), beside the paper's numbers."""
    _write_report(runs, out)


def _write_report(runs: Sequence[Path], out: Path) -> None:
    from perlclip.report.write import write_report

    click.echo(write_report(runs, out).summary)
    click.echo(f"report: {out / 'report.md'}   page: {out / 'index.html'}   tables: {out / 'tables'}")


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


@main.command()
@click.argument("adapter", type=FOLDER)
@click.argument("images", nargs=-1, required=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for a PNG, an SVG and a JSON file of each image.")
@click.option("--class", "shown", default="", metavar="NAME", help="Map this class instead of the first answer.")
@click.option("--class-names", type=FOLDER, help="Other classes than the adapter's: a name a line, or a JSON list.")
@_look_options
@_backbone_options
def explain(
    adapter: Path, images: tuple[str, ...], out: Path, shown: str, class_names: Path | None, how: str,
    template: str | None, backbone: str | None, device: str, precision: str,
) -> None:  # fmt: skip
    """How a PERL ADAPTER came to its answer on IMAGES: confidence and evidence at every step."""
    from perlclip.analysis import explain as explain_images

    paths, names = _image_paths(images), _name_list(class_names)
    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=precision)
    cases = explain_images(loaded, paths, out, how=how, shown=shown, class_names=names, template=template)
    for path, case in zip(paths, cases, strict=True):
        click.echo(f"{path}\t" + " → ".join(case.answers))
    click.echo(f"figures: {out}")


@main.command()
@click.argument("adapter", type=FOLDER, metavar="ADAPTER|STORE")
@click.argument("data", required=False)
@click.option(
    "--out", type=FOLDER, required=True, help="Folder for page, figures and tables; it also makes it resumable."
)
@click.option("--max-images", type=POSITIVE, help="So many at most, drawn at random: 1000; of a STORE 200 a test set.")
@click.option("--cases", type=NATURAL, default=6, show_default=True, help="Images of each transition in the gallery.")
@click.option("--split", help="train, val or test, where DATA is split.")
@click.option("--class-names", type=FOLDER, help="File with names for DATA's classes, as for `perlclip eval`.")
@click.option("--data", "root", type=FOLDER, metavar="ROOT", help="Of a STORE of suite coop: where the data sets are.")
@_look_options
@_backbone_options
@_workers_option
def analyze(adapter: Path, data: str | None, out: Path, root: Path | None, device: str, **options: Any) -> None:
    """Metrics, drift and evidence by step of a PERL ADAPTER on DATA, or of all PERL runs of a STORE.

    DATA is a folder of class folders, a CSV manifest, or a drawn set: toybox:tiny_toys, toybox:tiny_toys/novel. A
    STORE is a folder of `perlclip bench`. Stopped? The same command goes on.
    """
    if data is not None:
        _analyze_data(adapter, data, out, device, **options)
        return
    from perlclip.analysis import analyze_store

    if not adapter.is_dir() or next(adapter.rglob("run.json"), None) is None:
        raise PerlclipError(f"{adapter} is no folder of runs; to analyze an adapter, name DATA as well")
    limit = {"images": options["max_images"]} if options["max_images"] else {}
    averages = analyze_store(adapter, out, device=device, root=root, workers=options["workers"], **limit)
    for setting, found in averages.items():
        click.echo(f"{setting}: accuracy " + " → ".join(f"{value:.1f}" for value in found["accuracy"].mean))
    click.echo(f"page: {out / 'index.html'}   numbers: {out / 'settings.csv'}")


def _analyze_data(
    adapter: Path, data: str, out: Path, device: str, *, max_images: int | None, cases: int, split: str | None,
    class_names: Path | None, template: str | None, backbone: str | None, how: str, precision: str, workers: int,
) -> None:  # fmt: skip
    from perlclip.analysis.dynamics import require_perl
    from perlclip.analysis.sources import labelled_images
    from perlclip.analysis.study import MAX_IMAGES, findings
    from perlclip.analysis.study import analyze as analyze_images
    from perlclip.data import read_class_names

    loaded = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=precision)
    require_perl(loaded.method)
    names = read_class_names(class_names) if class_names else None
    images = labelled_images(data, loaded, split=split, class_names=names, template=template)
    study = analyze_images(
        loaded, images, out, max_images=max_images or MAX_IMAGES, cases=cases, how=how, workers=workers
    )
    for sentence in findings(study):
        click.echo(sentence)
    click.echo(f"page: {out / 'index.html'}   numbers: {out / 'analysis.json'}")
