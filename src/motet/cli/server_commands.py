"""`motet serve`, `motet gateway` and `motet ray`, up to the point where their settings are known. Only then is the
server imported, so that `--help` and errors in settings come at once."""

from typing import Annotated

import typer

from motet.cli.flags import server_command
from motet.cli.interrupts import raise_interrupts
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings

PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print a config for `serve deploy`, without keys, and start nothing.")
]


@server_command(ServerCommand.SERVE)
def serve(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Serve a model over the OpenAI API."""
    from motet.cli import servers

    raise_interrupts()
    return servers.serve(settings, stop_with_stdin=stop_with_stdin)


@server_command(ServerCommand.GATEWAY)
def gateway(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Serve the OpenAI API in front of other servers, its workers. Workers are Motet servers, vLLM servers, or any
    server with an OpenAI-compatible API."""
    from motet.cli import servers

    raise_interrupts()
    return servers.gateway(settings, stop_with_stdin=stop_with_stdin)


@server_command(ServerCommand.RAY)
def ray(settings: Settings, *, stop_with_stdin: bool, print_config: PrintConfig = False) -> int:
    """Serve a model with prefill and decode replicas on Ray Serve, on the running cluster or on a local one."""
    from motet.cli import servers

    raise_interrupts()
    return servers.ray(settings, stop_with_stdin=stop_with_stdin, print_config=print_config)
