"""Limits of CPU time and memory of a process that does work which cannot be interrupted.

The operating system enforces the limits. If it has no such limits (macOS, Windows, a container without /proc), a thread
of the process checks them 20 times a second. Between two checks, the process can take more memory than is allowed. Work
that holds the GIL stops this thread, so the server that waits for the process must limit the time too."""

import importlib
import math
import os
import signal
import threading
import time
from typing import Any, Final

from motet.system.machine import process_memory

TOO_LONG_CODE: Final = 75
"""Exit code of a process that the thread has ended because of its CPU time."""
TOO_LONG_CODES: Final = (
    TOO_LONG_CODE,
    *(-getattr(signal, name) for name in ("SIGXCPU", "SIGKILL") if hasattr(signal, name)),
)
"""Return codes of a process that took too long: the system or the thread ended it, or its server killed it."""
TOO_LARGE_CODE: Final = 76
"""Exit code of a process that has exceeded its memory."""
CHECK_S: Final = 0.05
"""Time in seconds between two checks of the thread."""

resource: Any
"""The module with the system's limits. None on Windows."""
try:
    resource = importlib.import_module("resource")
except ImportError:
    resource = None


class ProcessLimits:
    """The limits of this process."""

    def __init__(self, more_bytes: int) -> None:
        """`more_bytes`: memory that the process can take in addition to the memory that it has."""
        before = process_memory()
        self._max_cpu_s = math.inf
        self._max_resident_bytes = before.resident_bytes + more_bytes
        self._by_system = bool(before.address_bytes) and has_limits()
        if self._by_system:
            max_bytes = before.address_bytes + more_bytes
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        else:
            threading.Thread(target=self._watch, daemon=True).start()

    def allow_cpu(self, cpu_s: int) -> None:
        """Lets the process use this CPU time from now on."""
        self._max_cpu_s = math.ceil(time.process_time()) + cpu_s
        if self._by_system:
            resource.setrlimit(resource.RLIMIT_CPU, (self._max_cpu_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))

    def _watch(self) -> None:
        """Ends this process when it exceeds a limit."""
        while time.process_time() <= self._max_cpu_s:
            if process_memory().resident_bytes > self._max_resident_bytes:
                os._exit(TOO_LARGE_CODE)
            time.sleep(CHECK_S)
        os._exit(TOO_LONG_CODE)


def has_limits() -> bool:
    """Returns True if the system enforces limits of CPU time and memory. On macOS, RLIMIT_AS is another name for
    RLIMIT_RSS, which macOS ignores."""
    return resource is not None and resource.RLIMIT_AS != resource.RLIMIT_RSS
