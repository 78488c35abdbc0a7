"""Starts the engine process: `python -m motet.engines.native`. Only `spawn` runs this command.

Garbage collection is off during the imports. The objects that torch and transformers make there live as long as the
process; scanning them again and again took a quarter of the start time of an engine, and so of each restart.

Signals are ignored from the start: a service manager sends SIGTERM to every process of a server, also during imports.
The process also ends with its parent during imports, which take many seconds on a busy machine.
"""

import gc
import json
import os
import shutil
import signal
import sys
import threading
from io import FileIO


def main() -> int:
    gc.disable()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    message = read_launch()
    from motet.engines.native.process import main as run

    gc.freeze()
    gc.enable()
    return run(message)


def read_launch() -> bytes:
    """Reads the `Launch` from standard input, and ends this process when standard input ends."""
    # Unbuffered: a thread that waits in a buffered reader holds its lock, and then the interpreter cannot end.
    stdin = FileIO(sys.stdin.fileno(), closefd=False)
    message = stdin.readline()
    if not message:
        sys.exit(0)  # the parent has ended
    threading.Thread(target=_end_with_parent, args=(stdin, json.loads(message)["folder"]), daemon=True).start()
    return message


def _end_with_parent(stdin: FileIO, folder: str) -> None:
    """Ends this process when standard input ends. Removes the pipes' folder, because a killed parent could not."""
    while stdin.read(1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # this is not the main thread, which can be in the middle of a step


if __name__ == "__main__":
    sys.exit(main())
