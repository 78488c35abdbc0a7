"""The flags of `motet serve`, `motet gateway` and `motet ray`: one for each setting, made from its declaration."""

import inspect
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Annotated

import typer

from motet.cli.help import HelpAll
from motet.errors import ConfigError
from motet.settings.declaration import Declaration, Panel, ServerCommand
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import SETTINGS, environment
from motet.settings.vllm_flags import ALIASES, listed

EVERY_FLAG = "Every setting can also be MOTET_<NAME> in the environment or a line of a TOML file (docs/settings.md)."
PARAMETERS_OF_ALL = ("settings", "stop_with_stdin")

Run = Callable[..., int]
"""Runs a server until it ends, as `run(settings, stop_with_stdin=...)`, and returns the exit code."""
ModelArgument = Annotated[
    str | None, typer.Argument(help=SETTINGS["model"].full_help, show_default=False, metavar="MODEL")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML file with settings (max_num_seqs = 64).", rich_help_panel=Panel.PROCESS),
]
StopWithStdin = Annotated[
    bool, typer.Option(hidden=True, help="End when standard input ends: for programs that start a server.")
]


def server_command(command: ServerCommand) -> Callable[[Run], Callable[..., None]]:
    """Returns a decorator that makes a command of a `Run`, with a flag for each setting and the flags of the `Run`."""
    flags = setting_flags(command)

    def make(run: Run) -> Callable[..., None]:
        def function(
            model_argument: ModelArgument = None,
            *,
            config: ConfigFile = None,
            help_all: HelpAll = False,
            stop_with_stdin: StopWithStdin = False,
            **flags: object,
        ) -> None:
            own = {name: value for name, value in flags.items() if name not in SETTINGS}
            chosen = given_settings(flags) | model_of(model_argument, flags.get("model"))
            settings = resolve_settings(chosen, environ=environment(), file=config, command=command)
            raise typer.Exit(run(settings, stop_with_stdin=stop_with_stdin, **own))

        common, own = inspect.signature(function).parameters, inspect.signature(run).parameters
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *([common["model_argument"]] if command in SETTINGS["model"].commands else []),
                *flags,
                *(flag for name, flag in own.items() if name not in PARAMETERS_OF_ALL),
                *(common[name] for name in ("config", "help_all", "stop_with_stdin")),
            ]
        )
        function.__name__, function.__doc__ = run.__name__, f"{inspect.getdoc(run)}\n\n{EVERY_FLAG}"
        return function

    return make


def setting_flags(command: ServerCommand, *, without: Container[str] = ()) -> list[inspect.Parameter]:
    """Returns a flag for each setting of a command, in the order of the panels. `without`: names of settings."""
    settings = [one for name, one in SETTINGS.items() if command in one.commands and name not in without]
    return [
        flag_parameter(setting.documented_for(command))
        for panel in Panel
        for setting in settings
        if setting.panel is panel
    ]


def flag_parameter(declared: Declaration) -> inspect.Parameter:
    """Returns the flag of a setting. Its default is None, so that only a given flag overrides file and environment.

    Values are texts here. They are converted where values from the environment are, with the same messages."""
    is_switch = declared.kind is bool
    names = [f"{declared.flag_for(True)}/{declared.flag_for(False)}" if is_switch else declared.flag]
    option = typer.Option(
        *names,
        *filter(None, [ALIASES.get(declared.name)]),
        metavar=None if is_switch else declared.placeholder,
        help=declared.full_help,
        rich_help_panel=declared.panel,
        show_default=False,
    )
    kind = bool if is_switch else list[str] if declared.is_list else str
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(declared.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def given_settings(flags: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that were given on the command line. Typer passes an empty list for an absent list flag."""
    given = {name: value for name, value in flags.items() if name in SETTINGS and value not in (None, [], ())}
    return given | {name: listed(value) for name, value in given.items() if name in ALIASES and isinstance(value, list)}


def model_of(argument: str | None, flag: object) -> dict[str, object]:
    """Returns the model as a setting; empty if it is not given. Raises ConfigError if it is given in two ways."""
    if argument is not None and flag is not None and argument != flag:
        raise ConfigError(f"MODEL {argument} and --model {flag} differ: give the model once")
    given = flag if argument is None else argument
    return {} if given is None else {"model": given}
