"""A streamed answer as a client sees it: lines of server-sent events in, one object per choice and the times out.

It does no I/O, so that the terminal reads it with a plain client and a benchmark with an asynchronous one; and it
reads chats and completions alike.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from motet.errors import EngineError

DATA = "data: "
DONE = "[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: _Error | None = None


EVENT = msgspec.json.Decoder(_Event)


@dataclass
class Answer:
    """One choice as far as it has come."""

    text: str = ""
    thought: str = ""
    """What the model thought before it; no part of the conversation."""
    finish_reason: str | None = None
    first_s: float | None = None
    """Seconds until its first text, thought or said."""


class Conversation:
    """One request and its n answers. Times count from its making."""

    def __init__(self, n: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.answers = [Answer() for _ in range(n)]
        self.usage: Usage | None = None
        self.total_s: float | None = None
        """Seconds until the end of the stream; None before it."""
        self._clock = clock
        self._started = clock()

    @property
    def done(self) -> bool:
        return self.total_s is not None

    @property
    def first_s(self) -> float | None:
        """Seconds until the first answer had text."""
        return min((a.first_s for a in self.answers if a.first_s is not None), default=None)

    @property
    def last_first_s(self) -> float | None:
        """Seconds until every answer had text; None while one is still silent."""
        times = [a.first_s for a in self.answers if a.first_s is not None]
        return max(times) if times and len(times) == len(self.answers) else None

    def feed(self, line: str) -> None:
        """Takes one line of the stream. Raises `EngineError` if it says that the server failed."""
        if not line.startswith(DATA):
            return
        data = line.removeprefix(DATA)
        now_s = self._clock() - self._started
        if data == DONE:
            self.total_s = now_s
            return
        event = EVENT.decode(data)
        if event.error:
            raise EngineError(f"the server failed: {event.error.message}")
        self.usage = event.usage or self.usage
        for choice in event.choices:
            self._take(choice, now_s)

    def _take(self, choice: _Choice, now_s: float) -> None:
        answer = self.answers[choice.index]
        text = choice.text or (choice.delta.content if choice.delta else None) or ""
        thought = (choice.delta.reasoning_content if choice.delta else None) or ""
        if (text or thought or choice.finish_reason) and answer.first_s is None:
            answer.first_s = now_s
        answer.text += text
        answer.thought += thought
        answer.finish_reason = choice.finish_reason or answer.finish_reason
