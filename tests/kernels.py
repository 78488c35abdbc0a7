"""Compiled kernels in tests: they must exist where they can be built and run. Elsewhere their tests are skipped."""

import ctypes
import shlex
import shutil
import sysconfig
from collections.abc import Set
from typing import NoReturn

import pytest

from motet.engines.native.compiled_kernels import of_kind
from motet.settings.server_config import environment
from motet.system.machine import processor

NEEDED = {
    "avx512": frozenset(f"avx512{part}" for part in ("f", "bw", "dq", "vl", "_bf16")),
    "avx2": frozenset({"avx2", "fma"}),
}
"""Linux's names of the instruction sets of each kind of kernels, as in `setup.py`, the faster kind first."""
KERNEL_KINDS = tuple(pytest.param(kind, marks=pytest.mark.kernels) for kind in NEEDED)
"""Parameters of tests that run each kind of kernels."""


def best_kernels() -> ctypes.CDLL:
    """Returns the fastest kind of kernels that this processor can run. Fails or skips if there are none."""
    flags = processor().instruction_sets
    return kernels_of(next((kind for kind, needed in NEEDED.items() if needed <= flags), "avx2"))


def kernels_of(kind: str) -> ctypes.CDLL:
    """Returns the kernels of a kind. Fails or skips if there are none."""
    return of_kind(kind) or skip_or_fail(why_not(NEEDED[kind], processor().instruction_sets, compiler()))


def skip_or_fail(obstacle: str) -> NoReturn:
    """Skips the test for the reason that `why_not` returned, and fails it without one."""
    if obstacle:
        pytest.skip(obstacle)
    pytest.fail("the kernels can run here, but their build is broken: make setup states the reason")


def why_not(needed: Set[str], flags: Set[str], compiler: str | None) -> str:
    """Returns the reason why kernels that need these instructions cannot exist here, or "" if there is none."""
    if missing := needed - flags:
        return f"this processor has no {', '.join(sorted(missing))}"
    return "" if compiler else "there is no C++ compiler here, and the kernels were not built elsewhere"


def compiler() -> str | None:
    """Returns the program with which setuptools compiles C++, if it is installed."""
    command = environment().get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(shlex.split(command)[0])
