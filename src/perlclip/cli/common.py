"""What several commands share: options, how words become paths, names and settings, and tables on the console."""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from perlclip.errors import PerlclipError

FOLDER = click.Path(path_type=Path)
NATURAL, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
SEED = click.IntRange(0, 2**63 - 1)
BACKBONE = "openai/clip-vit-base-patch16"


def workers_option(command: Any) -> Any:
    """`--workers`."""
    option = click.option("--workers", type=NATURAL, default=0, show_default=True, help="Processes that decode images.")
    return option(command)


def backbone_options(command: Any) -> Any:
    """`--device` and `--dtype`."""
    for option in (
        click.option(
            "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True,
            help="What the frozen towers compute in.",
        ),
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, mps or auto."),
    ):  # fmt: skip
        command = option(command)
    return command


def data_option(command: Any) -> Any:
    """`--data`."""
    option = click.option(
        "--data", "root", type=FOLDER, metavar="ROOT", help="Folder that holds the data sets' folders, for coop:NAME."
    )
    return option(command)


def compile_option(command: Any) -> Any:
    """`--compile`."""
    option = click.option(
        "--compile", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
        help="Record training steps and small batches as CUDA graphs; auto: where there is CUDA.",
    )  # fmt: skip
    return option(command)


def steps_options(command: Any) -> Any:
    """`--steps` and `--max-mean-steps`."""
    for option in (
        click.option(
            "--max-mean-steps", type=float, metavar="X", help="At most so many refinement steps per image, on average."
        ),
        click.option(
            "--steps", callback=_steps, metavar="N|adaptive",
            help="Refinement steps of PERL: a number, or as many as each image needs; all if not given.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def _steps(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    if value is None or value == "adaptive":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a whole number nor 'adaptive'", ctx, param)
    return int(value)


def method_settings(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """`steps=2` as the type that the method's setting has."""
    from dataclasses import fields

    from perlclip.errors import unknown_name
    from perlclip.methods import method_class
    from perlclip.methods.settings import parse_setting

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


def image_paths(given: Sequence[str]) -> list[Path]:
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


def name_list(path: Path | None) -> list[str] | None:
    """The class names in a file, which must be in order here."""
    from perlclip.data import read_class_names

    names = read_class_names(path) if path else None
    if isinstance(names, dict):
        raise PerlclipError(f"{path} must hold a list of class names here, not an object")
    return names


def table_of(*columns: str) -> Any:
    """An empty table with these columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def console() -> Any:
    """Where tables are printed."""
    from rich.console import Console

    # In a pipe there is no terminal width to respect: let rows be as long as they are.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
