"""Hides from Motet what other systems lack, in every process that has this folder first in PYTHONPATH.

Python imports a module of this name when it starts. Libraries keep what they use; libraries that have a branch of their
own for other systems (psutil) work there, so they can still read /proc. Each attempt of Motet to use something
hidden is added to the file that `HIDDEN_LOG` names, as a line `NAME MODULE`."""

import asyncio
import builtins
import ctypes
import importlib
import inspect
import mmap
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import zmq

MODULES = ("fcntl", "nixl", "nixl_cu13", "resource", "uvloop")
"""Missing on Windows, and NIXL and resource's limit of memory also on macOS."""
NOT_ON_WINDOWS = "motet.transfer.backends.shared_segment"
"""A module that does not use fcntl on Windows, where memory with a name needs no file. Linux has no such memory."""
ATTRIBUTES = {
    os: ("eventfd", "killpg", "memfd_create", "posix_fallocate", "pwrite", "sched_getaffinity"),
    mmap: ("MADV_DONTNEED", "MADV_HUGEPAGE"),
    signal: ("SIGXCPU",),
}
LOG = os.environ["HIDDEN_LOG"]  # noqa: TID251  not a setting of Motet
FOLDERS = ("/proc", "/sys", "/dev/shm")


def motet_module(frame: FrameType | None) -> str:
    """Returns the name of Motet's module that this frame is in; empty for another module."""
    spec = None if frame is None else frame.f_globals.get("__spec__")  # unlike __name__, also right for a program
    name = "" if spec is None else str(spec.name)
    return name if name.partition(".")[0] == "motet" else ""


def calling() -> FrameType | None:
    """Returns the frame that called the calling function."""
    frame = inspect.currentframe()
    return frame.f_back.f_back if frame is not None and frame.f_back is not None else None


def log(name: str, module: str) -> None:
    descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{name} {module}\n".encode())
    os.close(descriptor)


def hide_modules() -> None:
    original_import, import_module = builtins.__import__, importlib.import_module

    def check(name: str, frame: FrameType | None) -> None:
        module = motet_module(frame) if name.partition(".")[0] in MODULES else ""
        if module not in ("", NOT_ON_WINDOWS):
            log(name, module)
            raise ImportError(f"No module named '{name}'", name=name)

    def importing(name: str, *arguments: Any, **more: Any) -> Any:
        check(name, calling())
        return original_import(name, *arguments, **more)

    def importing_module(name: str, package: str | None = None) -> Any:
        check(name, calling())
        return import_module(name, package)

    builtins.__import__ = importing
    importlib.import_module = importing_module


def hide_files() -> None:
    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith(FOLDERS):
            return
        frame: FrameType | None = calling()
        while frame is not None and not motet_module(frame):
            if str(frame.f_globals.get("__name__", "")).startswith(("psutil", "importlib")):
                return
            frame = frame.f_back
        if frame is not None:
            log(str(arguments[0]), motet_module(frame))
            raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))

    sys.addaudithook(check)


def hide_attributes() -> None:
    for module, names in ATTRIBUTES.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def replace_functions() -> None:
    has = zmq.has
    zmq.has = lambda capability: capability != "ipc" and has(capability)

    def refuse(*_: object) -> NoReturn:
        log("signal handlers of the event loop", motet_module(calling()))
        raise NotImplementedError

    loop = asyncio.SelectorEventLoop
    loop.add_signal_handler = loop.remove_signal_handler = refuse  # type: ignore[assignment,method-assign]

    class CDLL(ctypes.CDLL):
        def __init__(self, name: str | None, *arguments: Any, **more: Any) -> None:
            if name is None and (module := motet_module(calling())):
                log("the library of the process", module)
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *arguments, **more)

    ctypes.CDLL = CDLL  # type: ignore[misc]


hide_modules()
hide_attributes()
replace_functions()
hide_files()
