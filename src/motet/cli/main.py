"""The command `motet`: its subcommands, and the translation of expected errors into one line and an exit code.

The table `COMMANDS` has all that `motet --help` and shell completion need, so that a command's module is only imported
when the command runs."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from motet import __version__
from motet.cli.help import CONTEXT, PlainCommand, wants_color, write_examples, write_options
from motet.cli.interrupts import INTERRUPTED
from motet.errors import ConfigError, MotetError, StartupError
from motet.log import capture_process, failure, setup_logging
from motet.settings.resolve import logging_choice
from motet.settings.server_config import environment
from motet.settings.vllm_flags import ADVICE

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base of the errors of a command line that cannot be parsed; typer does not export it."""


@dataclass(frozen=True)
class CommandEntry:
    """A subcommand that is imported when it runs."""

    function: str
    """Module and name of its function."""
    summary: str
    """First sentence of its help."""
    examples: Sequence[str]
    imports_later: bool = False
    """See `PlainCommand`."""


COMMANDS: Mapping[str, CommandEntry] = {
    "serve": CommandEntry(
        "motet.cli.server_commands:serve",
        "Serve a model over the OpenAI API.",
        (
            "motet serve                                # the default model, at port 8000",
            "motet serve org/name --port 9000 --api-key KEY",
            "motet serve ./folder --prefill 1 --decode 2",
        ),
        imports_later=True,
    ),
    "gateway": CommandEntry(
        "motet.cli.server_commands:gateway",
        "Serve the OpenAI API in front of other servers, its workers.",
        (
            "motet gateway --worker http://10.0.0.1:8000 --worker http://10.0.0.2:8000",
            "motet gateway --workers-file workers.txt --port 9000",
            "motet gateway --worker http://10.0.0.1:8000,prefill,vllm \\",
            "              --worker http://10.0.0.2:8000,decode,vllm",
        ),
        imports_later=True,
    ),
    "ray": CommandEntry(
        "motet.cli.server_commands:ray",
        "Serve a model with prefill and decode replicas on Ray Serve.",
        (
            "motet ray org/name --prefill 1 --decode 2",
            "motet ray org/name --decode 4 --gpus-per-worker 1 --ray-address auto",
            "motet ray org/name --decode 2 --print-config > config.yaml",
        ),
        imports_later=True,
    ),
    "chat": CommandEntry(
        "motet.cli.chat:chat",
        "Chat with a model and watch n answers being generated side by side.",
        (
            "motet chat                                 # starts a server of its own",
            'motet chat "Name three rivers." -n 8 --url http://127.0.0.1:8000',
        ),
    ),
    "batch": CommandEntry(
        "motet.cli.batch.command:batch",
        "Complete a file of requests, and continue after any interruption.",
        (
            "motet batch requests.jsonl -o results.jsonl smollm2",
            "motet batch requests.jsonl -o results.jsonl org/name --max-num-seqs 128",
            "motet batch requests.jsonl -o results.jsonl --url http://127.0.0.1:8000",
        ),
    ),
    "demo": CommandEntry(
        "motet.cli.demo.command:demo",
        "Start a server, send one prompt, watch n answers, kill an engine, and see the cost.",
        ("motet demo", "motet demo --model ./folder -n 16", "motet demo --json > figures.json"),
    ),
    "doctor": CommandEntry(
        "motet.cli.doctor:doctor",
        "Check what a server needs on this machine, and say what to do.",
        ("motet doctor", "motet doctor org/name --host 0.0.0.0 --port 9000", "motet doctor --json"),
    ),
    "version": CommandEntry("motet.cli.main:version", "Print the version.", ("motet version",)),
}
MODELS: Mapping[str, CommandEntry] = {
    "pull": CommandEntry(
        "motet.cli.models:pull",
        "Download a model unless it is on this machine, and print its folder.",
        ("motet models pull", "motet models pull org/name --revision main"),
    ),
    "list": CommandEntry("motet.cli.models:list_models", "List the models on this machine.", ("motet models list",)),
}


class LazyGroup(TyperGroup):
    """A command with subcommands that are imported when they run."""

    entries: Mapping[str, CommandEntry] = {}
    examples: Sequence[str] = ()

    def add_entries(self, entries: Mapping[str, CommandEntry]) -> None:
        """Adds each command with its summary, which is all that this group's help and completion need."""
        self.entries = entries
        for name, entry in entries.items():
            self.add_command(PlainCommand(name, help=entry.summary), name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(name, self.entries[name]) if name is not None and name in self.entries else command, rest

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_examples(formatter, self.examples)
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])
        write_options(self, ctx, formatter=formatter)


class Motet(LazyGroup):
    """Prints an expected error as one line on standard error. Only unexpected errors have a traceback."""

    examples = ("motet demo", "motet serve", "motet serve --help")

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        models = LazyGroup(name="models", help="Download and list models.", context_settings=CONTEXT)
        models.examples = [example for entry in MODELS.values() for example in entry.examples]
        models.add_entries(MODELS)
        self.add_entries(COMMANDS)
        self.add_command(models)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **more: Any) -> NoReturn:  # type: ignore[override]
        """Runs the command, and ends the process with its exit code."""
        args = sys.argv[1:] if args is None else args
        format, level = logging_choice(given(args), environ=environment())
        setup_logging(format=format, level=level, color=wants_color(), notices_only=True)
        try:
            code = super().main(args, prog_name, standalone_mode=False)
        except USAGE_ERROR as error:
            failure(usage_message(error))
            code = ConfigError.exit_code
        except MotetError as error:
            failure(error.message)
            code = error.exit_code if isinstance(error, StartupError) else StartupError.exit_code
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


@cache
def load(name: str, entry: CommandEntry) -> PlainCommand:
    """Imports a command."""
    module, _, function = entry.function.partition(":")
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    single.command(name, cls=PlainCommand, context_settings=CONTEXT)(getattr(importlib.import_module(module), function))
    command = typer.main.get_command(single)
    assert isinstance(command, PlainCommand)
    for param in command.params:
        if param.param_type_name == "argument":
            param.metavar = param.metavar or str(param.name).upper()
    command.examples, command.imports_later = entry.examples, entry.imports_later
    return command


def given(args: Sequence[str]) -> Mapping[str, str]:
    """Returns the values of `--name VALUE` and `--name=VALUE` by name, before the arguments have been parsed."""
    found: dict[str, str] = {}
    for argument, following in pairwise([*args, ""]):
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            found[flag.removeprefix("--").replace("-", "_")] = value if equals else following
    return found


def usage_message(error: Any) -> str:
    """Returns an error of typer as one line, with the command whose help explains the options."""
    message = " ".join(error.format_message().split())
    if advice := ADVICE.get(getattr(error, "option_name", "")):
        message = f"No such option: {error.option_name}, which vLLM has: {advice}"
    return f"{message} ({error.ctx.command_path} --help)" if error.ctx is not None else message


def print_version(requested: bool) -> None:
    if requested:
        version()
        raise typer.Exit


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


app = typer.Typer(
    cls=Motet, context_settings=CONTEXT, rich_markup_mode=None, add_completion=True, pretty_exceptions_enable=False
)


@app.callback()
def motet(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """An OpenAI-compatible LLM server for many samples of one prompt."""


def run() -> NoReturn:
    """Runs the command of this process's arguments."""
    setup_logging()
    capture_process()
    sys.exit(typer.main.get_command(app).main(prog_name="motet"))
