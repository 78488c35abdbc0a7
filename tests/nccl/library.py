"""NCCL for tests without a GPU: a library with its functions, which moves bytes through sockets (`fake_nccl.c`)."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_nccl.c"


def fake_nccl(folder: Path) -> str:
    """Returns the path of the library, built in this folder. Skips the test if there is no compiler."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler")
    library = folder / "libnccl.so.2"
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
    return str(library)
