"""How a setting becomes a flag of the command line, and what was typed becomes settings again."""

import typer
from typer.models import OptionInfo

from motet.settings.record import flag_of, setting_fields

MODEL, ENGINE, LIMITS, HTTP, PROCESS = "Model", "Engine", "Limits", "HTTP", "Process"
CELL = "Prefill and decode"
ROUTING = "Workers"


def option(name: str, panel: str, help: str) -> OptionInfo:
    """The flag of a setting. Without a default of its own: only what was typed overrides file and environment."""
    default = setting_fields()[name].default
    shown = "" if default is None or default in ((), "") or isinstance(default, bool) else f" (default {default})"
    info: OptionInfo = typer.Option(flag_of(name), help=help + shown, rich_help_panel=panel, show_default=False)
    return info


def given(ctx: typer.Context) -> dict[str, object]:
    """The settings among the flags that were typed; a list flag that was not is empty."""
    flags: dict[str, object] = {name: ctx.params.get(name) for name in setting_fields()}
    return {name: value for name, value in flags.items() if value not in (None, [], ())}
