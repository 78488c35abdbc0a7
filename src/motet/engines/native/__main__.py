"""Starts the engine process: `python -m motet.engines.native`. Only `spawn` runs this command.

Garbage collection is off during the imports. The objects that torch and transformers make there live as long as the
process; scanning them again and again took a quarter of the start time of an engine, and so of each restart.

Signals are ignored from the start: a service manager sends SIGTERM to every process of a server, also during imports.
"""

import gc
import signal
import sys


def main() -> int:
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from motet.engines.native.process import main as run

    gc.freeze()
    gc.enable()
    return run()


if __name__ == "__main__":
    sys.exit(main())
