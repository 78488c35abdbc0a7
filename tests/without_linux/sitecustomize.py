"""Hides from Motet what only Linux has, in every process that has this folder first in PYTHONPATH.

Python imports a module of this name when it starts. Only uses by Motet's own modules are refused, so that libraries
still work. psutil reads /proc for Motet: on other systems it has another implementation. Each refused use adds a line
`NAME MODULE` to the file in `HIDDEN_LOG`."""

import asyncio
import builtins
import ctypes
import importlib
import mmap
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import zmq

MODULES = ("fcntl", "nixl", "nixl_cu13", "resource", "uvloop")
"""Modules that Windows lacks. macOS lacks NIXL, and its `resource` cannot limit memory."""
NOT_ON_WINDOWS = "motet.transfer.backends.shared_segment"
"""A module that needs no fcntl on Windows, because memory can have a name there without a file."""
ATTRIBUTES = {
    os: ("memfd_create", "posix_fallocate", "sched_getaffinity"),
    mmap: ("MADV_DONTNEED", "MADV_HUGEPAGE"),
    signal: ("SIGXCPU",),
}
LOG = os.environ["HIDDEN_LOG"]  # noqa: TID251  not a setting of Motet
FOLDERS = ("/proc", "/sys", "/dev/shm")


def caller(depth: int) -> FrameType:
    """Returns the frame that called the calling function, for depth 1."""
    return sys._getframe(depth + 1)  # noqa: SLF001


def motet_module(frame: FrameType) -> str:
    """Returns the name of Motet's module whose code the frame runs. Empty for other modules."""
    name = getattr(frame.f_globals.get("__spec__"), "name", "")  # `__name__` of a program is `__main__`
    return name if name.partition(".")[0] == "motet" else ""


def log(name: str, module: str) -> None:
    descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{name} {module}\n".encode())
    os.close(descriptor)


def hide_modules() -> None:
    original_import, import_module = builtins.__import__, importlib.import_module

    def check(name: str) -> None:
        module = motet_module(caller(2)) if name.partition(".")[0] in MODULES else ""
        if module not in ("", NOT_ON_WINDOWS):
            log(name, module)
            raise ImportError(f"No module named '{name}'", name=name)

    def checked_import(name: str, *arguments: Any, **more: Any) -> Any:
        check(name)
        return original_import(name, *arguments, **more)

    def checked_import_module(name: str, package: str | None = None) -> Any:
        check(name)
        return import_module(name, package)

    builtins.__import__ = checked_import
    importlib.import_module = checked_import_module


def hide_files() -> None:
    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not str(arguments[0]).startswith(FOLDERS):
            return
        frame: FrameType | None = caller(1)
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
        log("signal handlers of the event loop", motet_module(caller(1)))
        raise NotImplementedError

    loop = asyncio.SelectorEventLoop
    loop.add_signal_handler = loop.remove_signal_handler = refuse  # type: ignore[assignment,method-assign]

    class CDLL(ctypes.CDLL):
        def __init__(self, name: str | None, *arguments: Any, **more: Any) -> None:
            if name is None and (module := motet_module(caller(1))):
                log("the library of the process", module)
                raise TypeError("LoadLibrary() argument 1 must be str, not None")
            super().__init__(name, *arguments, **more)

    ctypes.CDLL = CDLL  # type: ignore[misc]


hide_modules()
hide_attributes()
replace_functions()
hide_files()
