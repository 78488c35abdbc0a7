"""The commands of `motet chat`: lines that start with `/`. They change the settings of the next answers."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from motet.cli.conversation import ChatQuestion

KEYS = """\
Enter sends the message, Alt-Enter (or Esc, Enter) starts a new line, and pasted lines stay one message.
Up and Down show earlier messages. Ctrl-C ends an answer and keeps its text, or clears the line; Ctrl-D ends the chat.
A message that starts with / needs a space before it."""


@dataclass
class ChatState:
    """The settings of the next answers, and the conversation so far. The commands change it."""

    settings: ChatQuestion
    """Settings of a request. Its messages are not used."""
    system: str | None = None
    """System message, before all other messages."""
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def request(self) -> ChatQuestion:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return replace(self.settings, messages=[*system, *self.turns])

    def add(self, role: str, text: str) -> None:
        self.turns.append({"role": role, "content": text})


@dataclass(frozen=True)
class ChatCommand:
    usage: str
    meaning: str
    run: Callable[[ChatState, str], str]
    """Applies the command with the text after its name, and returns the answer for the user. Raises ValueError for
    another text, and EOFError at the end of the chat."""


def show_help(state: ChatState, text: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    return "\n".join([*(f"{c.usage:<{width}}  {c.meaning}" for c in COMMANDS.values()), "", KEYS])


def set_n(state: ChatState, text: str) -> str:
    if text:
        state.settings = replace(state.settings, n=integer(text, least=1))
    return f"n is {state.settings.n}"


def set_max_tokens(state: ChatState, text: str) -> str:
    if text:
        state.settings = replace(state.settings, max_tokens=integer(text, least=1))
    return f"max-tokens is {state.settings.max_tokens}"


def set_temperature(state: ChatState, text: str) -> str:
    if text:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 2:
            raise ValueError(f"{text} is not a number of 0 to 2")
        state.settings = replace(state.settings, temperature=value)
    return f"temperature is {state.settings.temperature:g}"


def set_seed(state: ChatState, text: str) -> str:
    if text:
        state.settings = replace(state.settings, seed=None if text == "none" else integer(text, least=0))
    return "answers have random seeds" if state.settings.seed is None else f"seed is {state.settings.seed}"


def set_system(state: ChatState, text: str) -> str:
    if text:
        state.system = None if text == "none" else text
    return f"system message: {state.system}" if state.system else "no system message"


def clear(state: ChatState, text: str) -> str:
    state.turns.clear()
    return "the conversation is empty"


def end(state: ChatState, text: str) -> str:
    raise EOFError


COMMANDS: Mapping[str, ChatCommand] = {
    "/help": ChatCommand("/help", "list commands and keys", show_help),
    "/n": ChatCommand("/n 8", "number of answers to each message", set_n),
    "/system": ChatCommand("/system TEXT", "system message; none for no message", set_system),
    "/temperature": ChatCommand("/temperature 0.5", "temperature, 0 to 2", set_temperature),
    "/max-tokens": ChatCommand("/max-tokens 400", "maximum number of tokens of an answer", set_max_tokens),
    "/seed": ChatCommand("/seed 7", "seed: choice i uses seed + i; none for random seeds", set_seed),
    "/clear": ChatCommand("/clear", "forget the conversation", clear),
    "/exit": ChatCommand("/exit", "end the chat, as Ctrl-D does", end),
}


def run_command(line: str, state: ChatState) -> str:
    """Runs a line that starts with `/`, and returns the answer for the user. Raises EOFError at the end of the chat."""
    name, _, text = line.strip().partition(" ")
    if (command := COMMANDS.get(name)) is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        return f"{name}: there is no such command{f': did you mean {near[0]}?' if near else ''} (/help lists all)"
    try:
        return command.run(state, text.strip())
    except ValueError as error:
        return f"{name}: {error} (for example {command.usage})"


def integer(text: str, *, least: int) -> int:
    """Returns an integer. Raises ValueError with the limit."""
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{text} is not an integer of at least {least}")
    return int(text)
