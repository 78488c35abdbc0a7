"""Motet on Linux on aarch64: on a Debian of this architecture in a folder, whose programs qemu runs. `make debian` runs
this file.

1. debootstrap fetches the Debian, and uv on this machine installs the requirements in it, which takes a minute; pip
   would take an hour under the emulator. They are torch's CUDA build, because the index has no other.
2. pip in the Debian installs this tree's last commit, without a compiler and without kernels.
3. The server starts in the Debian, answers as a server on this machine does, and ends at SIGTERM.

The kernel starts the emulator for each program (binfmt_misc). It is registered in a user namespace of the system, so
nothing on this machine changes.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from motet.deploy.child import ChildServer
from tests.packages.conftest import ROOT
from tests.packages.debian import ISOLATED, System, copied, remove
from tests.packages.test_other_systems import TARGETS
from tests.tiny_engine import TINY

EMULATOR = "qemu-aarch64-static"
SUITE, PYTHON = "trixie", "3.13"
PACKAGES = ("python3",)
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
TEST_TIMEOUT_S = 7200
STEP_TIMEOUT_S = 2400
"""Time limit for each emulated program. Importing torch takes a minute of CPU time."""

IDENTITY = r"\x7fELF\x02\x01\x01" + r"\x00" * 9 + r"\x02\x00\xb7\x00"
MASK = r"\xff" * 7 + r"\x00" + r"\xff" * 8 + r"\xfe\xff\xff\xff"
"""Start of an executable or shared object for aarch64, and the bits of it that count."""
PROCESSOR = "neoverse-n1"
"""It has neither SVE nor pointer authentication, whose emulation takes several times as long."""
FACTS = """\
processor\t: {number}
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
"""/proc/cpuinfo of this processor. With an x86 processor's, importing torch ends with a segmentation
fault."""

FLAGS = (*TINY, "--heartbeat-timeout", "300", "--step-timeout", "1200")
SHAPE = {"model": "tiny", "prompt": "a", "n": 2, "max_tokens": 6, "ignore_eos": True}
EXACT = {"logprobs": 1, "return_token_ids": True}
GREEDY, SAMPLED = {**SHAPE, **EXACT, "temperature": 0}, {**SHAPE, **EXACT, "seed": 1}


@pytest.fixture
def system(index: None, tmp_path: Path) -> Iterator[System]:
    if not (emulator := shutil.which(EMULATOR)):
        pytest.skip(f"there is no {EMULATOR}, a program of Debian's package qemu-user-static")
    folder = tmp_path / "aarch64"
    preparation = registered(emulator, folder)
    try:
        copied(folder, SUITE, PACKAGES, foreign="arm64")
        (folder / "cpuinfo").write_text("".join(FACTS.format(number=number) for number in range(2)))
        environ = {"PATH": "/usr/local/bin:/usr/bin", "QEMU_CPU": PROCESSOR}
        yield System(folder, environ=environ, isolation=(*ISOLATED, "--map-root-user"), preparation=preparation)
    finally:
        remove(folder)


def registered(emulator: str, folder: Path) -> tuple[str, ...]:
    """Returns the commands that register the emulator. Skips the test if this machine does not permit them."""

    def commands(root: str | Path) -> tuple[str, ...]:
        place = f"{root}/proc/sys/fs/binfmt_misc"
        entry = f":aarch64:M::{IDENTITY}:{MASK}:{emulator}:PF"
        return f"mount -t binfmt_misc binfmt_misc {place}", f"printf %s '{entry}' > {place}/register"

    trial = [*ISOLATED, "--map-root-user", "sh", "-c", " && ".join(commands(""))]
    done = subprocess.run(trial, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"an emulator cannot be registered in a namespace, which needs Linux 6.7 or newer: {done.stderr}")
    return (f"mount --bind {folder}/cpuinfo {folder}/proc/cpuinfo", *commands(folder))


def install(system: System) -> None:
    checkout = system.folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(checkout)], check=True)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config", "--only-binary", ":all:"]
    platform = ["--python-platform", TARGETS["Linux on aarch64"].platform, "--python-version", PYTHON]
    requirements = ["--requirement", str(checkout / "pyproject.toml"), "pip", "setuptools"]
    subprocess.run([*uv, *platform, "--target", str(system.folder / SITE), *requirements], check=True)
    pip = ["python3", "-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
    system.run(*pip, "--break-system-packages", "/checkout", timeout_s=STEP_TIMEOUT_S)


def answers(url: str) -> list[dict[str, Any]]:
    with httpx.Client(base_url=url, timeout=STEP_TIMEOUT_S) as client:
        return [client.post("/v1/completions", json=body).raise_for_status().json() for body in (GREEDY, SAMPLED)]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.debian
@pytest.mark.index
@pytest.mark.timeout(TEST_TIMEOUT_S)
def test_a_server_on_aarch64_answers_as_on_this_machine_and_ends_at_sigterm(system: System, folder: Path) -> None:
    with ChildServer([str(folder), *FLAGS, "--kernels", "torch"]) as server:
        expected = answers(server.url)
    shutil.copytree(folder, system.folder / "tiny")
    assert system.run("uname", "--machine").strip() == "aarch64"
    install(system)
    assert not list((system.folder / SITE / "motet").rglob("*.so"))

    def start(command: Sequence[str], **more: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(system.inside("motet", *command[command.index("serve") :]), **more)

    with ChildServer(["/tiny", *FLAGS], popen=start, start_timeout_s=STEP_TIMEOUT_S) as server:
        found = answers(server.url)
        (inside,) = psutil.Process(server.pid).children()
        inside.terminate()
        assert server.wait(STEP_TIMEOUT_S) == 0, server.log
    assert "aarch64" in found[0]["system_fingerprint"]
    for answer, other in zip(found, expected, strict=True):
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for choice, like in zip(answer["choices"], other["choices"], strict=True):
            assert choice["token_ids"] == like["token_ids"] and choice["text"] == like["text"] != ""
            numbers = choice["logprobs"]["token_logprobs"]
            assert numbers == pytest.approx(like["logprobs"]["token_logprobs"], abs=1e-3)
