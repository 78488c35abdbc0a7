"""The C++ kernels. Everything else is in pyproject.toml.

They are optional: without a compiler, or on another kind of processor, torch's operators do their work, more slowly.
Whether the processor has the instructions is asked when they are loaded, not here: a wheel may be built elsewhere.
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
            "-ffp-contract=off",  # what is rounded, and where, is written down and not the compiler's choice
            *KINDS[kind],
            "-fvisibility=hidden",
            "-Wall",
            "-g0",  # the interpreter's own -g would make it fifteen times as large
            # gcc 12 finds its own intrinsics uninitialized, and attributes of vectors ignored in templates.
            *("-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-ignored-attributes"),
        ],
        extra_link_args=["-pthread"],
        optional=True,
    )


built_here = platform.system() == "Linux" and platform.machine() == "x86_64"
setup(ext_modules=[kernels_for(kind) for kind in KINDS] if built_here else [])
