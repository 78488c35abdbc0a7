"""Groups with a policy, groups that are queried, ended and extended while they run, and messages.

message_requests         a message has the same answer as the chat with the same seed
steered_requests         a policy that is `deterministic` decides in the same way under any load
load_dependent_requests  the decisions of other policies depend on the load: their choices are prefixes of the choices
                         without the policy, and the report describes the answer
GroupCourse              one group from its request to its end, with more choices of the same prompt
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.mixed_requests import CHAT, COMPLETIONS, RepeatedRequest
from bench.chaos.received_answers import ReceivedAnswer, receive_answer
from motet.errors import EngineError
from motet.policies.extract import Extract, ExtractKind

MESSAGES = "/v1/messages"
SUMS = ("What is 2 + 3?", "What is 7 + 6?", "What is 12 - 5?")
NUMBER = " Answer with the number only."
LARGE = 12
"""Number of choices of the complete group with which a course is compared."""
KEEP_S = 8.0
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
VALUE = Extract(ExtractKind.LAST_NUMBER)
POLICIES: Mapping[str, Mapping[str, object]] = {
    "finished": {"stop_when": {"finished": 3}},
    "agree": {"stop_when": {"agree": 3}, "extract": "last_number", "vote": True},
    "posterior": {"stop_when": {"posterior": 0.95}, "extract": "last_number", "start": 4, "vote": True},
    "window": {"stop_when": {"window": 3}, "extract": "last_number", "start": 3, "refill": "all", "vote": True},
    "any of": {"stop_when": {"any_of": [{"agree": 4}, {"finished": 9}]}, "extract": "last_number", "start": 2},
    "regex": {"stop_when": {"agree": 3}, "extract": {"regex": "(?s).*?(\\d+)"}, "start": 5},
    "start": {"start": 3},
    "confidence": {"confidence": {"window": 4, "warm_up": 2, "percentile": 50, "top": 3}, "start": 2},
    "below": {"confidence": {"window": 4, "below": 1.5, "top": 3}, "stop_when": {"finished": 5}},
}


def sums(dice: random.Random, n: int, *, tokens: int = 24) -> dict[str, object]:
    """Returns a chat whose answers are short and often the same."""
    messages = [{"role": "user", "content": dice.choice(SUMS) + NUMBER}]
    return {"messages": messages, "n": n, "max_tokens": tokens, "temperature": 0.8, "seed": dice.randrange(2**31)}


def steered_requests(seed: int) -> list[RepeatedRequest]:
    """Returns requests with policies whose answers are always the same, on both routes, streamed and not streamed."""
    dice = random.Random(f"steered {seed}")
    requests = []
    for place, (name, policy) in enumerate(POLICIES.items()):
        body = sums(dice, 12) | {"group": {**policy, "deterministic": True}} | (USAGE if place % 2 else {})
        requests.append(RepeatedRequest(f"{name}, deterministic", CHAT, body))
    prompts = [f"{left} {right} = " for left, right in (("3 +", 4), ("8 -", 2))]
    several = {"prompt": prompts, "n": 8, "max_tokens": 8, "seed": dice.randrange(2**31)}
    policy = {"stop_when": {"agree": 2}, "extract": "last_number", "start": 3, "vote": True, "deterministic": True}
    requests.append(RepeatedRequest("two prompts, deterministic", COMPLETIONS, several | {"group": policy}))
    requests.append(RepeatedRequest("two prompts, streamed", COMPLETIONS, several | USAGE | {"group": policy}))
    return requests


def message_requests(seed: int) -> list[tuple[RepeatedRequest, RepeatedRequest]]:
    """Returns requests for a message, each with the chat that has the same answer."""
    dice = random.Random(f"messages {seed}")
    pairs = []
    for place in range(8):
        sampling = {"seed": dice.randrange(2**31), "temperature": dice.choice((0.0, 0.7, 1.0))}
        length, stream = dice.choice((16, 40, 80)), bool(place % 2)
        turns = [
            {"role": "user", "content": f"Tell me about {dice.choice(('bread', 'the sea'))}. " * (1 + 20 * stream)}
        ]
        system = "Be short."
        system_turn = [{"role": "system", "content": system}]
        stop = ["."] if place % 4 == 2 else []
        message = {"messages": turns, "system": system, "max_tokens": length, "stop_sequences": stop, "stream": stream}
        chat = {"messages": system_turn + turns, "max_tokens": length, "stop": stop}
        pairs.append(
            (
                RepeatedRequest(f"message {place}", MESSAGES, sampling | message),
                RepeatedRequest(f"chat {place}", CHAT, sampling | chat),
            )
        )
    return pairs


@dataclass(frozen=True)
class SteeredRequest:
    """A request with a policy, and the same request without it."""

    request: RepeatedRequest

    @property
    def without_policy(self) -> RepeatedRequest:
        body = {name: value for name, value in self.request.body.items() if name not in ("group", "keep_s")}
        return RepeatedRequest(f"{self.request.name}, without policy", self.request.path, body)

    def faults(self, answer: ReceivedAnswer, complete: ReceivedAnswer) -> list[str]:
        """Returns the errors of an answer. `complete` is the answer to the request without its policy."""
        wrong = mismatches(answer, complete)
        if len(answer.groups) != 1:
            return [*wrong, f"{len(answer.groups)} reports"]
        (report,) = answer.groups
        finished = [index for index, reasons in answer.finishes.items() if reasons != ["abort"]]
        counts = [report[name] for name in ("n", "begun", "finished", "aborted")]
        started = len(answer.texts)
        if counts != [self.request.n, started, len(finished), started - len(finished)]:
            wrong.append(f"the report has the counts {counts} for {answer.finishes}")
        if report.get("stopped_by") is None and started < self.request.n:
            wrong.append(f"{started} choices have started, and nothing has stopped the group")
        if (vote := report.get("vote")) is not None:
            assert isinstance(vote, dict)
            values = {str(index): VALUE.value(answer.texts[index]) for index in sorted(finished)}
            if vote["values"] != values:
                wrong.append(f"the vote has the values {vote['values']}, not {values}")
        return wrong


def mismatches(answer: ReceivedAnswer, complete: ReceivedAnswer) -> list[str]:
    """Returns which choices differ from the choices of a complete answer, or from their prefixes if they were ended."""
    wrong = []
    for index, text in answer.texts.items():
        reasons, full_text = answer.finishes.get(index), complete.texts.get(index)
        ended = reasons == ["abort"]
        if full_text is None or (ended and not full_text.startswith(text.rstrip("\ufffd"))):
            wrong.append(f"choice {index} is {text!r}, not a prefix of {full_text!r}")
        elif not ended and (text, reasons) != (full_text, complete.finishes.get(index)):
            wrong.append(f"choice {index} is {text!r} {reasons}, not {full_text!r} {complete.finishes.get(index)}")
    return wrong


def load_dependent_requests(seed: int) -> list[SteeredRequest]:
    """Returns requests with policies whose decisions depend on the load."""
    dice = random.Random(f"some steered {seed}")
    return [
        SteeredRequest(RepeatedRequest(name, CHAT, sums(dice, 12) | {"group": policy} | (USAGE if place % 2 else {})))
        for place, (name, policy) in enumerate(POLICIES.items())
    ]


def large_groups(seed: int) -> list[RepeatedRequest]:
    """Returns the complete groups with which courses are compared."""
    dice = random.Random(f"large {seed}")
    return [
        RepeatedRequest(f"course {place}", CHAT, sums(dice, LARGE, tokens=tokens))
        for place, tokens in enumerate((16, 40, 90))
    ]


@dataclass
class GroupCourse:
    """A group from its request to its end. `complete` is the answer of the same request with `LARGE` choices."""

    http: httpx.AsyncClient
    large: RepeatedRequest
    complete: ReceivedAnswer
    dice: random.Random
    faults: list[str] = field(default_factory=list)
    id: str = ""
    forgotten: bool = False
    """True if the group was deleted."""
    _next: int = 0
    _meddling: "asyncio.Task[None] | None" = None

    async def run(self) -> None:
        dice = self.dice
        self._next = n = dice.choice((1, 2, 4))
        fields: dict[str, object] = {"n": n, "keep_s": KEEP_S} | (USAGE if dice.random() < 0.7 else {})
        if n > 1 and dice.random() < 0.4:
            fields["group"] = {"start": dice.randrange(1, n), "deterministic": dice.random() < 0.5}
        request = RepeatedRequest("course", CHAT, self.large.body | fields)
        first = await self._send(request, meddle=request.stream and dice.random() < 0.5)
        if first is None or self.forgotten:
            return
        for _ in range(dice.randrange(3)):
            await self._extend(dice.choice((1, 2, 3)), stream=dice.random() < 0.5)
        if not self.forgotten:
            await self._query()
        if not self.forgotten and dice.random() < 0.3:
            await self._delete()

    async def _send(self, request: RepeatedRequest, *, meddle: bool) -> ReceivedAnswer | None:
        """Sends the request. With `meddle`, changes the group while its answer is streamed."""

        def on_line(answer: ReceivedAnswer) -> None:
            if self._meddling is None and meddle and answer.id:
                self.id = answer.id
                self._meddling = asyncio.create_task(self._meddle(request.n))

        answer = await receive_answer(self.http, request, on_line=on_line)
        if self._meddling is not None:
            await self._meddling
        if answer.error is not None:
            raise EngineError(f"{request.name}: {answer.error}")
        self.id = self.id or answer.id
        self._check(answer)
        return answer

    async def _meddle(self, n: int) -> None:
        dice = self.dice
        await asyncio.sleep(dice.uniform(0.0, 0.3))
        for _ in range(dice.randrange(1, 4)):
            await self._query()
            await self._end_choice(dice.randrange(n))
        if dice.random() < 0.3:
            await self._extend(1, stream=dice.random() < 0.5)
        if dice.random() < 0.2:
            await asyncio.gather(self._delete(), *(self._end_choice(index) for index in range(n)))

    async def _extend(self, n: int, *, stream: bool) -> None:
        if self._next + n > LARGE or self.forgotten:
            return
        first, self._next = self._next, self._next + n
        request = RepeatedRequest("more", f"/v1/groups/{self.id}/more", {"n": n} | (USAGE if stream else {}))
        answer = await receive_answer(self.http, request)
        if answer.error is not None:
            raise EngineError(f"more choices: {answer.error}")
        if sorted(answer.texts) != list(range(first, first + n)):
            self.faults.append(f"more: requested {n} choices from {first} on, got {sorted(answer.texts)}")
        self._check(answer)

    async def _query(self) -> None:
        response = await self.http.get(f"/v1/groups/{self.id}")
        if response.status_code != 200:
            return self._check_gone(response)
        group: dict[str, Any] = response.json()
        indices = [choice["index"] for choice in group["choices"]]
        if indices != sorted(set(indices)) or (group["state"] == "over" and group["kept_s"] is None):
            self.faults.append(f"the state of the group is {group}")

    async def _end_choice(self, index: int) -> None:
        response = await self.http.delete(f"/v1/groups/{self.id}/choices/{index}")
        if response.status_code != 200:
            self._check_gone(response)

    async def _delete(self) -> None:
        self.forgotten = True
        response = await self.http.delete(f"/v1/groups/{self.id}")
        if response.status_code != 200:
            self._check_gone(response)

    def _check_gone(self, response: httpx.Response) -> None:
        if response.status_code != 404 or not self.forgotten:
            self.faults.append(f"{response.request.method} {response.url.path}: {response.status_code} {response.text}")

    def _check(self, answer: ReceivedAnswer) -> None:
        self.faults += mismatches(answer, self.complete)
        if answer.duplicates():
            self.faults.append(f"duplicated: {answer.finishes} {answer.roles} {answer.done}")


async def known_groups(http: httpx.AsyncClient, ids: Sequence[str]) -> list[str]:
    """Returns the ids of the groups that the server still knows."""
    answers = [(id, await http.get(f"/v1/groups/{id}")) for id in ids]
    return [id for id, answer in answers if answer.status_code != 404]
