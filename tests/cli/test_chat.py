"""`motet chat` against a running server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet.cli import app
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import build_tiny_tokenizer, fake_answer


def repeat(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Answers with its number and how long the prompt was, in messages."""
    messages = build_tiny_tokenizer().decode(list(request.prompt), skip_special_tokens=False).count("<|im_start|>")
    return fake_answer(f"answer {start.index} to {messages - 1}")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FakeServer]:
    with FakeServer(folder, repeat) as running:
        yield running


def chat(server: FakeServer, *arguments: str, typed: str | None = None) -> str:
    result = CliRunner().invoke(app, ["chat", "--url", server.url, *arguments], input=typed)
    assert result.exit_code == 0, result.output
    return result.output


def test_one_question_gets_n_answers(server: FakeServer) -> None:
    output = chat(server, "hello?", "-n", "3", "--seed", "7")
    assert output == "".join(f"--- choice {i} (stop)\nanswer {i} to 1\n" for i in range(3))
    assert [start.seed for start in server.engine.requests[-1].choices] == [7, 8, 9]


def test_a_conversation_goes_on_with_the_answer_that_was_picked(server: FakeServer) -> None:
    output = chat(server, "-n", "2", "--system", "be brief", typed="one\n1\ntwo\n0\n\n")
    assert "answer 1 to 2" in output  # system and user
    assert "answer 1 to 4" in output  # and the answer that was picked, and the next question
    prompt = build_tiny_tokenizer().decode(list(server.engine.requests[-1].prompt), skip_special_tokens=False)
    assert "answer 1 to 2" in prompt
    assert "answer 0 to 2" not in prompt


def test_the_url_may_end_in_v1(server: FakeServer) -> None:
    result = CliRunner().invoke(app, ["chat", "hello?", "--url", f"{server.url}/v1", "-n", "1"])
    assert result.exit_code == 0


def test_a_refusal_is_one_line(folder: Path) -> None:
    with FakeServer(folder, repeat, api_key="secret") as server:
        result = CliRunner().invoke(app, ["chat", "hello?", "--url", server.url])
        assert result.exit_code == 1
        assert "401" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        result = CliRunner().invoke(app, ["chat", "hello?", "--url", server.url, "--api-key", "secret", "-n", "1"])
        assert result.exit_code == 0


def test_a_server_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["chat", "hello?", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1
