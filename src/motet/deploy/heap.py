"""The garbage collector of a server's process."""

import gc


def freeze_heap() -> None:
    """Called once all is loaded: what is there stays as long as the process, so the collector need not go through it.

    Each of its full rounds would stop every stream for 30 to 60 ms, time and again.
    """
    gc.collect()
    gc.freeze()
