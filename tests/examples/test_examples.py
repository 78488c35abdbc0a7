"""Every example runs as described in its first lines, with a server that has a scripted engine."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
ANSWERS = ("there are 12", "I think 12", "it is 11")


def numbered(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(ANSWERS[start.index % len(ANSWERS)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(save_tiny_tokenizer(tmp_path_factory.mktemp("model")), numbered) as running:
        yield running


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_side_by_side(server: FakeServer) -> None:
    output = run(sys.executable, str(EXAMPLES / "side_by_side.py"), "how many?", "--url", f"{server.url}/v1")
    lines = output.splitlines()
    assert lines[:8] == [f"{i}: {ANSWERS[i % 3]}" for i in range(8)]
    assert lines[8].endswith("counted once; answers " + str(sum(len(tokens_of(i)) for i in range(8))))
    assert [start.seed for start in server.engine.requests[-1].choices] == list(range(1, 9))


def tokens_of(index: int) -> list[int]:
    return fake_answer(ANSWERS[index % len(ANSWERS)])


@pytest.mark.slow
def test_best_of_eight(server: FakeServer) -> None:
    output = run(sys.executable, str(EXAMPLES / "best_of_eight.py"), "--url", f"{server.url}/v1")
    assert output.splitlines() == ["6 of 8: 12", "2 of 8: 11"]


@pytest.mark.curl
def test_curl(server: FakeServer) -> None:
    lines = run(str(EXAMPLES / "curl.sh"), server.url).splitlines()
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    assert [len(found["choices"]) for found in objects[:2]] == [4, 4]
    assert "workers" in objects[2]
    assert "data: [DONE]" in lines


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file() and path.suffix != ".md"} == {
        "best_of_eight.py",
        "curl.sh",
        "lm_eval_motet.py",  # in tests/clients, with lm-eval
        "side_by_side.py",
    }
