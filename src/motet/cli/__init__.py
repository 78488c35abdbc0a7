"""The command line: `motet serve`, `gateway`, `ray`, `models`, `chat`, `batch`, `demo`, `doctor` and `version`.

`app` is the program. It imports the commands only when SIGINT has a handler, and each command only imports what it
needs, so that `motet --help` answers in a quarter of a second."""

import os
import sys

try:
    from motet.cli.interrupts import INTERRUPTED, end_at_interrupts, own_interrupts
except KeyboardInterrupt:  # SIGINT has no handler yet
    os._exit(130)


def app() -> None:
    """Runs the command of this process's arguments, and ends the process with its exit code."""
    try:
        own_interrupts()
        from motet.cli.main import run

        run()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    finally:
        end_at_interrupts()
        sys.stdout.flush()
