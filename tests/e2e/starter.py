"""A program that starts a server, prints its pid, and runs until its standard input ends."""

import sys

from tests.forked import ForkedForkingProcess


def main() -> None:
    with ForkedForkingProcess() as forking, forking.server(sys.argv[1:]) as server:
        sys.stdout.write(f"{server.pid}\n")
        sys.stdout.flush()
        sys.stdin.read()
