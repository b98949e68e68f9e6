"""Adapters as a service: `perlclip serve`."""

import gc
import os
from pathlib import Path
from typing import Any

import click

from perlclip.cli.common import FOLDER, POSITIVE, options

TOKEN = "PERLCLIP_TOKEN"  # noqa: S105 (the name of a variable, not a password)


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--host", default="127.0.0.1", help="Where to listen; beyond this machine a token is needed.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0: any that is free.")
@click.option("--name", "names", multiple=True, help="What it may be called by beside localhost, as behind a proxy.")
@click.option("--backbone", help="Hub name, Hugging Face folder, or 'tiny'; that of the first adapter if not given.")
@click.option("--batch-size", type=POSITIVE, default=32, help="Answers at once.")
@click.option("--max-wait-ms", type=click.FloatRange(0, 1000), default=2.0, help="For a batch to fill.")
@click.option("--max-rows", type=POSITIVE, default=1024, help="Answers that may wait; beyond that it says 503.")
@click.option("--workers", type=POSITIVE, default=2, help="Processes that decode images.")
@click.option("--cache-mib", type=POSITIVE, default=1024, help="Memory for loaded adapters and their classes.")
@click.option("--max-body-mib", type=POSITIVE, default=32, help="Of one request.")
@click.option("--max-pixels", type=POSITIVE, default=50_000_000, help="Of one image.")
@click.option("--seconds", type=click.FloatRange(0.1), default=30.0, help="That a request may take.")
@options("device", "dtype")
def serve(
    folder: Path, host: str, port: int, names: tuple[str, ...], backbone: str | None, cache_mib: int, max_body_mib: int,
    seconds: float, device: str, dtype: str, **config: Any,
) -> None:  # fmt: skip
    """Serve the adapters in FOLDER, each a folder as `fit` writes it, over HTTP; docs/serving.md says how to ask.

    The token is taken from the environment variable PERLCLIP_TOKEN; where it is needed and not given, one is made and
    printed. SIGTERM and Ctrl-C let it finish what it has begun.
    """
    from perlclip.files import MIB
    from perlclip.serve.decode_pool import prepare_decoders
    from perlclip.serve.guard import Limits, is_loopback, names_of, new_token, run_server
    from perlclip.serve.routes import make_app
    from perlclip.serve.service import Service, ServiceConfig, find_backbone

    token = os.environ.get(TOKEN) or (None if is_loopback(host) else new_token())
    limits = Limits(
        host=host, port=port, token=token, names=names_of(names), max_body=max_body_mib * MIB, seconds=seconds
    )
    prepare_decoders()
    found = find_backbone(folder, backbone, device=device, dtype=dtype)
    gc.freeze()  # what is there now stays: Python need not look through it again and again for what can go
    service = Service(folder, found, ServiceConfig(cache_bytes=cache_mib * MIB, **config))

    def ready(address: str) -> None:
        click.echo(f"{len(service.shelf.names())} adapters on {found.name} ({found.device}): {address}")
        if token and TOKEN not in os.environ:
            click.echo(f"token: {token}")

    try:
        run_server(make_app(service), limits, ready=ready)
    finally:
        service.close()
