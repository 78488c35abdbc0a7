"""A wheel, and an environment in which it is installed as it is for users."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from motet.engines.native.compiled_kernels import KINDS, file_name
from motet.settings.server_config import environment
from tests.patience import PATIENCE_S
from tools.wheel import KERNELS, tagged

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "csrc", "src")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", metavar="FILE", help="a wheel to test; by default, a wheel of this tree is built")


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the wheel of the option, or builds one from this tree with the kernels that are compiled already."""
    if named := request.config.getoption("--wheel", None):
        return Path(str(named)).resolve()
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            )
        else:
            shutil.copy(ROOT / name, tree)
    # Setuptools does not compile files that are in its build folder and newer than the sources.
    built = tree / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / KERNELS
    built.mkdir(parents=True)
    for kind in KINDS:
        shutil.copyfile(ROOT / "src" / KERNELS / file_name(kind), built / file_name(kind))
    make = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    without_compiler = {**environment(), "CXX": "no-compiler", "CC": "no-compiler"}
    subprocess.run(make, check=True, capture_output=True, text=True, env=without_compiler)
    (made,) = (tree / "dist").glob("*.whl")
    return tagged(made, tree / "tagged")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the programs of an environment that has the wheel, and uses the other installed
    packages."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    packages = Path(sysconfig.get_path("purelib"))
    into = home / packages.relative_to(sys.prefix)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True, env=bare(home))
    (into / "others.pth").write_text(f"{packages}\n")
    return home / "bin"


@pytest.fixture(scope="session")
def index() -> None:
    """Skips the tests where the package index cannot be reached."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "-"]
    done = subprocess.run(command, input="packaging", capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        pytest.skip(f"uv or the package index is missing: {done.stderr}")


def bare(home: Path) -> dict[str, str]:
    """Returns the environment variables of a user without a compiler, a checkout or settings of Motet."""
    hidden = ("PYTHON", "MOTET_", "PIP_", "COVERAGE")
    kept = {name: value for name, value in environment().items() if not name.startswith(hidden)}
    return {**kept, "PATH": str(home / "bin"), "HOME": str(home)}
