"""Motet on Ray Serve with scripted engines, for `bench.ray`.

The application has one decode replica, and with the gateway ingress one gateway replica. Prints the URL, and ends with
the process that started it.
"""

import asyncio
import sys
from collections.abc import Sequence

from bench.program.command_line import benchmark_parser
from bench.ray.scripted_replicas import MODEL, application
from motet.deploy.ray.foreground import run_application
from motet.deploy.server import Outcome
from motet.deploy.shutdown import StopSignals
from motet.log import setup_logging
from motet.settings.declaration import ServerCommand
from motet.settings.ray_config import Ingress
from motet.settings.resolve import resolve_settings


def main(argv: Sequence[str]) -> int:
    parser = benchmark_parser("bench.ray.scripted_server", __doc__)
    parser.add_argument("ingress", choices=tuple(Ingress), help="server to which clients connect")
    parser.add_argument("--port", type=int, required=True, help="port of the ingress")
    arguments = parser.parse_args(argv)
    args: dict[str, object] = {
        "model": MODEL,
        "ingress": arguments.ingress,
        "port": arguments.port,
        "cluster_key": "bench",
        "ray_address": "local",
        "log_level": "warning",
    }
    setup_logging()
    return asyncio.run(run(args))


async def run(args: dict[str, object]) -> Outcome:
    settings = resolve_settings(args, environ={}, command=ServerCommand.RAY)
    with StopSignals() as signals:
        signals.watch_stdin(sys.stdin)
        return await run_application(
            settings, args, on_ready=lambda url, _: print(url, flush=True), signals=signals, make=application
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
