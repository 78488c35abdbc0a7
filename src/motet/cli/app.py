"""The command `motet`: gathers its commands, and turns errors that were foreseen into one line and an exit code."""

from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from motet import __version__
from motet.cli.chat import chat
from motet.cli.demo import demo
from motet.cli.gateway import gateway
from motet.cli.models import models
from motet.cli.ray import ray
from motet.cli.serve import serve
from motet.errors import MotetError, StartupError

INTERRUPTED = 130


class Motet(TyperGroup):
    """Says what went wrong in one line on standard error; a traceback is for errors nobody foresaw."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MotetError as exc:
            Console(stderr=True, soft_wrap=True).print(
                "motet:", exc.message, style="red", markup=False, highlight=False
            )
            code = exc.exit_code if isinstance(exc, StartupError) else StartupError.exit_code
            raise typer.Exit(code) from exc
        except KeyboardInterrupt as exc:
            raise typer.Exit(INTERRUPTED) from exc


app = typer.Typer(
    cls=Motet,
    help="An OpenAI-compatible LLM server for many samples of one prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(gateway)
app.command()(ray)
app.add_typer(models, name="models")
app.command()(chat)
app.command()(demo)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
