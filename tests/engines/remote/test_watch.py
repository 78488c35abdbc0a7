"""The watch over a prefill server: whoever joins or returns is met, and who is down is not asked."""

import asyncio
import logging
from collections.abc import Sequence

import httpx
import pytest

from motet.engines.remote.prefill import DOWN_WAIT_S, UP_WAIT_S
from motet.errors import EngineDiedError, MotetError
from motet.transfer.ticket import TransferAddress
from tests.engines.remote.far import Scripted, refused, remote, request, status_of, with_ticket

pytestmark = pytest.mark.anyio

A, B = (TransferAddress(f"engine-{name}", "10.0.0.1", 20000) for name in "ab")
REFUSED = httpx.ConnectError("connection refused")
STATUS = "/status"


class EndOfScript(Exception):
    pass


class Watch:
    """Runs the watch over a server that gives these answers to `GET /status`, one after the other."""

    def __init__(self, answers: Sequence[httpx.Response | Exception], *, meet_errors: Sequence[bool] = ()) -> None:
        self._answers = iter(answers)
        self._meet_errors = iter(meet_errors)
        self.met: list[TransferAddress] = []
        self.waits: list[float] = []
        self.server = Scripted(self._answer)
        self.engine = remote(self.server.client)

    async def run(self) -> None:
        with pytest.raises(EndOfScript):
            await self.engine.watch(self._meet, wait=self._wait)

    async def run_one_look(self) -> None:
        """And leaves it as it is then."""
        looked = asyncio.Event()

        async def wait(_: float) -> None:
            looked.set()
            await asyncio.Event().wait()

        watching = asyncio.ensure_future(self.engine.watch(self._meet, wait=wait))
        await looked.wait()
        watching.cancel()
        await asyncio.wait([watching])

    def _answer(self, asked: httpx.Request) -> httpx.Response:
        if asked.url.path != STATUS:
            return with_ticket(asked)
        answer = next(self._answers, EndOfScript())
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _meet(self, address: TransferAddress) -> None:
        self.met.append(address)
        if next(self._meet_errors, False):
            raise MotetError("cluster keys differ")

    async def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)


async def test_a_server_is_met_once_for_each_of_its_starts() -> None:
    watch = Watch([status_of(A), status_of(A), status_of(B), status_of(B)])
    await watch.run()
    assert watch.met == [A, B]
    assert watch.waits == [UP_WAIT_S] * 4
    assert watch.engine.info.transfer == B


async def test_a_server_that_joins_late_is_asked_often_until_it_is_there() -> None:
    watch = Watch([REFUSED, REFUSED, status_of(A)])
    await watch.run()
    assert watch.met == [A]
    assert watch.waits == [DOWN_WAIT_S, DOWN_WAIT_S, UP_WAIT_S]


async def test_a_server_that_returns_as_it_was_is_not_met_again() -> None:
    watch = Watch([status_of(A), REFUSED, status_of(A)])
    await watch.run()
    assert watch.met == [A]
    assert watch.waits == [UP_WAIT_S, DOWN_WAIT_S, UP_WAIT_S]


async def test_a_meeting_that_failed_is_tried_again_soon() -> None:
    watch = Watch([status_of(A)] * 3, meet_errors=[True, True, False])
    await watch.run()
    assert watch.met == [A, A, A]
    assert watch.waits == [DOWN_WAIT_S, DOWN_WAIT_S, UP_WAIT_S]


async def test_what_is_wrong_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch([REFUSED, REFUSED, status_of(A), status_of(A), status_of(A)], meet_errors=[True, True])
    with caplog.at_level(logging.INFO, logger="motet.engines.remote"):
        await watch.run()
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (
            logging.WARNING,
            "prefill from another server is disturbed: "
            "the prefill server http://prefill.test did not answer: connection refused",
        ),
        (logging.WARNING, "prefill from another server is disturbed: cluster keys differ"),
        (logging.INFO, "the prefill server http://prefill.test can be reached again"),
    ]


async def test_a_server_that_is_seen_to_be_down_is_not_asked_for_prefill() -> None:
    watch = Watch([REFUSED])
    await watch.run_one_look()
    assert watch.engine.down
    with pytest.raises(EngineDiedError, match="is down"):
        await watch.engine.prefill(request())
    assert watch.server.paths == [STATUS]


async def test_nobody_goes_on_waiting_for_a_server_that_is_seen_to_be_down() -> None:
    """A link that was cut without a word ended no connection: prompts waited for as long as a prefill may take."""
    begun = asyncio.Event()

    async def answer(asked: httpx.Request) -> httpx.Response:
        if asked.url.path != STATUS:
            begun.set()
            await asyncio.Event().wait()
        raise httpx.ReadTimeout("nothing came")

    async def wait(_: float) -> None:
        await asyncio.Event().wait()

    async def meet(_: TransferAddress) -> None:
        raise AssertionError("nobody told an address")

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        engine = remote(client)
        asking = asyncio.ensure_future(engine.prefill(request()))
        await begun.wait()
        watching = asyncio.ensure_future(engine.watch(meet, wait=wait))
        with pytest.raises(EngineDiedError, match="nothing came"):
            await asking
        watching.cancel()
        await asyncio.wait([watching])


async def test_a_server_that_is_seen_to_be_up_is_asked_again() -> None:
    watch = Watch([REFUSED, status_of(A)])
    await watch.run_one_look()
    await watch.run_one_look()
    await watch.engine.prefill(request())
    assert not watch.engine.down


async def test_a_server_that_lost_its_engine_is_down() -> None:
    watch = Watch([status_of(A, state="dead")])
    await watch.run_one_look()
    assert watch.engine.down
    assert watch.met == []


@pytest.mark.parametrize("answer", [status_of(None), httpx.Response(404)])
async def test_a_server_that_tells_no_address_is_up_and_not_met(answer: httpx.Response) -> None:
    watch = Watch([answer])
    await watch.run()
    assert watch.met == []
    assert watch.waits == [UP_WAIT_S]
    assert not watch.engine.down


async def test_a_server_that_wants_another_key_is_not_down_but_asked_often() -> None:
    watch = Watch([refused(401, "no key"), status_of(A)])
    await watch.run()
    assert watch.met == [A]
    assert watch.waits == [DOWN_WAIT_S, UP_WAIT_S]
