"""What clients of such runs receive, read choice by choice whatever the route, and how it is compared."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from bench.chaos.mixed_requests import Request
from bench.client.stream import follow
from motet.errors import EngineError

DATA, DONE = "data: ", "data: [DONE]"
ENDS_OF_RESPONSE = ("response.completed", "response.incomplete")
STOP_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "pause_turn": "abort",
}
"""Anthropic's words for how a message ends -> those of a chat."""
COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")


@dataclass
class Answer:
    """What a client received, by choice."""

    id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    roles: Counter[int] = field(default_factory=Counter)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, object] | None = None
    groups: list[dict[str, object]] = field(default_factory=list)
    """The reports on groups with a policy."""
    done: int = 0
    error: str | None = None
    """The message of an error event, or of a request that was refused."""
    chunk_s: list[float] = field(default_factory=list)
    """The time at which each chunk arrived."""

    def same_as(self, other: "Answer") -> bool:
        """Compares choices, usage and what policies have done, except cached prompt tokens, which depend on earlier
        requests."""
        return (self.texts, self.finishes, self.logprobs, self.counts(), self.steered()) == (
            other.texts,
            other.finishes,
            other.logprobs,
            other.counts(),
            other.steered(),
        )

    def duplicates(self) -> int:
        """Returns how many ends and beginnings of choices, and ends of the stream, were too many."""
        again = sum(len(reasons) - 1 for reasons in self.finishes.values() if len(reasons) > 1)
        return again + sum(count - 1 for count in self.roles.values() if count > 1) + max(0, self.done - 1)

    def lost(self, n: int) -> int:
        """Returns the number of choices that never ended."""
        return n - len(self.finishes)

    def steered(self) -> list[dict[str, object]]:
        """Returns the reports without the ids of the groups, which differ from answer to answer."""
        return [{name: value for name, value in report.items() if name != "id"} for report in self.groups]

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
        self.lost += answer.lost(request.n) if not expected.groups else 0
        if answer.same_as(expected):
            self.identical += 1
        else:
            self.different.append(request.name)


async def ask(client: httpx.AsyncClient, request: Request, *, seen: Callable[[Answer], None] | None = None) -> Answer:
    """Sends a request. A failure of the server is part of the answer, and is not raised. `seen`: called after each line
    of a stream with what has come until then."""
    answer = Answer()

    def take(line: str) -> None:
        take_line(answer, line)
        if seen is not None:
            seen(answer)

    try:
        if request.stream:
            await follow(client, request.path, request.body, take)
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
        _take_message_event(answer, chunk)
        return
    answer.id = chunk.get("id", "")
    answer.usage = chunk.get("usage") or answer.usage
    answer.groups += chunk.get("groups", [])
    for choice in chunk["choices"]:
        answer.roles[choice["index"]] += "role" in choice.get("delta", {})
        _take_choice(answer, choice, _text_of(choice, choice.get("delta", {})))


def _take_message_event(answer: Answer, event: dict[str, Any]) -> None:
    """Takes an event of a message of Anthropic's: its text and the arguments of its calls come in pieces."""
    kind = event["type"]
    if kind == "message_start":
        answer.id = event["message"]["id"]
        answer.roles[0] += 1
    elif kind in ("content_block_start", "content_block_delta"):
        piece = event.get("content_block") or event["delta"]
        told = (piece.get(name) for name in ("name", "text", "partial_json"))
        answer.texts[0] = answer.texts.get(0, "") + "".join(part for part in told if part)
    elif kind == "message_delta":
        answer.texts.setdefault(0, "")
        answer.finishes.setdefault(0, []).append(STOP_REASONS[event["delta"]["stop_reason"]])
        answer.usage = _usage_of_message(event["usage"])
    answer.done += kind == "message_stop"


def _usage_of_message(usage: dict[str, int]) -> dict[str, object]:
    """Returns the usage as a chat tells it."""
    prompt, written = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _take_whole(answer: Answer, body: dict[str, Any]) -> None:
    answer.id = str(body.get("id", ""))
    answer.groups += body.get("groups", [])
    usage, items = body["usage"], body.get("output")
    if body.get("type") == "message":
        choice = {"index": 0, "finish_reason": STOP_REASONS[body["stop_reason"]]}
        _take_choice(answer, choice, "".join(block["text"] for block in body["content"]))
        answer.usage = _usage_of_message(usage)
        return
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
