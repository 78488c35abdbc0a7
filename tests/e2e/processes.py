"""Waits for processes that are not children of the test."""

import os
import select


def wait_until_gone(pid: int, timeout_s: float) -> None:
    """Returns once the process has ended. Raises TimeoutError."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        if not poller.poll(timeout_s * 1000):
            raise TimeoutError(f"process {pid} is still there after {timeout_s} s")
    finally:
        os.close(handle)
