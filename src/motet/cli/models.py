"""`motet models`: fetch a model before it is needed, and see what is here."""

from typing import Annotated

import typer

from motet.config import cache_folder, environment
from motet.models import resolve
from motet.models.kept import KeptModel, kept_models
from motet.models.smollm2 import DEFAULT_MODEL

GB = 10**9

models = typer.Typer(help="Fetch models and list them.", no_args_is_help=True)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="A hub name (org/name) or smollm2.")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
) -> None:
    """Fetch a model unless it is here, and print its folder."""
    source = resolve(name, cache=cache_folder(environment()), revision=revision, say=say)
    typer.echo(source.path)


@models.command("list")
def list_models() -> None:
    """List the models on this machine."""
    models = kept_models(cache_folder(environment()))
    width = max(len(model.name) for model in models)
    for model in models:
        typer.echo(f"{model.name:<{width}}  {size_of(model):>8}  {model.path}")


def size_of(model: KeptModel) -> str:
    return f"{model.size_bytes / GB:.2f} GB" if model.size_bytes else "not here yet (motet models pull)"


def say(line: str) -> None:
    typer.echo(line, err=True)
