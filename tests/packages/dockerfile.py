"""Parses a Dockerfile, and executes it without a container engine: in folders with Debian, under chroot.

Each stage is a copy of Debian's smallest system in place of the build of `debian:bookworm-slim` that the Dockerfile
names: the same packages, made by debootstrap and stored in the cache folder (`debian`).
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.packages.debian import System, copied, pip_settings

BASE, SUITE = "debian:bookworm-slim", "bookworm"


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
    """A stage of an image: its system, and the settings of the instructions so far."""

    system: System
    entrypoint: Sequence[str] = ()
    healthcheck: Sequence[str] = ()


@dataclass
class Build:
    """Executes a Dockerfile, one instruction after the other."""

    context: Path
    """The folder that COPY copies from."""
    folder: Path
    """The folder for the stages."""
    stages: dict[str, Stage] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    """Defaults of the arguments before the first stage."""

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
            "ARG": self._arg,
            "USER": lambda rest: setattr(self.stage.system, "user", rest),
            "WORKDIR": lambda rest: setattr(self.stage.system, "workdir", rest),
            "ENTRYPOINT": lambda rest: setattr(self.stage, "entrypoint", json.loads(rest)),
            "HEALTHCHECK": lambda rest: setattr(self.stage, "healthcheck", json.loads(rest.partition("CMD ")[2])),
            **dict.fromkeys(("CMD", "EXPOSE", "VOLUME"), lambda rest: None),  # only a container engine needs them
        }
        known[one.word](one.rest)

    def _from(self, rest: str) -> None:
        base, _, name = rest.partition(" AS ")
        base = self.arguments[base.strip("${}")]
        assert base.startswith(f"{BASE}@"), f"{base}: only {BASE} is supported here"
        self.stages[name] = Stage(System(copied(self.folder / (name or "last"), SUITE)))

    def _arg(self, rest: str) -> None:
        """Keeps the default of an argument for FROM. Arguments of a stage are pip's settings, which every RUN gets."""
        if not self.stages:
            name, _, default = rest.partition("=")
            self.arguments[name] = default

    def _run(self, rest: str) -> None:
        self.stage.system.run("/bin/sh", "-c", rest, environ=pip_settings())

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        where = (
            self.stages[sources.pop(0).removeprefix("--from=")].system.folder
            if rest.startswith("--from=")
            else self.context
        )
        into = self.stage.system.folder / target.strip("/")
        for source in (where / one.strip("/") for one in sources):
            if source.is_dir():
                shutil.copytree(source, into, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                into.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, into)

    def _env(self, rest: str) -> None:
        for name, value in (one.split("=", 1) for one in shlex.split(rest)):
            self.stage.system.environ[name] = value.replace("$PATH", self.stage.system.environ["PATH"])
