"""Parses a Dockerfile, and executes it without a container engine: in folders with Debian, under chroot.

Each stage is a copy of Debian's smallest system in place of `debian:bookworm-slim`: the same packages, made by
debootstrap and stored in the cache folder. Commands run there with mounts and processes of their own, which end with
the command; they share the machine's network. pip's settings on this machine apply there too, and files that they
name are under /host.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

from motet.settings.server_config import cache_folder, environment

BASE, SUITE = "debian:bookworm-slim", "bookworm"
TIMEOUT_S = 1500
HOST = "/host"
PLACE = re.compile(r"(?<![\w/:])/[\w./-]+|(?<=file://)/[\w./-]+")
"""A path in a setting of pip."""
ISOLATED = ("unshare", "--mount", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile."""

    word: str
    rest: str


def instructions(text: str) -> list[Instruction]:
    """Returns the instructions with their lines joined, without comments."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


@dataclass
class Stage:
    """A stage of an image: its folder, and the settings of the instructions so far."""

    folder: Path
    environ: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"})
    user: str = "root"
    workdir: str = "/"
    entrypoint: Sequence[str] = ()
    healthcheck: Sequence[str] = ()

    def inside(self, *command: str, environ: Mapping[str, str] | None = None) -> list[str]:
        """Returns the command that runs `command` in the stage, as its user, with its environment."""
        within = {"HOME": "/root" if self.user == "root" else f"/home/{self.user}", **self.environ, **(environ or {})}
        places = sorted(pip_places())
        mounts = [f"mount -t proc proc {self.folder}/proc", f"mount --rbind /dev {self.folder}/dev"]
        mounts += [f"mount --bind -o ro {place} {self.folder}{HOST}{place}" for place in places]
        variables = [f"{name}={value}" for name, value in within.items()]
        as_user = ["chroot", f"--userspec={self.user}", str(self.folder), "/usr/bin/env", "-i", *variables]
        inner = ["/bin/sh", "-c", f"cd {self.workdir} && exec {shlex.join(command)}"]
        for place in places:
            target = self.folder / HOST.strip("/") / str(place).strip("/")
            target.mkdir(parents=True, exist_ok=True) if place.is_dir() else touch(target)
        return [*ISOLATED, "sh", "-c", " && ".join([*mounts, f"exec {shlex.join([*as_user, *inner])}"])]

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Runs a command and returns its output. Fails if its exit code is not 0."""
        done = subprocess.run(
            self.inside(*command, environ=environ), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout


@dataclass
class Build:
    """Executes a Dockerfile, one instruction after the other."""

    context: Path
    """The folder that COPY copies from."""
    folder: Path
    """The folder for the stages."""
    stages: dict[str, Stage] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        """Returns the last stage so far."""
        return list(self.stages.values())[-1]

    def execute(self, one: Instruction) -> None:
        """Executes an instruction. Raises KeyError for an unknown one."""
        known: dict[str, Callable[[str], None]] = {
            "FROM": self._from,
            "RUN": self._run,
            "COPY": self._copy,
            "ENV": self._env,
            "ARG": lambda rest: None,  # no argument has a default, and pip's settings are given to every RUN
            "USER": lambda rest: setattr(self.stage, "user", rest),
            "WORKDIR": lambda rest: setattr(self.stage, "workdir", rest),
            "ENTRYPOINT": lambda rest: setattr(self.stage, "entrypoint", json.loads(rest)),
            "HEALTHCHECK": lambda rest: setattr(self.stage, "healthcheck", json.loads(rest.partition("CMD ")[2])),
            **dict.fromkeys(("CMD", "EXPOSE", "VOLUME"), lambda rest: None),  # only a container engine needs them
        }
        known[one.word](one.rest)

    def _from(self, rest: str) -> None:
        base, _, name = rest.partition(" AS ")
        assert base == BASE, f"{base}: only {BASE} is supported here"
        self.stages[name] = Stage(debian(self.folder / (name or "last")))

    def _run(self, rest: str) -> None:
        self.stage.run("/bin/sh", "-c", rest, environ=pip_settings())

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        where = (
            self.stages[sources.pop(0).removeprefix("--from=")].folder if rest.startswith("--from=") else self.context
        )
        into = self.stage.folder / target.strip("/")
        for source in (where / one.strip("/") for one in sources):
            if source.is_dir():
                shutil.copytree(source, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, into)

    def _env(self, rest: str) -> None:
        for name, value in (one.split("=", 1) for one in shlex.split(rest)):
            self.stage.environ[name] = value.replace("$PATH", self.stage.environ["PATH"])


def debian(folder: Path) -> Path:
    """Copies Debian's smallest system to a folder. Skips the test if it cannot be built."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("this needs root and debootstrap, a package of Debian")
    kept = cache_folder(environment()) / f"debian-{SUITE}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            made = kept.with_suffix(".partial")
            shutil.rmtree(made, ignore_errors=True)
            subprocess.run(["debootstrap", "--variant=minbase", SUITE, str(made)], check=True, timeout=TIMEOUT_S)
            made.rename(kept)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", str(kept), str(folder)], check=True)
    for name in ("resolv.conf", "hosts"):
        shutil.copy(f"/etc/{name}", folder / "etc" / name)
    return folder


def touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def pip_configuration() -> Iterator[tuple[str, str]]:
    """Yields pip's settings on this machine, as variables."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    for name, value in re.findall(r"^[\w-]+\.([\w-]+)='(.*)'$", shown.stdout, re.M):
        yield "PIP_" + name.upper().replace("-", "_"), value.replace("\\n", " ")
    yield from ((name, value) for name, value in environment().items() if name.startswith("PIP_"))


def pip_places() -> set[Path]:
    """Returns the files and folders that pip's settings name. For an index in a folder, this is the folder around
    it."""
    named = (Path(place) for _, value in pip_configuration() for place in PLACE.findall(value))
    return {place.parent if place.name == "simple" else place for place in named if place.exists()}


def pip_settings() -> dict[str, str]:
    """Returns pip's settings as variables for a command in a stage."""
    return {name: PLACE.sub(HOST + r"\g<0>", value) for name, value in pip_configuration()}
