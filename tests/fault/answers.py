"""Reads complete and streamed answers into one form for comparison, and checks the form of streams."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import msgspec

Logprobs = dict[str, list[object] | None]
Body = dict[str, object]


class ChatContent(msgspec.Struct, frozen=True):
    role: str | None = None
    content: str = ""


class PartOfChoice(msgspec.Struct, frozen=True):
    """One choice of a complete answer, or the choice's part of one chunk."""

    index: int
    text: str = ""
    message: ChatContent | None = None
    delta: ChatContent | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None

    @property
    def generated(self) -> str:
        message = self.message or self.delta
        return message.content if message else self.text


class ReportedUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Failure(msgspec.Struct, frozen=True):
    message: str
    type: str | None = None
    code: str | None = None


class AnswerOrChunk(msgspec.Struct, frozen=True):
    """A complete answer, or one chunk."""

    choices: list[PartOfChoice] = []
    groups: list[dict[str, object]] = []
    usage: ReportedUsage | None = None
    error: Failure | None = None


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=dict)

    def take(self, part: PartOfChoice) -> None:
        assert self.finish_reason is None, f"choice {part.index} continued after its end"
        self.text += part.generated
        self.token_ids += part.token_ids or []
        for name, values in (part.logprobs or {}).items():
            if values is not None:
                self.logprobs[name] = [*(self.logprobs.get(name) or []), *values]
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason


@dataclass
class Answer:
    """The choices of an answer, by their index."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: ReportedUsage | None = None
    groups: list[dict[str, object]] = field(default_factory=list)
    """The results of policies, without the ids of the groups."""

    def take(self, message: AnswerOrChunk) -> None:
        self.groups += [{name: value for name, value in group.items() if name != "id"} for group in message.groups]

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices.values()]

    @property
    def lengths(self) -> list[int]:
        """Returns the number of tokens of each choice. The request must have set `return_token_ids`."""
        return [len(choice.token_ids) for choice in self.choices.values()]


@dataclass
class Reader:
    """Reads one streamed answer, and fails if anything comes after `[DONE]`."""

    answer: Answer = field(default_factory=Answer)
    failure: Failure | None = None
    chunks: int = 0
    comments: int = 0
    done: bool = False
    roles: set[int] = field(default_factory=set)
    _counted: int = 0

    def line(self, line: str) -> None:
        if not line:
            return
        assert not self.done, f"after the end: {line}"
        if line == ": ping":
            self.comments += 1
            return
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.done = True
        else:
            self._chunk(msgspec.json.decode(data, type=AnswerOrChunk))

    def _chunk(self, chunk: AnswerOrChunk) -> None:
        assert self.failure is None, "a chunk after the error"
        self.chunks += 1
        self.failure = chunk.error
        for part in chunk.choices:
            self._part(part)
        self.answer.take(chunk)
        if chunk.usage is not None:
            assert chunk.usage.completion_tokens >= self._counted, "the count of tokens decreased"
            self._counted = chunk.usage.completion_tokens
            self.answer.usage = chunk.usage

    def _part(self, part: PartOfChoice) -> None:
        if part.delta is not None and part.delta.role is not None:
            assert part.index not in self.roles, f"a second role chunk of choice {part.index}"
            assert part.index not in self.answer.choices, f"choice {part.index} had text before its role"
            self.roles.add(part.index)
        elif part.delta is not None:
            assert part.index in self.roles, f"choice {part.index} has no role"
        self.answer.choices.setdefault(part.index, Choice()).take(part)

    def complete(self) -> Answer:
        """Returns the answer. Fails if it is incomplete."""
        assert self.failure is None, self.failure
        assert self.done
        for index, choice in self.answer.choices.items():
            assert choice.finish_reason is not None, f"choice {index} has no end"
        return Answer(dict(sorted(self.answer.choices.items())), self.answer.usage, self.answer.groups)


def complete_answer(response: httpx.Response) -> Answer:
    assert response.status_code == 200, response.text
    message = msgspec.json.decode(response.content, type=AnswerOrChunk)
    answer = Answer(usage=message.usage)
    answer.take(message)
    for part in message.choices:
        answer.choices.setdefault(part.index, Choice()).take(part)
    return answer


def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """Splits a stream into lines, as clients with httpx do: also at U+0085 and others, which the texts can contain."""
    return response.aiter_lines()


async def read(lines: AsyncIterator[str], reader: Reader, *, until: Callable[[Reader], bool] | None = None) -> Reader:
    """Reads to the end, or until the predicate is true."""
    async for line in lines:
        reader.line(line)
        if until is not None and until(reader):
            break
    return reader


async def fetch_answer(http: httpx.AsyncClient, route: str, body: Body) -> Answer:
    """Requests an answer, streamed if the body says so, and returns it. Without `include_usage` a streamed answer has
    no usage."""
    if not body.get("stream"):
        return complete_answer(await http.post(route, json=body))
    async with http.stream("POST", route, json=body) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        return (await read(lines_of(response), Reader())).complete()
