"""The command line: `perlclip fit | set-thresholds | calibrate | predict | eval | check | suggest | export | push |
pull | serve | studio | methods | inspect | demo | bench | data | report | explain | analyze`.

Only `click` is imported here and in the commands' modules at the top, so that `--help` answers at once. Errors of the
user's are one sentence and exit code 1, wrong usage is 2, Ctrl-C is 130, SIGTERM 143; `--debug` shows the traceback.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any

import click

import perlclip
from perlclip.cli.adapters import eval_, inspect, methods, predict
from perlclip.cli.exporting import export
from perlclip.cli.labelling import check, suggest
from perlclip.cli.look import analyze, explain
from perlclip.cli.research import bench, data, demo, report
from perlclip.cli.serving import serve
from perlclip.cli.sharing import pull, push
from perlclip.cli.studio import studio
from perlclip.cli.training import calibrate, fit, set_thresholds
from perlclip.errors import PerlclipError, Terminated


class _Commands(click.Group):
    """A group whose commands fail with one sentence."""

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.params.get("debug", False)
        try:
            with _quiet(debug), _sigterm_as_interrupt():
                return super().invoke(ctx)
        except BrokenPipeError:  # `| head` has seen enough; click ends quietly
            raise
        except (PerlclipError, OSError, KeyboardInterrupt, MemoryError, RuntimeError) as error:
            if debug or (isinstance(error, RuntimeError) and not _out_of_memory(error)):
                raise
            click.echo(f"error: {_sentence(error)}", err=True)
            ctx.exit(143 if isinstance(error, Terminated) else 130 if isinstance(error, KeyboardInterrupt) else 1)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """What ends with Ctrl-C ends so with SIGTERM, too: checkpoints are written, worker processes ended."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
        yield
        return

    def end(*_: object) -> None:
        raise Terminated("terminated")

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Other libraries' warnings are for programmers: what users have to know is said in our own words."""
    with warnings.catch_warnings():
        if not (debug or sys.warnoptions):
            warnings.simplefilter("ignore")
            for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
                os.environ.setdefault(name, "error")  # read when they are imported
        yield


def _out_of_memory(error: RuntimeError) -> bool:
    """torch has no class of its own for this on the CPU."""
    text = str(error)
    return any(words in text for words in ("out of memory", "not enough memory", "can't allocate memory"))


def _sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError | RuntimeError):
        return f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more to be had'}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error) or "interrupted"


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(perlclip.__version__)
def main(debug: bool) -> None:
    """Adapt a frozen CLIP from a handful of images, and use what came out."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names of files may have bytes that are no text, consoles few letters
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace")


def _load_plugins(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> None:
    for name in names:
        perlclip.load_plugin(name)


PLUGIN = click.Option(
    ["--plugin"], multiple=True, metavar="MODULE|FILE", expose_value=False, is_eager=True, callback=_load_plugins,
    help="Module or .py file with methods of your own; may be repeated.",
)  # fmt: skip
for command in (
    fit, set_thresholds, calibrate, predict, eval_, check, suggest, export, methods, bench, explain, analyze, serve,
):  # fmt: skip
    command.params.append(PLUGIN)
MAKING, USING = (fit, set_thresholds, calibrate), (predict, eval_, inspect, check, suggest, export, serve, studio)
SHARING = (push, pull)
for command in (*MAKING, *USING, *SHARING, methods, bench, data, report, demo, explain, analyze):
    main.add_command(command)
