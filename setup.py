"""Builds the C++ kernels. Everything else is in pyproject.toml.

The kernels are optional: without a compiler, or on another type of processor, torch's operators are used, which are
slower. A wheel has both kinds of kernels, no matter which processor it was built on, and the engine selects a kind that
its processor can run. The kernels are called through ctypes and do not use Python's C API, so one wheel serves every
Python version from 3.11 on.
"""

import platform
from glob import glob

from setuptools import Extension, setup

KINDS = {
    "avx512": [f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16")],
    "avx2": ["-mavx2", "-mfma"],
}


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


built_here = platform.system() == "Linux" and platform.machine() == "x86_64"
# Never use `build_ext --parallel`, because the object files of both kinds have the same names.
setup(
    ext_modules=[kernels_for(kind) for kind in KINDS] if built_here else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if built_here else {},
)
