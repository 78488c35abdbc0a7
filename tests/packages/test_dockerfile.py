"""`deploy/docker/Dockerfile`: its properties, and the execution of its instructions without a container engine."""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

import motet
from motet.deploy.child import ChildServer
from tests.packages.conftest import ROOT
from tests.packages.dockerfile import Build, Stage, instructions
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

FILE = ROOT / "deploy" / "docker" / "Dockerfile"
LINTER = "dockerfile-utils@0.16.3"
PORT = 18080
MODEL = "/home/motet/tiny"


def rests(word: str) -> list[str]:
    return [one.rest for one in instructions(FILE.read_text()) if one.word == word]


def test_lines_are_joined_and_comments_left_out() -> None:
    found = instructions("# a\nFROM x AS y\nRUN a \\\n  # b\n    && c\n\nUSER d\n")
    assert [(one.word, one.rest) for one in found] == [("FROM", "x AS y"), ("RUN", "a && c"), ("USER", "d")]


def test_the_image_does_not_run_as_root_and_has_a_health_check() -> None:
    assert rests("USER")[-1] not in ("root", "0")
    assert len(rests("HEALTHCHECK")) == 1


def test_the_image_contains_no_secret() -> None:
    """Everyone with the image can read a key in ENV or ARG."""
    assert not re.search(r"KEY|TOKEN|SECRET|PASSWORD", " ".join([*rests("ENV"), *rests("ARG")]))


def test_all_copied_files_exist() -> None:
    copied = (rest.split()[:-1] for rest in rests("COPY") if not rest.startswith("--from="))
    assert all((ROOT / name).exists() for names in copied for name in names)


@pytest.mark.slow
@pytest.mark.image
def test_a_linter_reports_nothing() -> None:
    if not shutil.which("npx"):
        pytest.skip("there is no npm on this machine")
    command = ["npx", "--yes", LINTER, "lint", str(FILE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{LINTER} cannot be downloaded")
    if "npm error" in done.stderr:
        pytest.skip(f"{LINTER} cannot be installed: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    build = Build(ROOT, tmp_path_factory.mktemp("image"))
    for one in instructions(FILE.read_text()):
        build.execute(one)
    yield build.stage
    shutil.rmtree(build.folder)  # 2 GB


@pytest.mark.long
@pytest.mark.image
@pytest.mark.timeout(3000)
def test_all_instructions_can_be_executed_and_the_image_answers_as_its_user(image: Stage, folder: Path) -> None:
    """`--kernels compiled` refuses to start without kernels, and the image has no compiler."""
    model = shutil.copytree(folder, image.system.folder / MODEL.strip("/"))
    subprocess.run(["chmod", "-R", "a+rX", str(model)], check=True)  # the image's user reads it
    assert image.system.run(*image.entrypoint, "version").strip() == motet.__version__
    assert image.system.run("id", "--user", "--name").strip() == "motet"
    assert "no compiler" in image.system.run("/bin/sh", "-c", "command -v g++ gcc cc || echo no compiler")

    def start(command: Sequence[str], **more: Any) -> "subprocess.Popen[str]":
        inside = image.system.inside(
            *image.entrypoint, *command[command.index("serve") :], environ={"MOTET_PORT": str(PORT)}
        )
        return subprocess.Popen(inside, **more)

    body = {"model": "tiny", "prompt": "a", "n": 3, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    with ChildServer([MODEL, *TINY, "--kernels", "compiled"], port=PORT, popen=start) as server:
        image.system.run(*image.healthcheck, environ={"MOTET_PORT": str(PORT)})
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    with pytest.raises(AssertionError, match="refused"):
        image.system.run(*image.healthcheck, environ={"MOTET_PORT": str(PORT)})
