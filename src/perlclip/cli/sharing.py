"""Adapters on the Hugging Face hub: `perlclip push | pull`."""

from pathlib import Path

import click

import perlclip
from perlclip.cli.common import FOLDER


@click.command()
@click.argument("adapter", type=FOLDER)
@click.argument("repo", metavar="USER/REPO")
@click.option("--private", is_flag=True, help="Make the repository a private one, if it is not there yet.")
@click.option("--message", default="Push an adapter of perlclip", help="Of the commit.")
@click.option("--dataset", metavar="NAME", help="What the hub calls the data that it was trained on.")
def push(adapter: Path, repo: str, private: bool, message: str, dataset: str | None) -> None:
    """Put an ADAPTER on the Hugging Face hub, as USER/REPO: its three files, in one commit.

    The token is the one of `hf auth login`, or of HF_TOKEN.
    """
    commit = perlclip.push_adapter(adapter, repo, private=private, message=message, dataset=dataset)
    click.echo(f"{repo}@{commit}")


@click.command()
@click.argument("repo", metavar="USER/REPO[@REVISION]")
@click.option("--out", type=FOLDER, required=True, metavar="DIR", help="Folder for the adapter.")
def pull(repo: str, out: Path) -> None:
    """Take an adapter from the Hugging Face hub, checked: its three files and nothing else.

    The commit is recorded in its config. `predict` and `eval` take USER/REPO[@REVISION] as well.
    """
    from perlclip.adapters.folder import HUB, read_info

    hub = read_info(perlclip.pull_adapter(repo, out))[HUB]
    click.echo(f"{out}: {hub['repo']}@{hub['revision']}")
