"""Out of Python: `perlclip export`."""

from pathlib import Path
from typing import Any

import click

import perlclip
from perlclip.cli.common import FOLDER, NATURAL, check_ending, options
from perlclip.errors import PerlclipError


@click.command()
@click.argument("what", metavar="BACKBONE|ADAPTER")
@click.option(
    "--out", type=FOLDER, required=True, metavar="FILE", help="FILE.onnx of a backbone, FILE.npz of an adapter."
)
@click.option("--format", "form", type=click.Choice(["onnx"]), default="onnx", help="What the files are for.")
@click.option("--steps", type=NATURAL, default=4, help="Of a backbone: steps that are written out.")
@click.option("--depth", type=NATURAL, default=7, help="Of a backbone: blocks before the thoughts enter.")
@click.option("--int8", is_flag=True, help="Of a backbone: matrix products in int8, a quarter of the size.")
@options("class-names", "template", "backbone", "head")
def export(
    what: str, out: Path, form: str, steps: int, depth: int, int8: bool, class_names: Any, template: str | None,
    backbone: str | None, head: bool,
) -> None:  # fmt: skip
    """Write a BACKBONE as one ONNX file that takes adapters as inputs, or an ADAPTER as the arrays that it takes.

    docs/onnx.md says what goes in and comes out; examples/onnx_predict.py runs both without torch.
    """
    if (Path(what) / "adapter_config.json").is_file():
        from perlclip.export.adapter_arrays import export_adapter

        check_ending(out, ".npz")
        adapter = perlclip.load_adapter(what, backbone=backbone, device="cpu")
        export_adapter(adapter, out, class_names=class_names, template=template, head=head)
    else:
        from perlclip.export.onnx_graph import export_backbone

        if class_names or template or backbone or not head:
            raise PerlclipError(f"class names, template, backbone and head are an adapter's, and {what} is none")
        check_ending(out, ".onnx")
        export_backbone(perlclip.load_backbone(what, device="cpu"), out, steps=steps, depth=depth, int8=int8)
    click.echo(f"{out}: {out.stat().st_size / 1e6:,.1f} MB")
