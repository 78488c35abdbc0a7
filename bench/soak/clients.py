"""The clients of the soak run: each does one thing after the other, in an order that follows from its seed.

A client waits for answers and compares them, leaves in the middle of some, asks wrongly, sends more at a time than its
key may, breaks off connections in the middle of a head or a body, and has groups that are steered, looked at, ended and
asked for more (`bench.soak.policy_groups`). Some of what it sends has a place in a trace, or headers that name none.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
import msgspec

from bench.chaos.answers import Answer, Outcome, ask
from bench.chaos.mixed_requests import CHAT, Request
from bench.client.stream import bytes_of, follow
from bench.soak.policy_groups import (
    KEEP_S,
    Course,
    Steered,
    known,
    large_groups,
    message_requests,
    some_steered,
    steered_requests,
)
from bench.soak.seeded_requests import (
    Call,
    chat,
    fresh_request,
    heavy_form,
    refused_calls,
    seeded_requests,
    short_calls,
)
from motet.errors import EngineError

KEY_MAX_REQUESTS, KEY_MAX_CHOICES = 3, 200
BURST = 6
TRACES = (
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
    "00-00000000000000000000000000000000-0000000000000000-01",
    "no trace",
)
"""Values of `traceparent`: one that is recorded, one that is not, and two that count as none."""
LEAST_PAUSE_S = 0.1
"""A server needs a moment to notice that a client has left, and until then the request counts for its key."""


class Left(Exception):  # nothing has failed: the client has gone
    """Raised by a client that leaves in the middle of a stream."""


@dataclass
class Tally:
    """What all clients did, and what came of it."""

    outcome: Outcome = field(default_factory=Outcome)
    """The answers that are compared with the undisturbed ones."""
    acts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    """Number of calls and bursts by status."""
    unexpected: list[str] = field(default_factory=list)
    """Other statuses and codes than there should be, and what broke."""
    malformed: list[str] = field(default_factory=list)
    """Answers to fresh requests that lack a choice or do not have their form, and those of groups that are steered or
    asked for more, if they are not what the whole group is."""
    still_known: list[str] = field(default_factory=list)
    """Groups that the server knew when their time was up."""

    @property
    def sent(self) -> int:
        return sum(self.acts.values())


@dataclass(frozen=True)
class Undisturbed:
    """What clients send over and over, with the answers before anything was struck."""

    seeded: Sequence[tuple[Request, Answer]]
    """Their answers are always the same."""
    steered: Sequence[tuple[Steered, Answer]]
    """With the answer to the request without its policy."""
    large: Sequence[tuple[Request, Answer]]
    """The groups of which courses have a part."""


async def ask_undisturbed(http: httpx.AsyncClient, seed: int) -> Undisturbed:
    """Sends everything once. Ends the run if anything fails."""
    seeded = [*seeded_requests(seed), *steered_requests(seed)]
    messages, steered, large = message_requests(seed), some_steered(seed), large_groups(seed)
    asked = [*seeded, *(one for pair in messages for one in pair), *(one.without for one in steered), *large]
    answers = {request.name: await ask(http, request) for request in asked}
    if failed := [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error is not None]:
        raise SystemExit("requests failed before anything was struck: " + "; ".join(failed[:5]))
    of_chats = [(message, answers[chat.name]) for message, chat in messages]
    return Undisturbed(
        [*((one, answers[one.name]) for one in seeded), *of_chats],
        [(one, answers[one.without.name]) for one in steered],
        [(one, answers[one.name]) for one in large],
    )


@dataclass(frozen=True)
class Connections:
    """One client's connections: with a key of its own, and with the key that all bursts share."""

    own: httpx.AsyncClient
    burst: httpx.AsyncClient


class Client:
    """One client. `run` goes on where the last run ended."""

    def __init__(
        self, tally: Tally, undisturbed: Undisturbed, *, dice: random.Random, pause_s: float, model: str
    ) -> None:
        """`pause_s`: mean pause between two acts."""
        self._tally = tally
        self._undisturbed = undisturbed
        self._seeded = undisturbed.seeded
        self._kept: dict[str, float] = {}
        """Groups that the server was asked to keep, and when their time is up."""
        self._dice = dice
        self._pause_s = pause_s
        self._short, self._refused = short_calls(model), refused_calls()
        self._acts: Mapping[str, tuple[float, Callable[[Connections], Awaitable[None]]]] = {
            "compared": (40, self._compare),
            "fresh": (16, self._ask_fresh),
            "steered": (12, self._ask_steered),
            "group": (12, self._run_course),
            "left in a stream": (12, self._leave_stream),
            "left before an answer": (6, self._leave_answer),
            "short": (14, lambda to: self._call(to, self._dice.choice(self._short))),
            "refused": (12, lambda to: self._call(to, self._dice.choice(self._refused))),
            "heavy form": (0.5, lambda to: self._call(to, heavy_form(self._dice))),
            "burst": (2, self._burst),
            "broken connection": (4, self._break),
        }

    async def run(self, to: Connections, *, until_s: float) -> None:
        weights = [weight for weight, _ in self._acts.values()]
        while time.monotonic() < until_s:
            (name,) = self._dice.choices(list(self._acts), weights)
            self._tally.acts[name] += 1
            to.own.headers.update({"traceparent": self._dice.choice(TRACES)})
            try:
                await self._acts[name][1](to)
            except (OSError, httpx.HTTPError, EngineError) as error:
                self._tally.unexpected.append(f"{name}: {error or type(error).__name__}")
            await asyncio.sleep(LEAST_PAUSE_S + self._dice.expovariate(1 / self._pause_s))

    async def _compare(self, to: Connections) -> None:
        request, expected = self._dice.choice(self._seeded)
        self._tally.outcome.add(request, await ask(to.own, request), expected)

    async def _ask_fresh(self, to: Connections) -> None:
        fresh = fresh_request(self._dice)
        answer = await ask(to.own, fresh.request)
        if answer.error is not None:
            self._tally.unexpected.append(f"{fresh.request.name}: {answer.error}")
        elif answer.lost(fresh.request.n) or answer.duplicates() or not fresh.suits(answer):
            self._tally.malformed.append(f"{fresh.request.name}: {answer.texts} {answer.finishes}")

    async def _ask_steered(self, to: Connections) -> None:
        steered, whole = self._dice.choice(self._undisturbed.steered)
        answer = await ask(to.own, steered.request)
        if answer.error is not None:
            self._tally.unexpected.append(f"{steered.request.name}: {answer.error}")
        else:
            self._tally.malformed += [f"{steered.request.name}: {fault}" for fault in steered.faults(answer, whole)]

    async def _run_course(self, to: Connections) -> None:
        course = Course(to.own, *self._dice.choice(self._undisturbed.large), self._dice)
        try:
            await course.run()
        finally:
            self._tally.malformed += [f"group: {fault}" for fault in course.faults]
            if course.id:
                self._kept[course.id] = time.monotonic() + KEEP_S

    async def check_forgotten(self, http: httpx.AsyncClient) -> None:
        """Waits until the time of all groups is up, and notes which the server still knows then."""
        await asyncio.sleep(max(0.0, max(self._kept.values(), default=0.0) - time.monotonic()))
        self._tally.still_known += await known(http, list(self._kept))
        self._kept.clear()

    async def _leave_stream(self, to: Connections) -> None:
        lines = self._dice.randrange(40)
        request = self._some_request(stream=True)
        seen = 0

        def take(_: str) -> None:
            nonlocal seen
            seen += 1
            if seen > lines:
                raise Left

        with contextlib.suppress(Left):
            await follow(to.own, request.path, request.body, take)

    async def _leave_answer(self, to: Connections) -> None:
        patience_s = self._dice.uniform(0.01, 1.0)
        request = self._some_request(stream=False)
        try:
            async with asyncio.timeout(patience_s):
                response = await to.own.post(request.path, json=request.body)
        except TimeoutError:
            return
        self._judge(Call("left before an answer", "POST", request.path), response)

    def _some_request(self, *, stream: bool) -> Request:
        """Returns a seeded request in one of two cases, else a fresh one."""
        request = fresh_request(self._dice).request
        if self._dice.random() < 0.5:
            seeded, _ = self._dice.choice(self._seeded)
            if not stream or can_be_streamed(seeded):
                request = seeded
        body = {name: value for name, value in request.body.items() if name not in ("stream_options", "best_of")}
        return Request(request.name, request.path, body | {"stream": stream})

    async def _call(self, to: Connections, call: Call) -> None:
        self._judge(call, await send(to.own, call))

    def _judge(self, call: Call, response: httpx.Response) -> None:
        self._tally.statuses[f"{call.name}: {response.status_code}"] += 1
        if not as_it_must_be(call, response):
            self._tally.unexpected.append(f"{call.name}: {response.status_code} {response.text[:200]}")

    async def _burst(self, to: Connections) -> None:
        """Sends more at once than a key may have: as requests, or as choices of a few requests."""
        n = self._dice.choice((4, 90))
        bodies = [chat(f"Hello {self._dice.random()}", n=n, max_tokens=3) for _ in range(BURST)]
        responses = await asyncio.gather(*(to.burst.post(CHAT, json=body) for body in bodies))
        for response in responses:
            status = response.status_code
            self._tally.statuses[f"burst: {status}"] += 1
            if status not in (200, 429) or (status == 429 and "retry-after" not in response.headers):
                self._tally.unexpected.append(f"burst: {status} {response.text[:200]}")

    async def _break(self, to: Connections) -> None:
        """Sends some bytes of a request, waits a little, and is gone."""
        request = to.own.build_request("POST", CHAT, json=chat("x" * 5000, n=2, max_tokens=200, stream=True))
        whole = bytes_of(request)
        sent = self._dice.choice((0, 30, 200, len(whole) - 2000, len(whole)))
        _, writer = await asyncio.open_connection(request.url.host, request.url.port)
        writer.write(whole[:sent])
        await asyncio.sleep(self._dice.uniform(0.0, 0.3))
        if self._dice.random() < 0.5:
            writer.transport.abort()
        writer.close()


def can_be_streamed(request: Request) -> bool:
    sampling = request.body.get("sampling_params", {})
    assert isinstance(sampling, dict)
    return "prompt_logprobs" not in sampling


async def send(http: httpx.AsyncClient, call: Call) -> httpx.Response:
    if isinstance(call.body, bytes):
        request = http.build_request(call.method, call.path, content=call.body)
    else:
        request = http.build_request(call.method, call.path, json=call.body)
    if call.headers is not None:
        del request.headers["Authorization"]
        request.headers.update(call.headers)
    return await http.send(request)


def as_it_must_be(call: Call, response: httpx.Response) -> bool:
    """True if a response has the status of its call, and the code if the call names one."""
    if response.status_code != call.status or call.code is None:
        return response.status_code == call.status
    body = msgspec.json.decode(response.content)
    return bool(body["error"]["code"] == call.code)
