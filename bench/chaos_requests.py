"""The mixed requests of the chaos run, and their answers, which are compared with the undisturbed ones."""

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from bench.stream import follow
from motet.errors import EngineError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DATA, DONE = "data: ", "data: [DONE]"
SUBJECTS = ("the sea", "a clock", "two brothers", "the last train", "bread", "a map of the city", "winter", "a choir")
SIZES = (1, 1, 2, 4, 8, 8, 16, 32)
LENGTHS = (24, 48, 96, 160)


@dataclass(frozen=True)
class Request:
    """One kind of request. It is sent many times, and its answer must always be the same."""

    name: str
    path: str
    body: dict[str, object]

    @property
    def n(self) -> int:
        prompts = self.body.get("prompt")
        number = len(prompts) if isinstance(prompts, list) else 1
        n = self.body["n"]
        assert isinstance(n, int)
        return n * number


@dataclass
class Answer:
    """What a client received, by choice."""

    id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    roles: Counter[int] = field(default_factory=Counter)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, object] | None = None
    done: int = 0
    error: str | None = None
    """The message of an error event, or of a request that was refused."""
    chunk_s: list[float] = field(default_factory=list)
    """The time at which each chunk arrived."""

    def same_as(self, other: "Answer") -> bool:
        """Compares choices and usage, except cached prompt tokens, which depend on earlier requests."""
        return (self.texts, self.finishes, self.logprobs, self.counts()) == (
            other.texts,
            other.finishes,
            other.logprobs,
            other.counts(),
        )

    def duplicates(self) -> int:
        """Returns how many ends and beginnings of choices, and ends of the stream, were too many."""
        again = sum(len(reasons) - 1 for reasons in self.finishes.values() if len(reasons) > 1)
        return again + sum(count - 1 for count in self.roles.values() if count > 1) + max(0, self.done - 1)

    def lost(self, n: int) -> int:
        """Returns the number of choices that never ended."""
        return n - len(self.finishes)

    def counts(self) -> tuple[object, ...]:
        usage = self.usage or {}
        return tuple(usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens"))


def mixed_requests(number: int, *, seed: int) -> list[Request]:
    """Returns chats and completions, streamed or not, n from 1 to 32, some with penalties, logprobs, stop strings."""
    dice = random.Random(seed)
    return [_request(place, dice) for place in range(number)]


def _request(place: int, dice: random.Random) -> Request:
    subject = dice.choice(SUBJECTS)
    text = f"Tell me about {subject}. " * dice.choice((1, 8, 40))
    body: dict[str, object] = {
        "n": dice.choice(SIZES),
        "seed": dice.randrange(2**31),
        "max_tokens": dice.choice(LENGTHS),
        "temperature": dice.choice((0.0, 0.7, 1.0, 1.0)),
        "stream": dice.random() < 0.75,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if dice.random() < 0.3:
        body |= {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    if dice.random() < 0.3:
        body["stop"] = [dice.choice((" and", ".\n", " the "))]
    if dice.random() < 0.3:
        body["top_p"] = 0.9
    chat = dice.random() < 0.6
    if chat:
        if dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2}
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = [text, f"{subject} is"] if dice.random() < 0.3 else text
    return Request(f"{place}: {'chat' if chat else 'completions'} n={body['n']}", CHAT if chat else COMPLETIONS, body)


async def ask(client: httpx.AsyncClient, request: Request) -> Answer:
    """Sends a request. A failure of the server is part of the answer, and is not raised."""
    answer = Answer()
    try:
        if request.body["stream"]:
            await follow(client, request.path, request.body, lambda line: take_line(answer, line))
        else:
            response = await client.post(request.path, json=request.body)
            if response.status_code != httpx.codes.OK:
                raise EngineError(f"{response.status_code}: {response.text}")
            _take_whole(answer, msgspec.json.decode(response.content))
    except (EngineError, OSError, httpx.HTTPError) as error:
        answer.error = str(error) or type(error).__name__
    return answer


def take_line(answer: Answer, line: str) -> None:
    if line == DONE:
        answer.done += 1
        return
    chunk = json.loads(line.removeprefix(DATA))
    if "error" in chunk:
        answer.error = chunk["error"]["message"]
        return
    answer.chunk_s.append(time.monotonic())
    answer.id = chunk["id"]
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        delta = choice.get("delta", {})
        answer.roles[choice["index"]] += "role" in delta
        _take_choice(answer, choice, delta.get("content", choice.get("text")) or "")


def _take_whole(answer: Answer, body: dict[str, object]) -> None:
    usage, choices = body["usage"], body["choices"]
    assert isinstance(usage, dict)
    assert isinstance(choices, list)
    answer.usage = usage
    for choice in choices:
        message = choice.get("message", {})
        _take_choice(answer, choice, message.get("content", choice.get("text")) or "")


def _take_choice(answer: Answer, choice: dict[str, object], text: str) -> None:
    index, finish, logprobs = choice["index"], choice["finish_reason"], choice.get("logprobs")
    assert isinstance(index, int)
    answer.texts[index] = answer.texts.get(index, "") + text
    if finish is not None:
        answer.finishes.setdefault(index, []).append(str(finish))
    if isinstance(logprobs, dict):
        entries: Sequence[dict[str, float]] = logprobs.get("content") or ()
        answer.logprobs.setdefault(index, []).extend(entry["logprob"] for entry in entries)
