"""The lock files of the image: what they pin fits `pyproject.toml`, and the image installs nothing else."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packages.conftest import ROOT
from tests.packages.dockerfile import instructions

DOCKER = ROOT / "deploy" / "docker"
LOCKS = ("requirements.lock", "build.lock")
PINNED = re.compile(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)
IMAGE = {"platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.11"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned(name: str) -> dict[str, Version]:
    return {match[1]: Version(match[2]) for match in PINNED.finditer((DOCKER / name).read_text())}


def needed(texts: list[str]) -> list[Requirement]:
    """Returns the requirements that apply to the image."""
    environment = {**IMAGE, "python_full_version": "3.11.2", "extra": ""}
    found = map(Requirement, texts)
    return [one for one in found if one.marker is None or one.marker.evaluate(environment)]


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_one_version_and_its_hashes(name: str) -> None:
    lines = [line for line in (DOCKER / name).read_text().splitlines() if not line.lstrip().startswith(("#", "--hash"))]
    assert len(lines) == len(pinned(name)) > 0


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        (LOCKS[0], [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["otel"]]),
        (LOCKS[1], [*PROJECT["build-system"]["requires"], "build"]),
    ],
)
def test_the_versions_are_the_ones_that_the_project_requires(name: str, texts: list[str]) -> None:
    """After a change of `pyproject.toml`, `make lock` writes them again."""
    versions = pinned(name)
    wrong = [
        str(one)
        for one in needed(texts)
        if not one.specifier.contains(versions.get(canonicalize_name(one.name), Version("0")), prereleases=True)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", LOCKS)
def test_the_packages_require_no_others(name: str) -> None:
    versions, missing = pinned(name), []
    for package in versions.keys() - {"torch"}:  # its CUDA build, which can be installed here, has more
        try:
            texts = requires(package) or []
        except PackageNotFoundError:
            continue
        missing += [f"{package}: {one}" for one in needed(texts) if canonicalize_name(one.name) not in versions]
    assert missing == []


def test_the_image_installs_only_what_is_locked_on_a_base_that_is_pinned() -> None:
    found = instructions((DOCKER / "Dockerfile").read_text())
    (base,) = (one.rest for one in found if one.word == "ARG" and one.rest.startswith("BASE="))
    assert re.fullmatch(r"BASE=debian:bookworm-slim@sha256:[0-9a-f]{64}", base)
    assert {one.rest.split()[0] for one in found if one.word == "FROM"} == {"${BASE}"}
    installs = [one.rest.split("pip install")[1] for one in found if "pip install" in one.rest]
    assert [("--require-hashes" in one, "--no-deps" in one) for one in installs] == [(True, False)] * 2 + [
        (False, True)
    ]
    assert "--no-isolation" in next(one.rest for one in found if "-m build" in one.rest)
