"""New Debian systems in folders, and commands in them under chroot.

Commands run with mounts, processes and shared memory of their own, which end with the command; they share the machine's
network. pip's settings on this machine apply there too, and files that they name are under /host.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

from motet.settings.server_config import cache_folder, environment

TIMEOUT_S = 1500
HOST = "/host"
PLACE = re.compile(r"(?<![\w/:])/[\w./-]+|(?<=file://)/[\w./-]+")
"""A path in a setting of pip."""
ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
CERTIFICATES = ("SSL_CERT_FILE",)
"""Variables other than pip's with which programs find this machine's certificates."""


@dataclass
class System:
    """A Debian in a folder: commands run there as `user`, in `workdir`, with the variables of `environ`."""

    folder: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"})
    user: str = "root"
    workdir: str = "/"
    isolation: tuple[str, ...] = ISOLATED
    preparation: tuple[str, ...] = ()
    """Shell commands that run after the mounts, outside the system."""

    def inside(self, *command: str, environ: Mapping[str, str] | None = None) -> list[str]:
        """Returns the command that runs `command` in the system."""
        within = {"HOME": "/root" if self.user == "root" else f"/home/{self.user}", **self.environ, **(environ or {})}
        places = sorted(pip_places())
        mounts = [
            f"mount -t proc proc {self.folder}/proc",
            f"mount --rbind -o ro /sys {self.folder}/sys",
            f"mount --rbind /dev {self.folder}/dev",
            f"mount -t tmpfs tmpfs {self.folder}/dev/shm",
            *(f"mount --bind -o ro {place} {self.folder}{HOST}{place}" for place in places),
        ]
        variables = [f"{name}={value}" for name, value in within.items()]
        userspec = [] if self.user == "root" else [f"--userspec={self.user}"]
        as_user = ["chroot", *userspec, str(self.folder), "/usr/bin/env", "-i", *variables]
        inner = ["/bin/sh", "-c", f"cd {shlex.quote(self.workdir)} && exec {shlex.join(command)}"]
        for place in places:
            target = self.folder / HOST.strip("/") / str(place).strip("/")
            target.mkdir(parents=True, exist_ok=True) if place.is_dir() else touch(target)
        steps = [*mounts, *self.preparation]
        return [*self.isolation, "sh", "-c", " && ".join([*steps, f"exec {shlex.join([*as_user, *inner])}"])]

    def run(self, *command: str, environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """Runs a command and returns its output. Fails if its exit code is not 0."""
        done = subprocess.run(
            self.inside(*command, environ=environ), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def bootstrap(folder: Path, suite: str, packages: Sequence[str] = (), *, foreign: str = "") -> Path:
    """Makes Debian's smallest system with some packages in a folder, which must not exist. Skips the test if this
    machine lacks the tools. `foreign`: an architecture other than this machine's. Its packages are unpacked and not
    configured, because their scripts cannot run here."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("this needs root and debootstrap, a package of Debian")
    folder.parent.mkdir(parents=True, exist_ok=True)
    include = [f"--include={','.join(packages)}"] if packages else []
    kind = ["--foreign", f"--arch={foreign}"] if foreign else []
    command = ["debootstrap", "--variant=minbase", *kind, *include, suite, str(folder)]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    if foreign:
        for package in (folder / "var/cache/apt/archives").glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(folder)], check=True)
    return with_network(folder)


def copied(folder: Path, suite: str, packages: Sequence[str] = (), *, foreign: str = "") -> Path:
    """Makes a system as `bootstrap` does, as a copy of a system in the cache folder. Skips the test if this machine
    lacks the tools."""
    name = "-".join(["debian", suite, *filter(None, [foreign]), *packages])
    kept = cache_folder(environment()) / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            made = kept.with_suffix(".partial")
            shutil.rmtree(made, ignore_errors=True)
            bootstrap(made, suite, packages, foreign=foreign).rename(kept)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(kept), str(folder)], check=True)
    return with_network(folder)


def with_network(folder: Path) -> Path:
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", folder / "etc" / name)
    return folder


def remove(folder: Path) -> None:
    """Removes a system. Mounts end with the processes that use them; a mount that is left fails the test."""
    left = [line for line in Path("/proc/mounts").read_text().splitlines() if f" {folder}" in line]
    assert not left, left
    subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=True)


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def pip_configuration() -> Iterator[tuple[str, str]]:
    """Yields pip's settings on this machine, as variables."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for name, value in re.findall(r"^[\w-]+\.([\w-]+)='(.*)'$", shown.stdout, re.M):
        yield "PIP_" + name.upper().replace("-", "_"), value.replace("\\n", " ")
    yield from ((name, value) for name, value in environment().items() if name.startswith(("PIP_", *CERTIFICATES)))


def pip_places() -> set[Path]:
    """Returns the files and folders that pip's settings name. For an index in a folder, this is the folder around
    it."""
    named = (Path(place) for _, value in pip_configuration() for place in PLACE.findall(value))
    return {place.parent if place.name == "simple" else place for place in named if place.exists()}


def pip_settings() -> dict[str, str]:
    """Returns pip's settings as variables for a command in a system."""
    return {name: PLACE.sub(HOST + r"\g<0>", value) for name, value in pip_configuration()}
