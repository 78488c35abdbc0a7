"""The answers of a fake OpenAI-compatible server, and the ways in which they can deviate from OpenAI's.

An answer depends only on the prompt and the seed, so that tests can compare n choices of one request with n requests:
choice i with seed s is `<prompt> <s + i> ...`, one word for each chunk.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Json = dict[str, Any]


class Index(Enum):
    """The index of choices in streams and complete answers."""

    OWN = auto()
    ZERO = auto()
    """All choices have index 0."""
    ABSENT = auto()


class UsagePlace(Enum):
    """The place of the usage in a stream."""

    END = auto()
    """A chunk without choices has it, if the request sets `include_usage`."""
    EACH = auto()
    """The last chunk of each choice has it, even if it was not requested."""
    NONE = auto()


class Break(Enum):
    """What happens to a stream after its first chunk."""

    EVENT = auto()
    """An error event comes, and the stream ends."""
    CUT = auto()
    """The connection breaks."""
    SILENCE = auto()
    """The stream ends without an error."""


@dataclass(frozen=True)
class FixedAnswer:
    """An answer that is sent instead of the usual one, mostly an error."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def error(cls, status: int, message: str, *, param: str | None = None, code: str | None = None) -> "FixedAnswer":
        body = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        return cls(status, json.dumps({"error": body}).encode(), (("content-type", "application/json"),))


@dataclass
class Behaviour:
    """The behaviour of a fake server. By default it does not deviate from OpenAI's."""

    ignores_n: bool = False
    index: Index = Index.OWN
    """The `index` of choices in streams."""
    finishes_at_end: bool = False
    """All choices finish together, after the last chunk of every choice."""
    never_finishes: bool = False
    ends_with: str = "stop"
    """The `finish_reason` of a choice that has all its words."""
    finish_twice: bool = False
    usage: UsagePlace = UsagePlace.END
    no_done: bool = False
    line_end: bytes = b"\n"
    comments: bool = False
    role_everywhere: bool = False
    no_role: bool = False
    refuses: frozenset[str] = frozenset()
    """Fields that get a 400; `n` only above 1."""
    breaks: dict[int, Break] = field(default_factory=dict)
    """What happens to choices after their first chunk, by seed."""
    hangs: frozenset[int] = frozenset()
    """Seeds of choices that send their first chunk and nothing after it."""
    no_routes: frozenset[str] = frozenset()
    next_errors: list[FixedAnswer] = field(default_factory=list)
    """Errors for the next requests, one for each."""
    key: str | None = None
    """The only API key that the server accepts."""
    listing: FixedAnswer | None = None
    """The answer of the server instead of the list of its models."""
    models: tuple[Json, ...] = ({"id": "m", "max_model_len": 4096},)


@dataclass(frozen=True)
class OpenAIRequest:
    """A request for choices, as the fake server received it."""

    path: str
    headers: dict[str, str]
    body: Json


@dataclass(frozen=True)
class ScriptedChoice:
    number: int
    words: list[str]
    finish: str
    breaks: Break | None


class Script:
    """The answer of the server to one request."""

    def __init__(self, request: OpenAIRequest, behaviour: Behaviour) -> None:
        self._chat = request.path == CHAT
        self._behaviour = behaviour
        body = request.body
        self._include_usage = (body.get("stream_options") or {}).get("include_usage", False)
        prompts = [body["messages"][-1]["content"]] if self._chat else body["prompt"]
        prompts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
        n = 1 if behaviour.ignores_n else body.get("n") or 1
        max_words = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.prompts = prompts
        self.hangs = (body.get("seed") or 0) in behaviour.hangs
        self.choices = [
            _choice(at * n + i, prompt, (body.get("seed") or 0) + i, max_words, behaviour)
            for at, prompt in enumerate(prompts)
            for i in range(n)
        ]

    def complete(self) -> Json:
        choices = [self._complete_choice(choice) for choice in self.choices]
        if self._behaviour.index is Index.ABSENT:
            for choice in choices:
                del choice["index"]
        usage = {} if self._behaviour.usage is UsagePlace.NONE else {"usage": self._usage(self.choices)}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head(kind), "choices": choices, **usage}

    def events(self) -> Iterator[bytes | None]:
        """Yields the events of a stream, and None where the connection breaks."""
        behaviour = self._behaviour
        last_chunks: list[bytes | None] = []
        for step in range(max(len(choice.words) for choice in self.choices) + 1):
            for choice in self.choices:
                if step < len(choice.words):
                    yield self._event(self._chunk(choice, choice.words[step], first=step == 0))
                    if choice.breaks is not None:
                        yield from self._broken(choice.breaks)
                        return
                elif step == len(choice.words) and not behaviour.never_finishes:
                    last_chunks.append(self._event(self._chunk(choice, "", finish=choice.finish)))
            if not behaviour.finishes_at_end:
                yield from last_chunks
                last_chunks = [] if not behaviour.finish_twice else last_chunks
        yield from last_chunks
        if behaviour.usage is UsagePlace.END and self._include_usage:
            yield self._event({**self._head(self._kind), "choices": [], "usage": self._usage(self.choices)})
        if not behaviour.no_done:
            yield b"data: [DONE]" + 2 * behaviour.line_end

    def _broken(self, how: Break) -> Iterator[bytes | None]:
        if how is Break.EVENT:
            yield self._event({"error": {"message": "the model failed", "type": "server_error", "code": 500}})
        elif how is Break.CUT:
            yield None

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, kind: str) -> Json:
        return {"id": "fake", "object": kind, "created": 1, "model": "m-1", "system_fingerprint": "fp"}

    def _chunk(self, choice: "ScriptedChoice", text: str, *, first: bool = False, finish: str | None = None) -> Json:
        behaviour = self._behaviour
        content: Json = {"text": text, "logprobs": None}
        if self._chat:
            delta: Json = {"content": text} if text else {}
            if not behaviour.no_role and (first or behaviour.role_everywhere):
                delta = {"role": "assistant", **delta}
            content = {"delta": delta, "logprobs": {"content": [{"token": text, "logprob": -0.5}]} if text else None}
        usage = {"usage": self._usage([choice])} if finish and behaviour.usage is UsagePlace.EACH else {}
        index = {} if behaviour.index is Index.ABSENT else {"index": self._number(choice)}
        return {**self._head(self._kind), "choices": [{**index, **content, "finish_reason": finish}], **usage}

    def _complete_choice(self, choice: "ScriptedChoice") -> Json:
        text = "".join(choice.words)
        if self._chat:
            content: Json = {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}
        else:
            content = {"text": text, "logprobs": None}
        return {
            "index": choice.number,
            **content,
            "finish_reason": None if self._behaviour.never_finishes else choice.finish,
        }

    def _number(self, choice: "ScriptedChoice") -> int:
        return 0 if self._behaviour.index is Index.ZERO else choice.number

    def _usage(self, choices: "list[ScriptedChoice]") -> Json:
        prompt = sum(len(str(prompt)) for prompt in self.prompts)
        output = sum(len(choice.words) for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": len(self.prompts)},
        }

    def _event(self, chunk: Json) -> bytes:
        end = self._behaviour.line_end
        comment = b": still running" + 2 * end if self._behaviour.comments else b""
        return comment + b"data: " + json.dumps(chunk).encode() + 2 * end


def _choice(number: int, prompt: object, seed: int, max_words: int, behaviour: Behaviour) -> ScriptedChoice:
    words = [f"{prompt}", f" {seed}", *(f" w{i}" for i in range(abs(seed) % 4))]
    finish = "length" if len(words) > max_words else behaviour.ends_with
    return ScriptedChoice(number, words[:max_words], finish, behaviour.breaks.get(seed))
