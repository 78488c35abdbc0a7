"""Mixed requests for runs in which workers are struck. Their answers are compared with the undisturbed ones."""

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
ENDS_OF_RESPONSE = ("response.completed", "response.incomplete")
SUBJECTS = ("the sea", "a clock", "two brothers", "the last train", "bread", "a map of the city", "winter", "a choir")
SIZES = (1, 1, 2, 4, 8, 8, 16, 32)
LENGTHS = (24, 48, 96, 160)
COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")


@dataclass(frozen=True)
class Request:
    """One kind of request. It is sent many times, and its answer must always be the same."""

    name: str
    path: str
    body: dict[str, object]

    @property
    def n(self) -> int:
        """The number of choices of its answer, prompts x n."""
        prompts, sampling = self.body.get("prompt"), self.body.get("sampling_params", self.body)
        number = len(prompts) if isinstance(prompts, list) else 1
        assert isinstance(sampling, dict)
        n = sampling.get("n", 1)
        assert isinstance(n, int)
        return n * number

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


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
        return tuple(usage.get(name) for name in COUNTS)


@dataclass
class Outcome:
    """The results of the requests."""

    finished: int = 0
    choices: int = 0
    identical: int = 0
    """Number of requests with the undisturbed answer."""
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    duplicates: int = 0
    lost: int = 0

    def add(self, request: Request, answer: Answer, expected: Answer) -> None:
        if answer.error is not None:
            self.errors.append(f"{request.name}: {answer.error}")
            return
        self.finished += 1
        self.choices += request.n
        self.duplicates += answer.duplicates()
        self.lost += answer.lost(request.n)
        if answer.same_as(expected):
            self.identical += 1
        else:
            self.different.append(request.name)


def mixed_requests(
    number: int, *, seed: int, sizes: Sequence[int] = SIZES, lengths: Sequence[int] = LENGTHS
) -> list[Request]:
    """Returns chats and completions, streamed or not, some with penalties, logprobs, stop strings, each with one of the
    `sizes` as n and one of the `lengths` in tokens."""
    dice = random.Random(seed)
    return [_request(place, dice, sizes=sizes, lengths=lengths) for place in range(number)]


def _request(place: int, dice: random.Random, *, sizes: Sequence[int], lengths: Sequence[int]) -> Request:
    subject = dice.choice(SUBJECTS)
    text = f"Tell me about {subject}. " * dice.choice((1, 8, 40))
    body: dict[str, object] = {
        "n": dice.choice(sizes),
        "seed": dice.randrange(2**31),
        "max_tokens": dice.choice(lengths),
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
        if request.stream:
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
    """Takes a line of a stream: a chunk of choices, or an event of a Response."""
    if line == DONE:
        answer.done += 1
        return
    if not line.startswith(DATA):
        return
    chunk = json.loads(line.removeprefix(DATA))
    if chunk.get("error") or chunk.get("type") == "error":
        answer.error = (chunk.get("error") or chunk)["message"]
        return
    answer.chunk_s.append(time.monotonic())
    if "type" in chunk:
        if chunk["type"] in ENDS_OF_RESPONSE:
            answer.done += 1
            _take_whole(answer, chunk["response"])
        return
    answer.id = chunk.get("id", "")
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        answer.roles[choice["index"]] += "role" in choice.get("delta", {})
        _take_choice(answer, choice, _text_of(choice, choice.get("delta", {})))


def _take_whole(answer: Answer, body: dict[str, object]) -> None:
    usage, items = body["usage"], body.get("output")
    assert isinstance(usage, dict)
    answer.usage = usage
    if isinstance(items, list):  # a Response is one choice
        choice = {"index": 0, "finish_reason": body["status"]}
        _take_choice(answer, choice, "".join(_text_of_item(item) for item in items))
        return
    choices = body["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        _take_choice(answer, choice, _text_of(choice, choice.get("message", {})))


def _text_of(choice: dict[str, object], message: dict[str, object]) -> str:
    """Returns what a choice has written: text, calls with name and arguments, or token ids."""
    text, calls, token_ids = (
        message.get("content", choice.get("text")),
        message.get("tool_calls"),
        choice.get("token_ids"),
    )
    parts = [text] if isinstance(text, str) else []
    if isinstance(calls, list):
        functions = [call["function"] for call in calls]
        parts += [(function.get("name") or "") + (function.get("arguments") or "") for function in functions]
    if isinstance(token_ids, list):
        parts += [f"{token} " for token in token_ids]
    return "".join(parts)


def _text_of_item(item: dict[str, object]) -> str:
    """Returns what an item of a Response's output has: its text, or the name and the arguments of its call."""
    content = item.get("content")
    parts = [part["text"] for part in content] if isinstance(content, list) else []
    return "".join(parts) + str(item.get("name", "")) + str(item.get("arguments", ""))


def _take_choice(answer: Answer, choice: dict[str, object], text: str) -> None:
    index, finish, logprobs = choice["index"], choice["finish_reason"], choice.get("logprobs")
    assert isinstance(index, int)
    answer.texts[index] = answer.texts.get(index, "") + text
    if finish is not None:
        answer.finishes.setdefault(index, []).append(str(finish))
    if isinstance(logprobs, dict):
        entries: Sequence[dict[str, float]] = logprobs.get("content") or ()
        answer.logprobs.setdefault(index, []).extend(entry["logprob"] for entry in entries)
