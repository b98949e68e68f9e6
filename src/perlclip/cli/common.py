"""What several commands share: options, how words become paths, names and settings, and tables on the console."""

import glob
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perlclip.errors import PerlclipError

if TYPE_CHECKING:
    from perlclip.data import Unreadable

FOLDER = click.Path(path_type=Path)
SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)
NATURAL, POSITIVE = click.IntRange(min=0), click.IntRange(min=1)
SEED = click.IntRange(0, 2**63 - 1)
MAX_LIST = 2**28  # bytes of paths on stdin
BACKBONE = "openai/clip-vit-base-patch16"
LISTED = 20  # images that could not be read, on the screen
# In Python an error stops: nobody overlooks it. Here the list and the exit code are not overlooked, and a night's work
# is not lost for one file.
ON_ERROR = click.option(
    "--on-error", type=click.Choice(["stop", "skip"]), default="skip",
    help="An image that cannot be read ends the command, or is left out: listed, and exit code 1 at the end.",
)  # fmt: skip


def _steps(ctx: click.Context, param: click.Parameter, value: str | None) -> Any:
    if value is None or value == "adaptive":
        return value
    if not value.isdecimal():
        raise click.BadParameter(f"{value!r} is neither a whole number nor 'adaptive'", ctx, param)
    return int(value)


class _ClassNames(click.Path):
    """A file of class names: a list, or unless it must be `listed` an object from folder to name."""

    def __init__(self, listed: bool = False) -> None:
        super().__init__()
        self.listed = listed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from perlclip.data import read_class_names

        names = read_class_names(value)
        if self.listed and isinstance(names, dict):
            raise PerlclipError(f"{value} must hold a list of class names here, not an object")
        return names


CLASS_NAMES, CLASS_LIST = _ClassNames(), _ClassNames(listed=True)
_SHARED = {
    "device": click.option("--device", default="auto", help="cpu, cuda, cuda:1, mps or auto."),
    "dtype": click.option(
        "--dtype", type=click.Choice(["float32", "bfloat16", "float16", "float8", "int8"]), default="float32",
        help="What the frozen towers compute in; int8 is for CPUs, float8 for CUDA from Hopper on.",
    ),
    "workers": click.option("--workers", type=NATURAL, default=0, help="Processes that decode images."),
    "compile": click.option(
        "--compile", type=click.Choice(["auto", "on", "off"]), default="auto",
        help="Record training steps and small batches as CUDA graphs; auto: where there is CUDA.",
    ),
    "data": click.option(
        "--data", "root", type=FOLDER, metavar="ROOT", help="Folder that holds the data sets' folders, for coop:NAME."
    ),
    "steps": click.option(
        "--steps", callback=_steps, metavar="N|adaptive",
        help="Refinement steps of PERL: a number, or as many as each image needs; all if not given.",
    ),
    "max-mean-steps": click.option(
        "--max-mean-steps", type=float, metavar="X", help="At most so many refinement steps per image, on average."
    ),
    "class-names": click.option(
        "--class-names", type=CLASS_LIST,
        help="Other classes than the adapter's: a name a line, or a JSON list.",
    ),
    "head": click.option(
        "--head/--no-head", default=True, help="Answer with the adapter's head, or with its texts alone."
    ),
    "template": click.option("--template", help="Another prompt than the adapter's."),
    "backbone": click.option("--backbone", help="Where the adapter's backbone is, if not under the name it gives."),
    "on-error": click.option(
        "--on-error", type=click.Choice(["stop", "skip"]), default="stop",
        help="An image that cannot be read ends the command, or is left out: listed, and exit code 1 at the end.",
    ),
    "how": click.option(
        "--how", type=click.Choice(["gradient", "occlusion"]), default="gradient",
        help="Evidence maps: gradient x activation where thoughts enter, or by hiding patch after patch (slow).",
    ),
}  # fmt: skip


def options(*names: str) -> Callable[[Any], Any]:
    """Options that several commands have, in this order."""

    def add(command: Any) -> Any:
        for name in reversed(names):
            command = _SHARED[name](command)
        return command

    return add


def method_settings(methods: Sequence[str], pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`steps=2` as the type that the setting has, for those of the methods that have it: it must be somebody's."""
    from perlclip.errors import unknown_name
    from perlclip.methods import method_class
    from perlclip.methods.settings import parse_setting, setting_types

    configs = {method: method_class(method).config_class for method in methods}
    settings: dict[str, dict[str, Any]] = {method: {} for method in methods}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator:
            raise PerlclipError(f"--set takes NAME=VALUE, got {pair!r}")
        having = [method for method, config in configs.items() if name in setting_types(config)]
        if not having:
            whose = f"method {methods[0]!r}" if len(methods) == 1 else "these methods"
            known = {name for config in configs.values() for name in setting_types(config)}
            raise unknown_name(f"setting of {whose}:", name, known)
        for method in having:
            settings[method][name] = parse_setting(configs[method], name, text)
    return settings


def image_paths(given: Sequence[str]) -> list[Path]:
    """Files as they are, folders and globs opened up; `-` is a path on each line of stdin."""
    from perlclip.data.images import images_under

    paths: list[Path] = []
    listed = _from_stdin() if "-" in given else []
    for item, named in chain.from_iterable(listed if item == "-" else [(item, False)] for item in given):
        literal = named or (item and (Path(item).exists() or not glob.has_magic(item)))
        matches = [Path(item)] if literal else sorted(map(Path, glob.glob(item, recursive=True)))
        if not matches:
            raise PerlclipError(f"no file matches {item!r}")
        for path in matches:
            if not path.exists():
                raise PerlclipError(f"no such image: {path}")
            found = images_under(path) if path.is_dir() else [path]
            if not found:
                raise PerlclipError(f"folder {path} holds no images")
            paths += found
    return paths


def _from_stdin() -> list[tuple[str, bool]]:
    """Paths as `find` prints them, with `-print0` as well; none of them is a glob."""
    content = sys.stdin.buffer.read(MAX_LIST + 1)
    if len(content) > MAX_LIST:
        raise PerlclipError(f"more than {MAX_LIST // 2**20} MiB of paths on stdin")
    lines = content.split(b"\0") if b"\0" in content else content.splitlines()
    found = [(os.fsdecode(line), True) for line in lines if line.strip()]
    if not found:
        raise PerlclipError("no paths on stdin")
    return found


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on the console."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # In a pipe there is no terminal width to respect: let rows be as long as they are.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def fail_for(skipped: "Sequence[Unreadable]", total: int) -> None:
    """Say what was left out, and fail for it."""
    if len(skipped) == 1:
        raise PerlclipError(f"skipped 1 of {total} images: {skipped[0].reason}")
    for one in skipped[:LISTED]:
        click.echo(f"skipped: {one.reason}", err=True)
    if len(skipped) > LISTED:
        click.echo(f"… and {len(skipped) - LISTED} more", err=True)
    if skipped:
        raise PerlclipError(f"skipped {len(skipped)} of {total} images, which cannot be read")


def check_ending(path: Path | None, *endings: str) -> None:
    """Fail before the work is done, not after it."""
    from perlclip.files import require_writable

    if path and path.suffix.lower() not in endings:
        raise PerlclipError(f"cannot tell what to write to {path}: its name must end in {' or '.join(endings)}")
    if path:
        require_writable(path.parent)
