"""What a played OpenAI-compatible server answers, and the ways in which it can deviate.

Its answers follow from the prompt and the seed alone, so that tests can compare n choices of one request with n
requests: choice i with seed s is `<prompt> <s + i> ...`, one word a piece.
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
    OWN = auto()
    ZERO = auto()
    """All choices have number 0."""
    ABSENT = auto()


class Usage(Enum):
    END = auto()
    """A stream has it in a chunk without choices, if the client asks for it."""
    EACH = auto()
    """The last chunk of each choice has it, asked for or not."""
    NONE = auto()


class Break(Enum):
    """How a stream goes on after its first piece."""

    EVENT = auto()
    """An error event comes, and the stream ends."""
    CUT = auto()
    """The connection breaks."""
    SILENCE = auto()
    """The stream ends as if all were well."""


@dataclass(frozen=True)
class Refused:
    """An answer that a request gets instead of the usual one."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def openai(cls, status: int, message: str, *, param: str | None = None, code: str | None = None) -> "Refused":
        error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        return cls(status, json.dumps({"error": error}).encode(), (("content-type", "application/json"),))


@dataclass
class Manners:
    """The ways in which a server deviates. By default it does not."""

    ignores_n: bool = False
    index: Index = Index.OWN
    """How choices are numbered in streams."""
    finishes_at_end: bool = False
    """All choices finish together, after the last piece of any."""
    never_finishes: bool = False
    ends_with: str = "stop"
    """The `finish_reason` of a choice that has written all its words."""
    finish_twice: bool = False
    usage: Usage = Usage.END
    no_done: bool = False
    line_end: bytes = b"\n"
    comments: bool = False
    role_everywhere: bool = False
    no_role: bool = False
    refuses: frozenset[str] = frozenset()
    """Fields that get a 400; `n` only above 1."""
    breaks: dict[int, Break] = field(default_factory=dict)
    """How choices break off, by seed."""
    hangs: frozenset[int] = frozenset()
    """Seeds of choices that write their first piece and then no more."""
    no_routes: frozenset[str] = frozenset()
    not_ok: list[Refused] = field(default_factory=list)
    """Errors for the next requests, one for each."""
    key: str | None = None
    """The only API key that the server accepts."""
    listing: Refused | None = None
    """What the server sends instead of the list of its models."""
    models: tuple[Json, ...] = ({"id": "m", "max_model_len": 4096},)


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: Json


@dataclass(frozen=True)
class Choice:
    number: int
    words: list[str]
    finish: str
    breaks: Break | None


class Script:
    """The answer of the server to one request."""

    def __init__(self, asked: Asked, manners: Manners) -> None:
        self._chat = asked.path == CHAT
        self._manners = manners
        body = asked.body
        self._wants_usage = (body.get("stream_options") or {}).get("include_usage", False)
        prompts = [body["messages"][-1]["content"]] if self._chat else body["prompt"]
        prompts = prompts if isinstance(prompts, list) and not isinstance(prompts[0], int) else [prompts]
        n = 1 if manners.ignores_n else body.get("n") or 1
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.prompts = prompts
        self.hangs = (body.get("seed") or 0) in manners.hangs
        self.choices = [
            _choice(at * n + i, prompt, (body.get("seed") or 0) + i, most, manners)
            for at, prompt in enumerate(prompts)
            for i in range(n)
        ]

    def whole(self) -> Json:
        choices = [self._whole_choice(choice) for choice in self.choices]
        if self._manners.index is Index.ABSENT:
            for choice in choices:
                del choice["index"]
        told = {} if self._manners.usage is Usage.NONE else {"usage": self._usage(self.choices)}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head(kind), "choices": choices, **told}

    def events(self) -> Iterator[bytes | None]:
        """Yields the events of a stream. None means that the connection breaks."""
        manners = self._manners
        late: list[bytes | None] = []
        for step in range(max(len(choice.words) for choice in self.choices) + 1):
            for choice in self.choices:
                if step < len(choice.words):
                    yield self._event(self._chunk(choice, choice.words[step], first=step == 0))
                    if choice.breaks is not None:
                        yield from self._broken(choice.breaks)
                        return
                elif step == len(choice.words) and not manners.never_finishes:
                    late.append(self._event(self._chunk(choice, "", finish=choice.finish)))
            if not manners.finishes_at_end:
                yield from late
                late = [] if not manners.finish_twice else late
        yield from late
        if manners.usage is Usage.END and self._wants_usage:
            yield self._event({**self._head(self._kind), "choices": [], "usage": self._usage(self.choices)})
        if not manners.no_done:
            yield b"data: [DONE]" + 2 * manners.line_end

    def _broken(self, how: Break) -> Iterator[bytes | None]:
        if how is Break.EVENT:
            yield self._event({"error": {"message": "the model fell over", "type": "server_error", "code": 500}})
        elif how is Break.CUT:
            yield None

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _head(self, kind: str) -> Json:
        return {"id": "theirs", "object": kind, "created": 1, "model": "m-1", "system_fingerprint": "fp"}

    def _chunk(self, choice: "Choice", text: str, *, first: bool = False, finish: str | None = None) -> Json:
        manners = self._manners
        said: Json = {"text": text, "logprobs": None}
        if self._chat:
            delta: Json = {"content": text} if text else {}
            if not manners.no_role and (first or manners.role_everywhere):
                delta = {"role": "assistant", **delta}
            said = {"delta": delta, "logprobs": {"content": [{"token": text, "logprob": -0.5}]} if text else None}
        told = {"usage": self._usage([choice])} if finish and manners.usage is Usage.EACH else {}
        index = {} if manners.index is Index.ABSENT else {"index": self._number(choice)}
        return {**self._head(self._kind), "choices": [{**index, **said, "finish_reason": finish}], **told}

    def _whole_choice(self, choice: "Choice") -> Json:
        text = "".join(choice.words)
        if self._chat:
            said: Json = {"message": {"role": "assistant", "content": text, "refusal": None}, "logprobs": None}
        else:
            said = {"text": text, "logprobs": None}
        return {
            "index": choice.number,
            **said,
            "finish_reason": None if self._manners.never_finishes else choice.finish,
        }

    def _number(self, choice: "Choice") -> int:
        return 0 if self._manners.index is Index.ZERO else choice.number

    def _usage(self, choices: "list[Choice]") -> Json:
        prompt = sum(len(str(prompt)) for prompt in self.prompts)
        written = sum(len(choice.words) for choice in choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": len(self.prompts)},
        }

    def _event(self, chunk: Json) -> bytes:
        end = self._manners.line_end
        comment = b": still here" + 2 * end if self._manners.comments else b""
        return comment + b"data: " + json.dumps(chunk).encode() + 2 * end


def _choice(number: int, prompt: object, seed: int, most: int, manners: Manners) -> Choice:
    words = [f"{prompt}", f" {seed}", *(f" w{i}" for i in range(abs(seed) % 4))]
    finish = "length" if len(words) > most else manners.ends_with
    return Choice(number, words[:most], finish, manners.breaks.get(seed))
