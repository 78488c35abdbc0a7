"""Starts the engine process: `python -m motet.engines.native`. Only `spawn` runs this command.

Garbage collection is off during the imports. The objects that torch and transformers make there live as long as the
process; scanning them again and again took a quarter of the start time of an engine, and so of each restart.
"""

import gc
import sys


def main() -> int:
    gc.disable()
    from motet.engines.native.process import main as run

    gc.freeze()
    gc.enable()
    return run()


if __name__ == "__main__":
    sys.exit(main())
