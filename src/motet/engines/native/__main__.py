"""Begins the engine process: `python -m motet.engines.native`, started by `spawn` and by nobody else.

The garbage collector rests until all is imported. What torch and transformers make meanwhile stays as long as the
process, and going through it time and again took a quarter of an engine's start, and so of each restart.
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
