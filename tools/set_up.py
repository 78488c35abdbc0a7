"""Makes the environment in .venv: a build of torch that fits this machine, Motet's other requirements, and the kernels.

uv selects the build of torch: the CPU build without an NVIDIA device, and otherwise the CUDA build that the driver
supports. It downloads both from torch's own index, and does not read pip's configuration. Where uv is missing or cannot
reach an index, pip installs instead. pip takes the build of its own index, on Linux usually the CUDA build.

`.venv/ready` contains the requested build of torch. It is removed first and created last, so an incomplete environment
is never taken for a complete one.

Runs before anything is installed, so it imports only the standard library.

Run: python3 tools/set_up.py [--torch-backend auto|cpu|cu130|...]
"""

import argparse
import platform
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if platform.system() == "Windows" else "bin/python")
READY = VENV / "ready"
MOTET = ("--editable", f"{ROOT}[dev]")
UV = "uv>=0.9"
TORCH_FACTS = """
import importlib.util, pathlib, runpy
facts = runpy.run_path(str(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")))
print(facts["__version__"], facts["cuda"])
"""
KERNELS = "from motet.engines.native.compiled_kernels import missing_kernels as reason; print(reason() or '')"


class NotInstalled(Exception):
    """Raised if an installer fails. The message is the installer's error in one line."""


def set_up(backend: str) -> None:
    """Makes or updates the environment. Raises NotInstalled if it cannot be made."""
    before = READY.read_text().strip() if READY.is_file() else ""
    READY.unlink(missing_ok=True)
    make_venv()
    install(backend, again=bool(before) and before != backend)
    READY.write_text(f"{backend}\n")


def make_venv() -> None:
    """Makes the virtual environment, unless there is one that works and has this version of Python."""
    same = f"import pip, sys; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
    usable = PYTHON.exists() and subprocess.run([PYTHON, "-c", same], capture_output=True, check=False).returncode == 0
    if not usable:
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)


def install(backend: str, *, again: bool) -> None:
    """Installs everything. `again`: the environment may have another build of the same torch."""
    say("installing packages (0.7 GB, with CUDA 3.5 GB) and compiling the kernels, which takes two minutes and more.")
    reinstall = ["--reinstall-package", "torch"] if again else []
    # macOS has one build of torch, which the ordinary index has too.
    choice = [] if platform.system() == "Darwin" else ["--torch-backend", backend]
    try:
        pip(UV)
        uv(*choice, *reinstall, *MOTET)
        return
    except NotInstalled as error:
        if backend not in ("auto", "cpu"):  # pip cannot select one of several CUDA builds
            raise NotInstalled(f"TORCH_BACKEND={backend} needs uv and torch's index: {error}") from error
        say(f"uv cannot be used ({error}), so pip installs torch from its own index.")
    pip(torch_requirement(), shown=True)
    try:
        uv(*MOTET)
    except NotInstalled:
        pip(*MOTET, shown=True)


def uv(*arguments: str) -> None:
    """Installs packages and compiles their modules to bytecode, as pip does. Otherwise the first processes would."""
    run([PYTHON, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", PYTHON, *arguments])


def pip(*arguments: str, shown: bool = False) -> None:
    run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], shown=shown)


def run(command: Sequence[str | Path], *, shown: bool = False) -> None:
    """Runs an installer. Its errors are printed if `shown` is set, and are otherwise in the exception."""
    done = subprocess.run(command, stderr=None if shown else subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.strip().rstrip(".") for line in (done.stderr or "").splitlines()]
        first = next((at for at, line in enumerate(lines) if line.lower().startswith("error")), 0)
        raise NotInstalled("; ".join(lines[first : first + 2]) or f"the installer's exit code was {done.returncode}")


def torch_requirement() -> str:
    """Returns the requirement of torch. pip installs it first, so that it selects the other packages for this torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(next(name for name in project["dependencies"] if name.startswith("torch==")))


def query(program: str) -> str:
    done = subprocess.run([PYTHON, "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def say(sentence: str) -> None:
    print(f"make setup: {sentence}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-backend", default="auto", help="build of torch, as uv names it (default: auto)")
    start = time.monotonic()
    try:
        set_up(parser.parse_args().torch_backend)
    except (NotInstalled, subprocess.CalledProcessError) as error:
        say(f"not complete: {error}")
        return 1
    version, cuda = query(TORCH_FACTS).split()
    build = "CPU build" if cuda == "None" else f"build for CUDA {cuda}, which also works without a GPU"
    say(f"done in {time.monotonic() - start:.0f} s, with torch {version} ({build}).")
    if missing := query(KERNELS):
        say(missing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
