"""`motet models`: downloads and lists models."""

from typing import Annotated

import typer

from motet.log import notice
from motet.models.model_source import kept_models, resolve
from motet.models.progress import size_text
from motet.models.progress_bars import terminal_progress
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment


def pull(
    name: Annotated[str, typer.Argument(help="Hugging Face model (org/name) or smollm2.")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hugging Face Hub.")] = None,
) -> None:
    """Download a model unless it is on this machine, and print its folder."""
    typer.echo(resolve(name, cache=cache_folder(environment()), revision=revision, progress=terminal_progress(notice)))


def list_models() -> None:
    """List the models on this machine."""
    kept = kept_models(cache_folder(environment()))
    sizes = [size_text(model.size_bytes) if model.size_bytes else "motet models pull" for model in kept]
    names, width = max(len(model.name) for model in kept), max(map(len, sizes))
    for model, size in zip(kept, sizes, strict=True):
        typer.echo(f"{model.name:<{names}}  {size:>{width}}  {model.path if model.size_bytes else '(not downloaded)'}")
