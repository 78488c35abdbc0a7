"""SIGINT, which a terminal sends at Ctrl-C: the command ends with exit code 130 and prints nothing, at every moment.

1. imports, at the start of a command: the process ends at once. There is nothing to clean up, and an exception during
   an import would have a long traceback
2. the command: KeyboardInterrupt, so that downloads and child processes are cleaned up. `Motet.main` turns it into the
   exit code; servers stop as `StopSignals` says
3. the end of the interpreter: the process ends at once

This module imports little: while it is being imported, SIGINT has no handler. A program that imports `motet.cli` keeps
its own handler: only `motet.cli.app` calls `own_interrupts`."""

import os
import signal

INTERRUPTED = 130
"""The shell's exit code of a program that Ctrl-C has ended."""


class _Owned:
    """True if this process is a command of Motet, which can replace the handler."""

    value = False


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def own_interrupts() -> None:
    """Lets this module handle SIGINT in this process."""
    _Owned.value = True
    end_at_interrupts()


def end_at_interrupts() -> None:
    """Makes SIGINT end the process at once."""
    if _Owned.value:
        signal.signal(signal.SIGINT, _end)


def raise_interrupts() -> None:
    """Makes SIGINT raise KeyboardInterrupt."""
    if _Owned.value:
        signal.signal(signal.SIGINT, signal.default_int_handler)
