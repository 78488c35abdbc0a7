"""Groups with a policy, groups that are looked at, ended and asked for more beside their request, and messages: what
clients send, and what the answers must be.

    messages, steered    the same answer every time: a message is the chat of the same seed, and a policy that is
                         `deterministic` decides the same under any load
    Steered              a policy whose decisions depend on the load: its choices are the beginning of those without it,
                         and its report tells what is in the answer
    Course               one group from its request to its end, with more choices of the same prompt
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.answers import Answer, ask
from bench.chaos.mixed_requests import CHAT, COMPLETIONS, Request
from motet.errors import EngineError
from motet.policies.extract import Extract, ExtractKind

MESSAGES = "/v1/messages"
SUMS = ("What is 2 + 3?", "What is 7 + 6?", "What is 12 - 5?")
NUMBER = " Answer with the number only."
LARGE = 12
"""Number of choices of the whole group that a course is compared with."""
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


def steered_requests(seed: int) -> list[Request]:
    """Returns requests with policies whose answers are always the same, on both routes, streamed and not."""
    dice = random.Random(f"steered {seed}")
    requests = []
    for place, (name, policy) in enumerate(POLICIES.items()):
        body = sums(dice, 12) | {"group": {**policy, "deterministic": True}} | (USAGE if place % 2 else {})
        requests.append(Request(f"{name}, deterministic", CHAT, body))
    prompts = [f"{one} {two} = " for one, two in (("3 +", 4), ("8 -", 2))]
    several = {"prompt": prompts, "n": 8, "max_tokens": 8, "seed": dice.randrange(2**31)}
    policy = {"stop_when": {"agree": 2}, "extract": "last_number", "start": 3, "vote": True, "deterministic": True}
    requests.append(Request("two prompts, deterministic", COMPLETIONS, several | {"group": policy}))
    requests.append(Request("two prompts, streamed", COMPLETIONS, several | USAGE | {"group": policy}))
    return requests


def message_requests(seed: int) -> list[tuple[Request, Request]]:
    """Returns requests for a message, each with the chat that has the same answer."""
    dice = random.Random(f"messages {seed}")
    pairs = []
    for place in range(8):
        asked = {"seed": dice.randrange(2**31), "temperature": dice.choice((0.0, 0.7, 1.0))}
        length, stream = dice.choice((16, 40, 80)), bool(place % 2)
        turns = [
            {"role": "user", "content": f"Tell me about {dice.choice(('bread', 'the sea'))}. " * (1 + 20 * stream)}
        ]
        system = "Be short."
        before = [{"role": "system", "content": system}]
        stop = ["."] if place % 4 == 2 else []
        message = {"messages": turns, "system": system, "max_tokens": length, "stop_sequences": stop, "stream": stream}
        chat = {"messages": before + turns, "max_tokens": length, "stop": stop}
        pairs.append(
            (Request(f"message {place}", MESSAGES, asked | message), Request(f"chat {place}", CHAT, asked | chat))
        )
    return pairs


@dataclass(frozen=True)
class Steered:
    """A request with a policy, and the same one without."""

    request: Request

    @property
    def without(self) -> Request:
        body = {name: value for name, value in self.request.body.items() if name not in ("group", "keep_s")}
        return Request(f"{self.request.name}, whole", self.request.path, body)

    def faults(self, answer: Answer, whole: Answer) -> list[str]:
        """Returns what is wrong with an answer; `whole` is that of the request without its policy."""
        wrong = not_first_of(answer, whole)
        if len(answer.groups) != 1:
            return [*wrong, f"{len(answer.groups)} reports"]
        (report,) = answer.groups
        finished = [index for index, reasons in answer.finishes.items() if reasons != ["abort"]]
        told = [report[name] for name in ("n", "begun", "finished", "aborted")]
        begun = len(answer.texts)
        if told != [self.request.n, begun, len(finished), begun - len(finished)]:
            wrong.append(f"the report tells {told} of {answer.finishes}")
        if report.get("stopped_by") is None and begun < self.request.n:
            wrong.append(f"{begun} choices have begun, and nothing has stopped the group")
        if (vote := report.get("vote")) is not None:
            assert isinstance(vote, dict)
            values = {str(index): VALUE.value(answer.texts[index]) for index in sorted(finished)}
            if vote["values"] != values:
                wrong.append(f"the vote tells {vote['values']} of {values}")
        return wrong


def not_first_of(answer: Answer, whole: Answer) -> list[str]:
    """Returns which choices are neither those of a whole answer, nor, if they were ended, their beginnings."""
    wrong = []
    for index, text in answer.texts.items():
        reasons, long = answer.finishes.get(index), whole.texts.get(index)
        ended = reasons == ["abort"]
        if long is None or (ended and not long.startswith(text.rstrip("\ufffd"))):
            wrong.append(f"choice {index} is {text!r}, not the beginning of {long!r}")
        elif not ended and (text, reasons) != (long, whole.finishes.get(index)):
            wrong.append(f"choice {index} is {text!r} {reasons}, not {long!r} {whole.finishes.get(index)}")
    return wrong


def some_steered(seed: int) -> list[Steered]:
    """Returns requests with policies whose decisions depend on the load."""
    dice = random.Random(f"some steered {seed}")
    return [
        Steered(Request(name, CHAT, sums(dice, 12) | {"group": policy} | (USAGE if place % 2 else {})))
        for place, (name, policy) in enumerate(POLICIES.items())
    ]


def large_groups(seed: int) -> list[Request]:
    """Returns the whole groups that courses are compared with."""
    dice = random.Random(f"large {seed}")
    return [
        Request(f"course {place}", CHAT, sums(dice, LARGE, tokens=tokens)) for place, tokens in enumerate((16, 40, 90))
    ]


@dataclass
class Course:
    """A group from its request to its end. `whole`: the answer of the same request with `LARGE` choices."""

    http: httpx.AsyncClient
    large: Request
    whole: Answer
    dice: random.Random
    faults: list[str] = field(default_factory=list)
    id: str = ""
    forgotten: bool = False
    """True if the group was deleted."""
    _next: int = 0
    _looking: "asyncio.Task[None] | None" = None

    async def run(self) -> None:
        dice = self.dice
        self._next = n = dice.choice((1, 2, 4))
        fields: dict[str, object] = {"n": n, "keep_s": KEEP_S} | (USAGE if dice.random() < 0.7 else {})
        if n > 1 and dice.random() < 0.4:
            fields["group"] = {"start": dice.randrange(1, n), "deterministic": dice.random() < 0.5}
        request = Request("course", CHAT, self.large.body | fields)
        first = await self._asked(request, beside=request.stream and dice.random() < 0.5)
        if first is None or self.forgotten:
            return
        for _ in range(dice.randrange(3)):
            await self._more(dice.choice((1, 2, 3)), stream=dice.random() < 0.5)
        if not self.forgotten:
            await self._look()
        if not self.forgotten and dice.random() < 0.3:
            await self._delete()

    async def _asked(self, request: Request, *, beside: bool) -> Answer | None:
        """`beside`: something is done to the group while its answer streams."""

        def seen(answer: Answer) -> None:
            if self._looking is None and beside and answer.id:
                self.id = answer.id
                self._looking = asyncio.create_task(self._meddle(request.n))

        answer = await ask(self.http, request, seen=seen)
        if self._looking is not None:
            await self._looking
        if answer.error is not None:
            raise EngineError(f"{request.name}: {answer.error}")
        self.id = self.id or answer.id
        self._check(answer)
        return answer

    async def _meddle(self, n: int) -> None:
        dice = self.dice
        await asyncio.sleep(dice.uniform(0.0, 0.3))
        for _ in range(dice.randrange(1, 4)):
            await self._look()
            await self._end_choice(dice.randrange(n))
        if dice.random() < 0.3:
            await self._more(1, stream=dice.random() < 0.5)
        if dice.random() < 0.2:
            await asyncio.gather(self._delete(), *(self._end_choice(index) for index in range(n)))

    async def _more(self, n: int, *, stream: bool) -> None:
        if self._next + n > LARGE or self.forgotten:
            return
        first, self._next = self._next, self._next + n
        request = Request("more", f"/v1/groups/{self.id}/more", {"n": n} | (USAGE if stream else {}))
        answer = await ask(self.http, request)
        if answer.error is not None:
            raise EngineError(f"more choices: {answer.error}")
        if sorted(answer.texts) != list(range(first, first + n)):
            self.faults.append(f"more: asked for {n} after {first}, and got {sorted(answer.texts)}")
        self._check(answer)

    async def _look(self) -> None:
        response = await self.http.get(f"/v1/groups/{self.id}")
        if response.status_code != 200:
            return self._gone(response)
        told: dict[str, Any] = response.json()
        indices = [one["index"] for one in told["choices"]]
        if indices != sorted(set(indices)) or (told["state"] == "over" and told["kept_s"] is None):
            self.faults.append(f"the group looks like {told}")

    async def _end_choice(self, index: int) -> None:
        response = await self.http.delete(f"/v1/groups/{self.id}/choices/{index}")
        if response.status_code != 200:
            self._gone(response)

    async def _delete(self) -> None:
        self.forgotten = True
        response = await self.http.delete(f"/v1/groups/{self.id}")
        if response.status_code != 200:
            self._gone(response)

    def _gone(self, response: httpx.Response) -> None:
        if response.status_code != 404 or not self.forgotten:
            self.faults.append(f"{response.request.method} {response.url.path}: {response.status_code} {response.text}")

    def _check(self, answer: Answer) -> None:
        self.faults += not_first_of(answer, self.whole)
        if answer.duplicates():
            self.faults.append(f"twice: {answer.finishes} {answer.roles} {answer.done}")


async def known(http: httpx.AsyncClient, ids: Sequence[str]) -> list[str]:
    """Returns which groups the server still knows."""
    answers = [(id, await http.get(f"/v1/groups/{id}")) for id in ids]
    return [id for id, answer in answers if answer.status_code != 404]
