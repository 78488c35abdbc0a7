"""Answers of runs with faults: they are read choice by choice for every route, and compared with answers without
faults."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from bench.chaos.mixed_requests import RepeatedRequest
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
"""Anthropic's stop reasons and the finish reasons of a chat."""
COUNTS = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "total_tokens")


@dataclass
class ReceivedAnswer:
    """An answer as a client received it, by choice."""

    id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    roles: Counter[int] = field(default_factory=Counter)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    usage: dict[str, object] | None = None
    groups: list[dict[str, object]] = field(default_factory=list)
    """Reports on groups with a policy."""
    done: int = 0
    error: str | None = None
    """Message of an error event, or of a refused request."""
    chunk_s: list[float] = field(default_factory=list)
    """Time at which each chunk arrived."""

    def same_as(self, other: "ReceivedAnswer") -> bool:
        """Compares choices, usage and reports of policies. Cached prompt tokens are left out, because they depend on
        earlier requests."""
        return (self.texts, self.finishes, self.logprobs, self.counts(), self.steered()) == (
            other.texts,
            other.finishes,
            other.logprobs,
            other.counts(),
            other.steered(),
        )

    def duplicates(self) -> int:
        """Returns the number of superfluous ends and starts of choices, and of superfluous ends of the stream."""
        again = sum(len(reasons) - 1 for reasons in self.finishes.values() if len(reasons) > 1)
        return again + sum(count - 1 for count in self.roles.values() if count > 1) + max(0, self.done - 1)

    def lost(self, n: int) -> int:
        """Returns the number of choices that never ended."""
        return n - len(self.finishes)

    def steered(self) -> list[dict[str, object]]:
        """Returns the reports without the ids of groups, which differ from answer to answer."""
        return [{name: value for name, value in report.items() if name != "id"} for report in self.groups]

    def counts(self) -> tuple[object, ...]:
        usage = self.usage or {}
        return tuple(usage.get(name) for name in COUNTS)


@dataclass
class ComparedAnswers:
    """Counts of answers that were compared with the answers without faults."""

    finished: int = 0
    choices: int = 0
    identical: int = 0
    """Number of requests with the same answer as without faults."""
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    duplicates: int = 0
    lost: int = 0

    def add(self, request: RepeatedRequest, answer: ReceivedAnswer, expected: ReceivedAnswer) -> None:
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


async def receive_answer(
    client: httpx.AsyncClient, request: RepeatedRequest, *, on_line: Callable[[ReceivedAnswer], None] | None = None
) -> ReceivedAnswer:
    """Sends a request and returns its answer. A failure of the server is part of the answer, and is not raised.

    `on_line` is called after each line of a stream, with the answer so far.
    """
    answer = ReceivedAnswer()

    def feed(line: str) -> None:
        feed_line(answer, line)
        if on_line is not None:
            on_line(answer)

    try:
        if request.stream:
            await follow(client, request.path, request.body, feed)
        else:
            response = await client.post(request.path, json=request.body)
            if response.status_code != httpx.codes.OK:
                raise EngineError(f"{response.status_code}: {response.text}")
            _feed_body(answer, msgspec.json.decode(response.content))
    except (EngineError, OSError, httpx.HTTPError) as error:
        answer.error = str(error) or type(error).__name__
    return answer


def feed_line(answer: ReceivedAnswer, line: str) -> None:
    """Adds a line of a stream to an answer: a chunk of choices, or an event of a Response or a message."""
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
            _feed_body(answer, chunk["response"])
        _feed_message_event(answer, chunk)
        return
    answer.id = chunk.get("id", "")
    answer.usage = chunk.get("usage") or answer.usage
    answer.groups += chunk.get("groups", [])
    for choice in chunk["choices"]:
        answer.roles[choice["index"]] += "role" in choice.get("delta", {})
        _feed_choice(answer, choice, _text_of(choice, choice.get("delta", {})))


def _feed_message_event(answer: ReceivedAnswer, event: dict[str, Any]) -> None:
    """Adds an event of a message of Anthropic's API. Text and the arguments of calls come in pieces."""
    kind = event["type"]
    if kind == "message_start":
        answer.id = event["message"]["id"]
        answer.roles[0] += 1
    elif kind in ("content_block_start", "content_block_delta"):
        piece = event.get("content_block") or event["delta"]
        parts = (piece.get(name) for name in ("name", "text", "partial_json"))
        answer.texts[0] = answer.texts.get(0, "") + "".join(part for part in parts if part)
    elif kind == "message_delta":
        answer.texts.setdefault(0, "")
        answer.finishes.setdefault(0, []).append(STOP_REASONS[event["delta"]["stop_reason"]])
        answer.usage = _usage_of_message(event["usage"])
    answer.done += kind == "message_stop"


def _usage_of_message(usage: dict[str, int]) -> dict[str, object]:
    """Returns the usage in the form of a chat."""
    prompt, generated = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _feed_body(answer: ReceivedAnswer, body: dict[str, Any]) -> None:
    answer.id = str(body.get("id", ""))
    answer.groups += body.get("groups", [])
    usage, items = body["usage"], body.get("output")
    if body.get("type") == "message":
        choice = {"index": 0, "finish_reason": STOP_REASONS[body["stop_reason"]]}
        _feed_choice(answer, choice, "".join(block["text"] for block in body["content"]))
        answer.usage = _usage_of_message(usage)
        return
    answer.usage = usage
    if isinstance(items, list):  # a Response is one choice
        choice = {"index": 0, "finish_reason": body["status"]}
        _feed_choice(answer, choice, "".join(_text_of_item(item) for item in items))
        return
    choices = body["choices"]
    assert isinstance(choices, list)
    for choice in choices:
        _feed_choice(answer, choice, _text_of(choice, choice.get("message", {})))


def _text_of(choice: dict[str, object], message: dict[str, object]) -> str:
    """Returns the output of a choice: text, calls with name and arguments, or token ids."""
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
    """Returns the output of an item of a Response: text, or the name and the arguments of a call."""
    content = item.get("content")
    parts = [part["text"] for part in content] if isinstance(content, list) else []
    return "".join(parts) + str(item.get("name", "")) + str(item.get("arguments", ""))


def _feed_choice(answer: ReceivedAnswer, choice: dict[str, object], text: str) -> None:
    index, finish, logprobs = choice["index"], choice["finish_reason"], choice.get("logprobs")
    assert isinstance(index, int)
    answer.texts[index] = answer.texts.get(index, "") + text
    if finish is not None:
        answer.finishes.setdefault(index, []).append(str(finish))
    if isinstance(logprobs, dict):
        entries: Sequence[dict[str, float]] = logprobs.get("content") or ()
        answer.logprobs.setdefault(index, []).extend(entry["logprob"] for entry in entries)
