"""Asks a running server over HTTP and follows its stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from motet.cli.conversation import Conversation
from motet.errors import MotetError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
"""Between two chunks: a long prompt ahead in the queue is no failure."""


@dataclass(frozen=True)
class Question:
    """One chat request."""

    messages: Sequence[Mapping[str, str]]
    n: int
    max_tokens: int
    temperature: float
    seed: int | None = None

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {
            "messages": list(self.messages),
            "n": self.n,
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if self.seed is None else body | {"seed": self.seed}


class _Reason(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Reason


def connect(url: str, *, api_key: str | None = None) -> httpx.Client:
    """A client of the server at `url`, with or without `/v1` at its end."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=timeout)


def ask(client: httpx.Client, question: Question, *, on_change: Callable[[Conversation], None]) -> Conversation:
    """Follows the answers to their end. Raises `MotetError` if the server refuses, fails or is not there."""
    talk = Conversation(question.n)
    try:
        with client.stream("POST", "/v1/chat/completions", json=question.body()) as response:
            if response.status_code != httpx.codes.OK:
                raise MotetError(refusal(response.status_code, response.read()))
            for line in response.iter_lines():
                talk.feed(line)
                on_change(talk)
    except httpx.HTTPError as exc:
        raise MotetError(f"{client.base_url}: {exc}") from exc
    if not talk.done:
        raise MotetError("the server closed the stream before its end")
    return talk


def refusal(status: int, body: bytes) -> str:
    try:
        return f"the server answered {status}: {msgspec.json.decode(body, type=_Refusal).error.message}"
    except msgspec.DecodeError:
        return f"the server answered {status}"
