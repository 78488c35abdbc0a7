"""The command `motet`: its subcommands, and the translation of expected errors into one line and an exit code."""

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from motet import __version__
from motet.cli.chat import chat
from motet.cli.demo import demo
from motet.cli.servers import ServerHelp, gateway, ray, say, serve
from motet.errors import MotetError, StartupError
from motet.log import escaped
from motet.models.model_source import kept_models, resolve
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import cache_folder, environment

INTERRUPTED = 130
GB = 10**9


class Motet(TyperGroup):
    """Prints an expected error as one line on standard error. Only unexpected errors have a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MotetError as exc:
            message = escaped(exc.message, keep="\n")  # it can quote a worker
            Console(stderr=True, soft_wrap=True).print("motet:", message, style="red", markup=False, highlight=False)
            code = exc.exit_code if isinstance(exc, StartupError) else StartupError.exit_code
            raise typer.Exit(code) from exc
        except KeyboardInterrupt as exc:
            raise typer.Exit(INTERRUPTED) from exc


app = typer.Typer(
    cls=Motet,
    help="An OpenAI-compatible LLM server for many samples of one prompt.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (serve, gateway, ray):
    app.command(cls=ServerHelp, context_settings={"max_content_width": 120})(command)
app.command()(chat)
app.command()(demo)
models = typer.Typer(help="Download and list models.", no_args_is_help=True)
app.add_typer(models, name="models")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="Hugging Face model (org/name) or smollm2.")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hugging Face Hub.")] = None,
) -> None:
    """Download a model unless it is on this machine, and print its folder."""
    typer.echo(resolve(name, cache=cache_folder(environment()), revision=revision, say=say))


@models.command("list")
def list_models() -> None:
    """List the models on this machine."""
    kept = kept_models(cache_folder(environment()))
    width = max(len(model.name) for model in kept)
    for model in kept:
        size = f"{model.size_bytes / GB:.2f} GB" if model.size_bytes else "not downloaded (motet models pull)"
        typer.echo(f"{model.name:<{width}}  {size:>8}  {model.path}")
