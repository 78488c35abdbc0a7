"""The requirements of Motet on other systems: a wheel of each exists, and they agree on versions. Nothing is installed.

uv evaluates markers for the target, and pip for the running machine only, which is why uv resolves them here. It reads
the metadata of the packages from the package index: a few kilobytes each, and a tenth of a second once they are in its
cache.
"""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from motet.settings.server_config import environment
from tests.packages.conftest import ROOT
from tests.patience import PATIENCE_S

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACOS_VERSION = "14.0"
"""Oldest macOS for which torch has wheels."""


@dataclass(frozen=True)
class Target:
    """A system as uv names it, a package that only its resolution has, and one that it has not."""

    platform: str
    present: str
    absent: str


TARGETS = {
    "macOS on arm64": Target("aarch64-apple-darwin", "uvloop", "nixl-cu13"),
    "Windows on x64": Target("x86_64-pc-windows-msvc", "colorama", "uvloop"),
    "Linux on aarch64": Target("aarch64-manylinux_2_31", "nixl-cu13", "colorama"),
    "Linux on x86-64": Target("x86_64-manylinux_2_31", "nixl-cu13", "colorama"),
}


def resolve(platform: str, python: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    target = ["--python-platform", platform, "--python-version", python, "--only-binary", ":all:"]
    environ = {**environment(), "MACOSX_DEPLOYMENT_TARGET": MACOS_VERSION}
    return subprocess.run(
        [*command, *target, str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        env=environ,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def index() -> None:
    """Skips the tests where the package index cannot be reached."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "-"]
    done = subprocess.run(command, input="packaging", capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        pytest.skip(f"uv or the package index is missing: {done.stderr}")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.index
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", TARGETS)
def test_every_requirement_has_a_wheel(index: None, system: str, python: str) -> None:
    target = TARGETS[system]
    done = resolve(target.platform, python)
    assert done.returncode == 0, done.stderr
    versions = dict(line.split("==") for line in done.stdout.splitlines())
    assert versions["torch"] == "2.13.0"
    assert target.present in versions
    assert target.absent not in versions
