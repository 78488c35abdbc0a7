"""Motet on other systems: every requirement has a wheel there, and the source type-checks. Nothing is installed.

uv resolves the requirements, because pip evaluates markers for the running machine only. uv reads a few kilobytes of
metadata of each package from the package index, and keeps them in its cache.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from motet.settings.server_config import environment
from tests.packages.conftest import ROOT
from tests.patience import PATIENCE_S

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACOS_VERSION = "14.0"
"""Oldest macOS for which torch has wheels."""


@dataclass(frozen=True)
class Target:
    """A system as uv names it, a package that Motet requires on it, and a package that Motet does not require there."""

    platform: str
    present: str
    absent: str


TARGETS = {
    "macOS on arm64": Target("aarch64-apple-darwin", "uvloop", "nixl-cu13"),
    "Windows on x64": Target("x86_64-pc-windows-msvc", "colorama", "uvloop"),
    "Linux on aarch64": Target("aarch64-manylinux_2_31", "nixl-cu13", "colorama"),
    "Linux on x86-64": Target("x86_64-manylinux_2_31", "nixl-cu13", "colorama"),
}


def resolve(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    environ = {**environment(), "MACOSX_DEPLOYMENT_TARGET": MACOS_VERSION}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=environ, timeout=PATIENCE_S, check=False
    )


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.index
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("system", TARGETS)
def test_every_requirement_has_a_wheel(index: None, system: str, python: str) -> None:
    target = TARGETS[system]
    options = ["--python-platform", target.platform, "--python-version", python, "--only-binary", ":all:"]
    done = resolve(*options, str(ROOT / "pyproject.toml"))
    assert done.returncode == 0, done.stderr
    versions = dict(line.split("==") for line in done.stdout.splitlines())
    assert versions["torch"] == "2.13.0"
    assert target.present in versions
    assert target.absent not in versions


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_the_source_type_checks_for_another_system(platform: str, tmp_path: Path) -> None:
    """mypy reports names that the standard library lacks on that system."""
    command = [sys.executable, "-m", "mypy", "--platform", platform, "--cache-dir", str(tmp_path), "src"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
