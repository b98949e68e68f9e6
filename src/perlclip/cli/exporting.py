"""Out of Python: `perlclip export`."""

from pathlib import Path
from typing import Any

import click

import perlclip
from perlclip.cli.common import FOLDER, NATURAL, check_ending, options
from perlclip.errors import PerlclipError


@click.command()
@click.argument("what", metavar="BACKBONE|ADAPTER…", nargs=-1, required=True)
@click.option(
    "--out", type=FOLDER, required=True, metavar="FILE",
    help="FILE.onnx of a backbone, FILE.npz of an adapter; FILE.html for the web.",
)  # fmt: skip
@click.option("--format", "form", type=click.Choice(["onnx", "web"]), default="onnx", help="What the file is for.")
@click.option("--steps", type=NATURAL, default=4, help="Of a backbone: steps that are written out.")
@click.option("--depth", type=NATURAL, default=7, help="Of a backbone: blocks before the thoughts enter.")
@click.option(
    "--int8", type=click.Choice(["weights", "products"]),
    help="Of a backbone or a page: weights in int8, a quarter of the size; or products: faster, less exact.",
)  # fmt: skip
@click.option("--runtime", type=FOLDER, help="Of a page: npm's onnxruntime-web, its folder or the .tgz of `npm pack`.")
@click.option("--examples", metavar="DATA", help="Of a page: images to try, from a folder, toybox:NAME, …")
@options("class-names", "template", "backbone", "head")
def export(
    what: tuple[str, ...], out: Path, form: str, steps: int, depth: int, int8: str | None, runtime: Path | None,
    examples: str | None, class_names: Any, template: str | None, backbone: str | None, head: bool,
) -> None:  # fmt: skip
    """Write a BACKBONE as one ONNX file that takes adapters as inputs, or an ADAPTER as the arrays that it takes.

    With --format web, one or more ADAPTERs of one backbone as a page that needs nothing else: drop an image, see the
    steps. docs/onnx.md says what goes in and comes out; examples/onnx_predict.py runs both without torch.
    """
    adapters = [each for each in what if (Path(each) / "adapter_config.json").is_file()]
    asked: dict[str, Any] = {"class_names": class_names, "template": template, "head": head}
    if form == "web":
        _export_page(what, adapters, out, runtime, examples, backbone, asked | {"int8": int8})
    elif runtime or examples or len(what) > 1:
        raise PerlclipError("runtime, examples and more than one adapter are a page's: --format web")
    elif adapters:
        from perlclip.export.adapter_arrays import export_adapter

        check_ending(out, ".npz")
        export_adapter(perlclip.load_adapter(what[0], backbone=backbone, device="cpu"), out, **asked)
    else:
        from perlclip.export.onnx_graph import export_backbone

        if class_names or template or backbone or not head:
            raise PerlclipError(f"class names, template, backbone and head are an adapter's, and {what[0]} is none")
        check_ending(out, ".onnx")
        export_backbone(perlclip.load_backbone(what[0], device="cpu"), out, steps=steps, depth=depth, int8=int8)
    click.echo(f"{out}: {out.stat().st_size / 1e6:,.1f} MB")


def _export_page(
    what: tuple[str, ...], adapters: list[str], out: Path, runtime: Path | None, examples: str | None,
    backbone: str | None, asked: dict[str, Any],
) -> None:  # fmt: skip
    from perlclip.export.web_page import MISSING, export_page

    check_ending(out, ".html")
    if other := [each for each in what if each not in adapters]:
        raise PerlclipError(f"a page is made of adapters, and {other[0]} is none")
    if runtime is None:
        raise PerlclipError(f"--runtime is missing; {MISSING}")
    loaded = [perlclip.load_adapter(adapters[0], backbone=backbone, device="cpu")]
    loaded += [perlclip.load_adapter(each, backbone=loaded[0].method.backbone) for each in adapters[1:]]
    names = [Path(each).resolve().name for each in adapters]
    images = perlclip.load_images(examples).images if examples else ()
    export_page(loaded, out, runtime=runtime, names=names, examples=images, **asked)
