"""The commands of a chat, and the keys of its prompt."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.base import PipeInput
from prompt_toolkit.output import DummyOutput

from motet.cli.chat import HISTORY, edited, history_in, message_prompt
from motet.cli.chat_commands import COMMANDS, ChatState, run_command
from motet.cli.conversation import ChatQuestion


@pytest.fixture
def state() -> ChatState:
    return ChatState(ChatQuestion([], n=4, max_tokens=200, temperature=0.8))


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        yield pipe


def test_commands_change_the_settings_of_the_next_request(state: ChatState) -> None:
    for line in ("/n 8", "/temperature 0.5", "/max-tokens 9", "/seed 7", "/system be brief"):
        run_command(line, state)
    state.add("user", "hello")
    assert state.request == ChatQuestion(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        n=8,
        max_tokens=9,
        temperature=0.5,
        seed=7,
    )
    for line in ("/seed none", "/system none", "/clear"):
        run_command(line, state)
    assert (state.request.messages, state.request.seed) == ([], None)


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("/n", "n is 4"),
        ("/n 0", "/n: 0 is not an integer of at least 1 (for example /n 8)"),
        ("/n 2.5", "/n: 2.5 is not an integer of at least 1 (for example /n 8)"),
        ("/temperature x", "/temperature: x is not a number of 0 to 2 (for example /temperature 0.5)"),
        ("/temperature nan", "/temperature: nan is not a number of 0 to 2 (for example /temperature 0.5)"),
        ("/tempature 1", "/tempature: there is no such command: did you mean /temperature? (/help lists all)"),
        ("/etc/hosts", "/etc/hosts: there is no such command (/help lists all)"),
        ("/system", "no system message"),
    ],
)
def test_a_command_without_effect_is_answered(state: ChatState, line: str, reply: str) -> None:
    assert run_command(line, state) == reply
    assert state.settings == ChatQuestion([], n=4, max_tokens=200, temperature=0.8)


def test_help_lists_every_command(state: ChatState) -> None:
    assert all(command.usage in run_command("/help", state) for command in COMMANDS.values())


def test_exit_ends_the_chat(state: ChatState) -> None:
    with pytest.raises(EOFError):
        run_command("/exit", state)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello\r", "hello"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("\x1b[200~one\ntwo\n\nfour\x1b[201~\r", "one\ntwo\n\nfour"),
        ("wrong\x03right\r", "right"),
        ("\x1b[A\r", "earlier"),
    ],
    ids=["enter", "alt-enter", "paste", "ctrl-c", "up"],
)
def test_keys_edit_one_message(keyboard: PipeInput, keys: str, message: str) -> None:
    keyboard.send_text(keys)
    assert edited(message_prompt(InMemoryHistory(["earlier"])), "you> ") == message


def test_ctrl_d_ends_the_chat(keyboard: PipeInput) -> None:
    keyboard.send_text("\x04")
    with pytest.raises(EOFError):
        edited(message_prompt(InMemoryHistory()), "you> ")


def test_only_the_owner_can_read_the_history(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / HISTORY).touch(0o644)
    for folder in (tmp_path / "cache", tmp_path / "new"):
        history_in(folder).append_string("secret")
        assert (folder / HISTORY).stat().st_mode & 0o777 == 0o600
    assert list(history_in(tmp_path / "new").load_history_strings()) == ["secret"]


def test_without_a_file_the_history_is_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not isinstance(history_in(tmp_path / "file"), FileHistory)
