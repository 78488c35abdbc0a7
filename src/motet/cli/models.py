"""`motet models`: downloads and lists models."""

from typing import Annotated

import typer

from motet.log import notice
from motet.models.model_source import kept_models, resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

GB = 10**9


def pull(
    name: Annotated[str, typer.Argument(help="Hugging Face model (org/name) or smollm2.")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hugging Face Hub.")] = None,
) -> None:
    """Download a model unless it is on this machine, and print its folder."""
    typer.echo(resolve(name, cache=cache_folder(environment()), revision=revision, say=notice))


def list_models() -> None:
    """List the models on this machine."""
    kept = kept_models(cache_folder(environment()))
    width = max(len(model.name) for model in kept)
    for model in kept:
        size = f"{model.size_bytes / GB:.2f} GB" if model.size_bytes else "not downloaded (motet models pull)"
        typer.echo(f"{model.name:<{width}}  {size:>8}  {model.path}")
