"""The style of all `--help` pages: plain text that fits in 80 columns, with examples before the options.

`motet serve --help` shows the settings that people need first, `--help-all` shows all settings, in panels."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from motet.cli.interrupts import raise_interrupts
from motet.settings.declaration import Declaration, ServerCommand
from motet.settings.server_config import SETTINGS, environment
from motet.settings.vllm_flags import without_unused

CONTEXT = {"max_content_width": 120, "help_option_names": ["-h", "--help"]}
"""Typer's settings of all commands."""
SHOW_ALL = "motet.show_all"
COMMON = "Common settings"
WITH_SETTINGS = (*ServerCommand, "batch")
"""Commands that have the settings of a server as flags."""


class PlainCommand(TyperCommand):
    """A command whose help page has this style."""

    examples: Sequence[str] = ()
    imports_later: bool = False
    """True if the command imports modules when its settings are known, and calls `raise_interrupts` itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, without_unused(args) if self.name in WITH_SETTINGS else args)

    def invoke(self, ctx: Any) -> Any:
        if not self.imports_later:
            raise_interrupts()
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_examples(formatter, self.examples)
        self.format_options(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self, ctx, formatter=formatter)


def write_options(command: Any, ctx: Any, *, formatter: Any) -> None:
    every = ctx.meta.get(SHOW_ALL, False)
    panels: dict[str, list[tuple[str, str]]] = {}
    shown = [param for param in command.get_params(ctx) if not param.hidden]
    for param in shown:
        if every or is_common(param):
            panels.setdefault(panel_of(param, every=every), []).append((names_of(param), meaning_of(param)))
    for name in sorted(panels, key=lambda name: name == "Options"):  # `--help` comes last
        with formatter.section(name):
            formatter.write_dl(panels[name])
    if hidden := sum(not every and not is_common(param) for param in shown):
        formatter.write_paragraph()
        formatter.write_text(f"{ctx.command_path} --help-all shows {hidden} more settings.")


def write_examples(formatter: Any, examples: Sequence[str]) -> None:
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"  {example}\n")  # not wrapped, so that it can be copied


def wants_color() -> bool:
    """Returns True if standard error is a terminal whose user wants colors."""
    return sys.stderr.isatty() and not environment().get("NO_COLOR")


def setting_of(param: Any) -> Declaration | None:
    """Returns the setting of a flag; None for a parameter of its command only, even if it has the name of a setting."""
    return SETTINGS.get(param.name) if getattr(param, "rich_help_panel", None) is not None else None


def is_common(param: Any) -> bool:
    setting = setting_of(param)
    return setting is None or setting.common


def panel_of(param: Any, *, every: bool) -> str:
    """Returns the heading under which a parameter is shown."""
    if param.param_type_name == "argument":
        return "Arguments"
    if param.rich_help_panel is None:
        return "Options"
    return str(param.rich_help_panel) if every else COMMON


def names_of(param: Any) -> str:
    """Returns the names of a parameter and the placeholder of its value: `-n, --n NUMBER`, `--page / --no-page`."""
    if param.param_type_name == "argument":
        return str(param.metavar)
    shown = slice(1 if setting_of(param) else None)  # a setting's other name is vLLM's
    names = ", ".join(sorted(param.opts[shown], key=len))
    if param.secondary_opts:
        return f"{names} / {', '.join(param.secondary_opts[shown])}"
    return names if param.is_flag or param.count else f"{names} {param.metavar or declaration_of(param).placeholder}"


def meaning_of(param: Any) -> str:
    """Returns the help of a parameter, with range and default."""
    return str(param.help) if setting_of(param) else declaration_of(param).full_help


def declaration_of(param: Any) -> Declaration:
    """Returns a parameter that is not a setting as a declaration. Typer's own parameters have no type or range."""
    kind = param.type_descriptor.annotation if hasattr(param, "type_descriptor") else str
    shows_default = param.show_default and not (kind is bool and not param.secondary_opts)
    default = param.default if shows_default else None
    return Declaration(help=param.help or "", kind=kind, default=default, minimum=param.min, maximum=param.max)


def show_all(context: typer.Context, requested: bool) -> None:
    """Prints the page with all settings, for `--help-all`."""
    if requested and not context.resilient_parsing:
        context.meta[SHOW_ALL] = True
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all settings.")]
