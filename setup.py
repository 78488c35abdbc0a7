"""Builds the C++ kernels. Everything else is in pyproject.toml.

The kernels are optional: without a compiler, or on another type of processor, torch's operators are used, which are
slower. A wheel has both kinds of kernels, no matter which processor it was built on, and the engine selects a kind that
its processor can run. The kernels are called through ctypes and do not use Python's C API, so one wheel serves every
Python version from 3.11 on.

Installers hide what a successful build prints, and a build without kernels is successful. The reason why a kind could
not be compiled is therefore written to a file in the package, from which `missing_kernels` reports it.
"""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import IO

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KINDS = {
    "avx512": [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16")],
    "avx2": ["-mavx2", "-mfma"],
}
FAILURE_FILE = "motet/engines/native/cpu/not_compiled.txt"
"""File for the reason. `motet.engines.native.compiled_kernels` reads it."""


def kernels_for(kind: str) -> Extension:
    return Extension(
        f"motet.engines.native.cpu.compiled_{kind}",
        sources=sorted(glob("csrc/*.cpp")),
        depends=sorted(glob("csrc/**/*.h", recursive=True)),
        include_dirs=["csrc", f"csrc/{kind}"],
        language="c++",
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-pthread",
            "-ffp-contract=off",  # the source determines where to round, not the compiler
            *KINDS[kind],
            "-fvisibility=hidden",
            "-Wall",
            "-g0",  # the interpreter's -g would make the library fifteen times as large
            # gcc 12 warns that its own intrinsics are uninitialized, and that templates ignore attributes of vectors.
            *("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-ignored-attributes"),
        ],
        extra_link_args=["-pthread"],
        optional=True,
        py_limited_api=True,
    )


class KernelBuild(build_ext):
    """Compiles the kernels. Writes the reason of the last failure to a file in the package."""

    failure = ""

    def build_extension(self, ext: Extension) -> None:
        with tempfile.TemporaryFile(mode="w+", errors="replace") as errors:
            try:
                with stderr_redirected_to(errors):
                    super().build_extension(ext)
            except Exception as error:
                errors.seek(0)
                self.failure = reason(self.compiler.compiler_so_cxx[0], error, errors.read())
                raise
            finally:
                errors.seek(0)
                sys.stderr.write(errors.read())

    def run(self) -> None:
        super().run()
        record = Path("src" if self.inplace or self.editable_mode else self.build_lib, FAILURE_FILE)
        record.unlink(missing_ok=True)
        if self.failure:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(f"{self.failure}\n")


@contextmanager
def stderr_redirected_to(file: IO[str]) -> Iterator[None]:
    """Redirects the standard error of this process and of the compilers that it starts."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def reason(compiler: str, error: Exception, output: str) -> str:
    """Returns the reason for a failure in one line: the last error that the compiler printed, if there is one."""
    if shutil.which(compiler) is None:
        return f"there was no C++ compiler, {compiler}"
    lines = [line.strip() for line in output.splitlines() if "error" in line.lower()]
    return lines[-1] if lines else f"{compiler} failed with {type(error).__name__}"


built_here = platform.system() == "Linux" and platform.machine() == "x86_64"
# Never use `build_ext --parallel`, because the object files of both kinds have the same names.
setup(
    ext_modules=[kernels_for(kind) for kind in KINDS] if built_here else [],
    cmdclass={"build_ext": KernelBuild},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if built_here else {},
)
