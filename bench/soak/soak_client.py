"""The clients of the soak run. Each acts repeatedly, in an order that follows from its seed.

A client waits for answers and compares them, disconnects in the middle of some, sends invalid requests and more
requests than its key allows, breaks connections in the middle of a head or a body. It has groups with policies, which
it queries, ends and extends (`bench.soak.policy_groups`). Some of its requests belong to a trace, or have invalid trace
headers.
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

from bench.chaos.mixed_requests import CHAT, RepeatedRequest
from bench.chaos.received_answers import ComparedAnswers, ReceivedAnswer, receive_answer
from bench.client.stream import bytes_of, follow
from bench.soak.policy_groups import (
    KEEP_S,
    GroupCourse,
    SteeredRequest,
    known_groups,
    large_groups,
    load_dependent_requests,
    message_requests,
    steered_requests,
)
from bench.soak.seeded_requests import (
    StatusCall,
    chat,
    fresh_request,
    heavy_grammar,
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
"""Values of `traceparent`: a trace that is recorded, one that is not, and two invalid ones."""
MIN_PAUSE_S = 0.1
"""Minimum pause. A server needs a moment to notice that a client has left; until then the request counts for its
key."""


class ClientLeft(Exception):  # not an error: the client has left
    """Raised by a client that disconnects in the middle of a stream."""


@dataclass
class Tally:
    """All acts of the clients, and their results."""

    outcome: ComparedAnswers = field(default_factory=ComparedAnswers)
    """Answers that are compared with the answers without faults."""
    acts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    """Number of calls and bursts by status."""
    unexpected: list[str] = field(default_factory=list)
    """Unexpected statuses, error codes and failures."""
    malformed: list[str] = field(default_factory=list)
    """Answers to fresh requests with a missing choice or a violated grammar. Also answers of groups with a policy, or
    with more choices, that do not agree with the complete group."""
    still_known: list[str] = field(default_factory=list)
    """Groups that the server still knew after their time."""

    @property
    def sent(self) -> int:
        return sum(self.acts.values())


@dataclass(frozen=True)
class ExpectedAnswers:
    """The repeated requests, with their answers before the first fault."""

    seeded: Sequence[tuple[RepeatedRequest, ReceivedAnswer]]
    """Requests whose answers are always the same."""
    steered: Sequence[tuple[SteeredRequest, ReceivedAnswer]]
    """Requests with a policy, each with the answer to the same request without the policy."""
    large: Sequence[tuple[RepeatedRequest, ReceivedAnswer]]
    """Complete groups; the groups of courses have some of their choices."""


async def collect_expected(http: httpx.AsyncClient, seed: int) -> ExpectedAnswers:
    """Sends every request once. Ends the run if a request fails."""
    seeded = [*seeded_requests(seed), *steered_requests(seed)]
    messages, steered, large = message_requests(seed), load_dependent_requests(seed), large_groups(seed)
    requests = [
        *seeded,
        *(request for pair in messages for request in pair),
        *(request.without_policy for request in steered),
        *large,
    ]
    answers = {request.name: await receive_answer(http, request) for request in requests}
    if failed := [f"{name}: {answer.error}" for name, answer in answers.items() if answer.error is not None]:
        raise SystemExit("requests failed before the first fault: " + "; ".join(failed[:5]))
    of_chats = [(message, answers[chat.name]) for message, chat in messages]
    return ExpectedAnswers(
        [*((request, answers[request.name]) for request in seeded), *of_chats],
        [(request, answers[request.without_policy.name]) for request in steered],
        [(request, answers[request.name]) for request in large],
    )


@dataclass(frozen=True)
class ClientConnections:
    """The connections of one client: with its own key, and with the key that all bursts share."""

    own: httpx.AsyncClient
    burst: httpx.AsyncClient


class SoakClient:
    """One client. `run` continues where the last run ended."""

    def __init__(
        self, tally: Tally, expected: ExpectedAnswers, *, dice: random.Random, pause_s: float, model: str
    ) -> None:
        """`pause_s` is the mean pause between two acts."""
        self._tally = tally
        self._expected = expected
        self._kept: dict[str, float] = {}
        """Groups that the server was requested to keep, and the ends of their times."""
        self._dice = dice
        self._pause_s = pause_s
        self._short, self._refused = short_calls(model), refused_calls()
        self._acts: Mapping[str, tuple[float, Callable[[ClientConnections], Awaitable[None]]]] = {
            "compared": (40, self._compare),
            "fresh": (16, self._send_fresh),
            "steered": (12, self._send_steered),
            "group": (12, self._run_course),
            "left in a stream": (12, self._leave_stream),
            "left before an answer": (6, self._leave_answer),
            "short": (14, lambda to: self._call(to, self._dice.choice(self._short))),
            "refused": (12, lambda to: self._call(to, self._dice.choice(self._refused))),
            "heavy grammar": (0.5, lambda to: self._call(to, heavy_grammar(self._dice))),
            "burst": (2, self._burst),
            "broken connection": (4, self._break),
        }

    async def run(self, to: ClientConnections, *, until_s: float) -> None:
        weights = [weight for weight, _ in self._acts.values()]
        while time.monotonic() < until_s:
            (name,) = self._dice.choices(list(self._acts), weights)
            self._tally.acts[name] += 1
            to.own.headers.update({"traceparent": self._dice.choice(TRACES)})
            try:
                await self._acts[name][1](to)
            except (OSError, httpx.HTTPError, EngineError) as error:
                self._tally.unexpected.append(f"{name}: {error or type(error).__name__}")
            await asyncio.sleep(MIN_PAUSE_S + self._dice.expovariate(1 / self._pause_s))

    async def _compare(self, to: ClientConnections) -> None:
        request, expected = self._dice.choice(self._expected.seeded)
        self._tally.outcome.add(request, await receive_answer(to.own, request), expected)

    async def _send_fresh(self, to: ClientConnections) -> None:
        fresh = fresh_request(self._dice)
        answer = await receive_answer(to.own, fresh.request)
        if answer.error is not None:
            self._tally.unexpected.append(f"{fresh.request.name}: {answer.error}")
        elif answer.lost(fresh.request.n) or answer.duplicates() or not fresh.matches(answer):
            self._tally.malformed.append(f"{fresh.request.name}: {answer.texts} {answer.finishes}")

    async def _send_steered(self, to: ClientConnections) -> None:
        steered, complete = self._dice.choice(self._expected.steered)
        answer = await receive_answer(to.own, steered.request)
        if answer.error is not None:
            self._tally.unexpected.append(f"{steered.request.name}: {answer.error}")
        else:
            self._tally.malformed += [f"{steered.request.name}: {fault}" for fault in steered.faults(answer, complete)]

    async def _run_course(self, to: ClientConnections) -> None:
        course = GroupCourse(to.own, *self._dice.choice(self._expected.large), self._dice)
        try:
            await course.run()
        finally:
            self._tally.malformed += [f"group: {fault}" for fault in course.faults]
            if course.id:
                self._kept[course.id] = time.monotonic() + KEEP_S

    async def check_forgotten(self, http: httpx.AsyncClient) -> None:
        """Waits until the times of all groups have ended, and stores which groups the server still knows."""
        await asyncio.sleep(max(0.0, max(self._kept.values(), default=0.0) - time.monotonic()))
        self._tally.still_known += await known_groups(http, list(self._kept))
        self._kept.clear()

    async def _leave_stream(self, to: ClientConnections) -> None:
        lines = self._dice.randrange(40)
        request = self._some_request(stream=True)
        received = 0

        def on_line(_: str) -> None:
            nonlocal received
            received += 1
            if received > lines:
                raise ClientLeft

        with contextlib.suppress(ClientLeft):
            await follow(to.own, request.path, request.body, on_line)

    async def _leave_answer(self, to: ClientConnections) -> None:
        patience_s = self._dice.uniform(0.01, 1.0)
        request = self._some_request(stream=False)
        try:
            async with asyncio.timeout(patience_s):
                response = await to.own.post(request.path, json=request.body)
        except TimeoutError:
            return
        self._check(StatusCall("left before an answer", "POST", request.path), response)

    def _some_request(self, *, stream: bool) -> RepeatedRequest:
        """Returns a seeded request in one of two cases, otherwise a fresh one."""
        request = fresh_request(self._dice).request
        if self._dice.random() < 0.5:
            seeded, _ = self._dice.choice(self._expected.seeded)
            if not stream or can_be_streamed(seeded):
                request = seeded
        body = {name: value for name, value in request.body.items() if name not in ("stream_options", "best_of")}
        return RepeatedRequest(request.name, request.path, body | {"stream": stream})

    async def _call(self, to: ClientConnections, call: StatusCall) -> None:
        self._check(call, await send(to.own, call))

    def _check(self, call: StatusCall, response: httpx.Response) -> None:
        self._tally.statuses[f"{call.name}: {response.status_code}"] += 1
        if not is_expected(call, response):
            self._tally.unexpected.append(f"{call.name}: {response.status_code} {response.text[:200]}")

    async def _burst(self, to: ClientConnections) -> None:
        """Sends more at once than a key allows: as requests, or as choices of a few requests."""
        n = self._dice.choice((4, 90))
        bodies = [chat(f"Hello {self._dice.random()}", n=n, max_tokens=3) for _ in range(BURST)]
        responses = await asyncio.gather(*(to.burst.post(CHAT, json=body) for body in bodies))
        for response in responses:
            status = response.status_code
            self._tally.statuses[f"burst: {status}"] += 1
            if status not in (200, 429) or (status == 429 and "retry-after" not in response.headers):
                self._tally.unexpected.append(f"burst: {status} {response.text[:200]}")

    async def _break(self, to: ClientConnections) -> None:
        """Sends some bytes of a request, waits a little, and disconnects."""
        request = to.own.build_request("POST", CHAT, json=chat("x" * 5000, n=2, max_tokens=200, stream=True))
        content = bytes_of(request)
        sent = self._dice.choice((0, 30, 200, len(content) - 2000, len(content)))
        _, writer = await asyncio.open_connection(request.url.host, request.url.port)
        writer.write(content[:sent])
        await asyncio.sleep(self._dice.uniform(0.0, 0.3))
        if self._dice.random() < 0.5:
            writer.transport.abort()
        writer.close()


def can_be_streamed(request: RepeatedRequest) -> bool:
    sampling = request.body.get("sampling_params", {})
    assert isinstance(sampling, dict)
    return "prompt_logprobs" not in sampling


async def send(http: httpx.AsyncClient, call: StatusCall) -> httpx.Response:
    if isinstance(call.body, bytes):
        request = http.build_request(call.method, call.path, content=call.body)
    else:
        request = http.build_request(call.method, call.path, json=call.body)
    if call.headers is not None:
        del request.headers["Authorization"]
        request.headers.update(call.headers)
    return await http.send(request)


def is_expected(call: StatusCall, response: httpx.Response) -> bool:
    """Returns True if a response has the status of its call, and its error code if the call has one."""
    if response.status_code != call.status or call.code is None:
        return response.status_code == call.status
    body = msgspec.json.decode(response.content)
    return bool(body["error"]["code"] == call.code)
