"""`motet chat` with a running server, and the layout of answers with and without a terminal."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from motet.cli.columns import layout, show
from motet.cli.conversation import Conversation, StreamedChoice
from motet.cli.main import app
from motet.errors import EngineError
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import build_tiny_tokenizer, fake_answer


def repeat(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Returns the tokens of an answer: its index, and the number of messages in the prompt."""
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


def test_each_line_of_the_input_is_a_question_after_the_first_answer(server: FakeServer) -> None:
    """The bug: with several answers, the next question was read as the number of an answer, and a blank line ended
    the conversation."""
    output = chat(server, "-n", "2", "--system", "be brief", typed="one\n\ntwo\n")
    answers = [(n, to) for to in (2, 4) for n in (0, 1)]  # to system and user, and then to 2 more messages
    assert output == "".join(f"--- choice {n} (stop)\nanswer {n} to {to}\n" for n, to in answers)
    prompt = build_tiny_tokenizer().decode(list(server.engine.requests[-1].prompt), skip_special_tokens=False)
    assert "answer 0 to 2" in prompt
    assert "answer 1 to 2" not in prompt


def test_a_model_is_chosen_on_a_running_server(server: FakeServer) -> None:
    """The bug: --model had no effect with --url."""
    result = CliRunner().invoke(app, ["chat", "hello?", "--url", server.url, "--model", "nope"])
    assert result.exit_code == 1
    assert "The model `nope` does not exist" in result.stderr


@pytest.mark.slow
def test_a_refusal_is_one_line(folder: Path) -> None:
    with FakeServer(folder, repeat, api_key="secret") as server:
        result = CliRunner().invoke(app, ["chat", "hello?", "--url", server.url])
        assert result.exit_code == 1
        assert "401" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        result = CliRunner().invoke(app, ["chat", "hello?", "--url", server.url, "--api-key", "secret", "-n", "1"])
        assert result.exit_code == 0


def test_an_unreachable_server_is_one_line() -> None:
    result = CliRunner().invoke(app, ["chat", "hello?", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_wrong_url_is_refused() -> None:
    result = CliRunner().invoke(app, ["chat", "hello?", "--url", "http://host:none"])
    assert result.exit_code == 2 and "--url 'http://host:none' is not a URL" in result.stderr


def screen_of(answers: list[StreamedChoice], *, width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(layout(answers, width=width, height=height))
    return capture.get().splitlines()


def test_no_answer_moves_the_cursor_of_a_terminal() -> None:
    odd = StreamedChoice("one\x1b[2J\x1b]52;c;x\x07\ntwo", finish_reason="[/link]\x1b[2J")
    shown = "\n".join(screen_of([odd], width=100))
    assert "\x1b" not in shown and "\x07" not in shown
    assert r"one\x1b[2J" in shown and r"[/link]\x1b[2J" in shown


def test_an_error_that_quotes_a_server_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise EngineError("it said \x1b[2J\nand more")

    monkeypatch.setattr("motet.cli.chat.connect", refuse)
    result = CliRunner().invoke(app, ["chat", "hello?", "--url", "http://127.0.0.1:1"])
    assert result.stderr == "motet: it said \\x1b[2J\nand more\n"


def test_answers_stand_side_by_side_when_they_fit() -> None:
    lines = screen_of([StreamedChoice("one"), StreamedChoice("two"), StreamedChoice("three")], width=120)
    assert any("one" in line and "two" in line and "three" in line for line in lines)


def test_answers_stand_below_each_other_when_they_do_not_fit() -> None:
    lines = screen_of([StreamedChoice("one"), StreamedChoice("two")], width=40)
    assert not any("one" in line and "two" in line for line in lines)
    assert any("two" in line for line in lines)


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_unfinished_answers_fit_the_screen(n: int) -> None:
    answers = [StreamedChoice("word " * 400 + f"last{i}") for i in range(n)]
    lines = screen_of(answers, width=80, height=24)
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert all(any(f"last{i}" in line for line in lines) for i in range(n))


def test_square_brackets_of_an_answer_are_not_markup() -> None:
    assert any("[bold]x[/bold]" in line for line in screen_of([StreamedChoice("[bold]x[/bold]")], width=80))


def test_reasoning_is_shown_until_the_answer_starts() -> None:
    assert any("Hm." in line for line in screen_of([StreamedChoice(reasoning="Hm.")], width=80))
    lines = screen_of([StreamedChoice("Yes.", reasoning="Hm.")], width=80)
    assert any("Yes." in line for line in lines)
    assert not any("Hm." in line for line in lines)


def two_answers(talk: Conversation) -> None:
    talk.answers[0].text, talk.answers[0].finish_reason = "first [x]", "stop"
    talk.answers[1].text, talk.answers[1].finish_reason = "second", "length"


def test_without_a_terminal_finished_answers_are_printed_one_after_the_other() -> None:
    out = io.StringIO()
    show(Console(file=out), Conversation(2), follow=two_answers)
    assert out.getvalue() == "--- choice 0 (stop)\nfirst [x]\n--- choice 1 (length)\nsecond\n"


def test_on_a_terminal_the_finished_answers_stay() -> None:
    out = io.StringIO()
    show(
        Console(file=out, force_terminal=True, color_system=None, width=80, height=24),
        Conversation(2),
        follow=two_answers,
    )
    _, left = out.getvalue().rsplit("\x1b[?25h", 1)  # the cursor is visible again: nothing after it is overwritten
    assert "first [x]" in left
    assert "second" in left
