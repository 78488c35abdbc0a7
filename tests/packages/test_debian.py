"""The two commands of the README on new Debians with other versions of Python, as a new user types them. `make debian`
runs this file. It takes half an hour, and 10 GB of disk for one Debian at a time.

Each Debian has this tree's last commit, and no optional tool: no Prometheus, browser, emulator, debootstrap or `ip`.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packages.conftest import ROOT
from tests.packages.debian import System, bootstrap, pip_settings, remove

PACKAGES = ("python3", "python3-venv", "make", "git", "g++", "ca-certificates")
TEST_TIMEOUT_S = 5400
MAX_MB = 3500
"""Maximum size of the environment with the CPU build of torch."""


@dataclass(frozen=True)
class Newcomer:
    """A user of a new Debian, and the folder of the checkout."""

    suite: str
    user: str
    checkout: str


NEWCOMERS = [Newcomer("trixie", "root", "/root/motet"), Newcomer("testing", "user", "/home/user/mö tet")]


@pytest.fixture
def system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[System]:
    newcomer: Newcomer = request.param
    folder = tmp_path / newcomer.suite
    try:
        bootstrap(folder, newcomer.suite, PACKAGES)
        yield checked_out(folder, newcomer)
    finally:
        remove(folder)


def checked_out(folder: Path, newcomer: Newcomer) -> System:
    """Clones the last commit, and returns the system in which the newcomer's commands run."""
    checkout = folder / newcomer.checkout.strip("/")
    system = System(folder, workdir="/")
    system.environ |= pip_settings() | {"PIP_NO_CACHE_DIR": "1", "UV_NO_CACHE": "1"}
    if newcomer.user != "root":
        system.run("useradd", "--create-home", newcomer.user)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout)], check=True)
    system.run("chown", "--recursive", newcomer.user, newcomer.checkout)
    return System(folder, environ=system.environ, user=newcomer.user, workdir=newcomer.checkout)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.debian
@pytest.mark.timeout(3 * TEST_TIMEOUT_S)
@pytest.mark.parametrize("system", NEWCOMERS, indirect=True, ids=lambda newcomer: f"{newcomer.suite}-{newcomer.user}")
def test_the_two_commands_work_on_a_new_debian(system: System, pytestconfig: pytest.Config) -> None:
    demo = make(system, "demo")  # which also sets up
    assert "Traceback" not in demo
    check_size(system, demo)
    output = make(system, "test")
    runs = re.findall(r"^(?:\d+ \w+, )*?(\d+) passed.* in .*$", output, re.MULTILINE)
    assert len(runs) == 2, output[-3000:]  # without Ray, and with Ray
    assert not re.search(r"^(FAILED|ERROR) ", output, re.MULTILINE)
    shown = [line for line in output.splitlines() if re.match(r"SKIPPED|.*\d passed", line)]
    pytestconfig.get_terminal_writer().write("\n" + "\n".join(shown) + "\n")


def make(system: System, target: str) -> str:
    return system.run("sh", "-c", f"make {target} 2>&1", timeout_s=TEST_TIMEOUT_S)


def check_size(system: System, output: str) -> None:
    """Checks the size of the environment, unless set-up reports the CUDA build of torch, which has gigabytes of
    libraries: it is installed where the index of CPU builds cannot be reached."""
    size, _ = system.run("du", "--summarize", "--block-size=1M", ".venv").split("\t")
    assert int(size) < MAX_MB or "build for CUDA" in output, f"the environment takes {size} MB"
