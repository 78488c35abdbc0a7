"""Motet on Ray Serve with scripted engines, for `bench.ray`.

One decode replica, and with the gateway ingress one gateway replica. Prints the URL, and ends with whoever started it.
"""

import argparse
import sys
from collections.abc import Sequence

from bench.ray_replicas import MODEL, application
from motet.deploy.ray.foreground import Stopping, run_application
from motet.log import setup_logging_as
from motet.settings import resolve_settings
from motet.settings.record import RAY
from motet.types import Ingress


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ingress", choices=tuple(Ingress))
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args(argv)
    args = {
        "model": MODEL,
        "ingress": arguments.ingress,
        "port": arguments.port,
        "cluster_key": "bench",
        "ray_address": "local",
        "log_level": "warning",
    }
    setup_logging_as("text", "info")
    stopping = Stopping()
    stopping.watch_stdin()
    return run_application(
        resolve_settings(args, environ={}, names=RAY),
        args,
        on_ready=lambda url, _: print(url, flush=True),
        stopping=stopping,
        make=application,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
