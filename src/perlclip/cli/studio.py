"""`perlclip studio`: a page to label, train and look."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import perlclip
from perlclip.cli.common import BACKBONE, CLASS_LIST, FOLDER, POSITIVE, options
from perlclip.errors import PerlclipError, shell_word

if TYPE_CHECKING:
    from perlclip.studio.project import Labels

TOYS = Path("perlclip-toys")


@click.command()
@click.argument("images", type=FOLDER, required=False, metavar="[DIR]")
@click.option("--class-names", type=CLASS_LIST, help="Classes to start with: a name a line, or a JSON list.")
@click.option("--adapter", type=FOLDER, help="An adapter to start from: its classes, prompt, backbone and head.")
@click.option("--backbone", help=f"Hub name, Hugging Face folder, or 'tiny'; the adapter's, or {BACKBONE}.")
@click.option("--template", help="Prompt, in which {} is the class name.")
@click.option("--every", type=POSITIVE, default=10, help="Labels after which PERL is trained anew.")
@click.option("--recipe", help="How PERL is trained; 'strong' if not given.")
@click.option("--project", type=FOLDER, help="Where labels and all else is kept; DIR/.perlclip-studio if not given.")
@click.option("--out", type=FOLDER, help="Where an export is written; beside DIR, as DIR-adapter, if not given.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; wider than this machine only with a token.")
@click.option("--port", type=click.IntRange(0, 65535), default=8001, help="Port; 0 takes a free one.")
@click.option("--token", envvar="PERLCLIP_TOKEN", help="What a page must know to be let in; also PERLCLIP_TOKEN.")
@click.option("--name", "names", multiple=True, help="Another name it may be called by, as behind a proxy.")
@click.option("--open/--no-open", "show", default=True, help="Open the page in a browser.")
@options("device", "dtype")
def studio(
    images: Path | None, class_names: Any, adapter: Path | None, backbone: str | None, template: str | None, every: int,
    recipe: str | None, project: Path | None, out: Path | None, host: str, port: int, token: str | None,
    names: tuple[str, ...], show: bool, device: str, dtype: str,
) -> None:  # fmt: skip
    """Label the images of DIR in a browser, with PERL trained behind the page, and take an adapter home.

    Without DIR it opens on drawn toys, in the folder perlclip-toys. Every label is on disk at once: end it at any time
    and start it again.
    """
    from perlclip.serve.guard import Limits, names_of, run_server
    from perlclip.studio.interface import studio_app
    from perlclip.studio.project import Project
    from perlclip.studio.worker import Worker

    first: tuple[str, ...] = ()
    limits = Limits(host=host, port=port, token=token, names=names_of(names), seconds=120.0, drain_seconds=10.0)
    if images is None:
        from perlclip.studio.toys import draw_toys

        images, backbone, first = TOYS, backbone or ("tiny" if adapter is None else None), draw_toys(TOYS)
    start = perlclip.load_adapter(adapter, backbone=backbone, device=device, dtype=dtype) if adapter else None
    with Project(images, project) as opened:
        named = class_names or (start.class_names if start else first)
        prompt = template or (start.template if start else opened.labels().template)
        if opened.version and (class_names or template):
            _check_same(opened.labels(), class_names, template)
        tower = start.method.backbone if start else perlclip.load_backbone(backbone or BACKBONE, device, dtype)
        worker = Worker(opened, tower, every=every, out=out, recipe=recipe, start=start)
        if opened.version == 0 and named:
            worker.check_classes(named, prompt)
            opened.set_classes([(None, name) for name in named], prompt)
        elif opened.version == 0:
            opened.begin_with(prompt)
        worker.start()

        def ready(address: str) -> None:
            page = f"{address}/?token={token}" if token else address
            click.echo(f"{len(opened):,} images of {shell_word(images)}: {page}   (Ctrl-C ends; nothing is lost)")
            if show:
                webbrowser.open(page)

        try:
            run_server(studio_app(worker), limits, ready=ready)
        finally:
            worker.stop()


def _check_same(labels: "Labels", class_names: Any, template: str | None) -> None:
    """Classes are changed on the page, where labels given under their names can be seen."""
    same = not class_names or tuple(class_names) == labels.names
    if not same or template not in (None, labels.template):
        raise PerlclipError("the project has classes or a prompt of its own by now: change them on the page")
