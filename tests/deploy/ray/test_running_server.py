"""A server that runs as a task of its replica."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from motet.api.http.request_ids import ProxiedApp
from motet.deploy.ray.running_server import RunningServer
from motet.deploy.server import Outcome, Serving
from motet.deploy.shutdown import StopSignals
from motet.errors import EngineDiedError, ModelLoadError, StartupError

pytestmark = pytest.mark.anyio

OnReady = Callable[[Serving[str]], None]
SERVING = Serving("http://here", SimpleNamespace(), SimpleNamespace(), "workforce")  # type: ignore[arg-type]


class Script:
    """A scripted server: it serves at once or not at all, and ends on a signal, on `ends`, or with an error."""

    def __init__(self, *, serves: bool = True, fails: BaseException | None = None, lasts: bool = True) -> None:
        self.started = asyncio.Event()
        self.over = asyncio.Event()
        self.ends = asyncio.Event()
        self._serves = serves
        self._fails = fails
        self._lasts = lasts

    async def __call__(self, *, on_ready: OnReady, signals: StopSignals) -> Outcome:
        self.started.set()
        try:
            if self._serves:
                on_ready(SERVING)
            if self._lasts:
                waits = [asyncio.ensure_future(event.wait()) for event in (self.ends, signals.drain)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
            if self._fails is not None:
                raise self._fails
            return Outcome.STOPPED if self._serves else Outcome.STOPPED_BEFORE_READY
        finally:
            self.over.set()


async def test_it_serves_from_its_start_to_its_stop() -> None:
    server, script = RunningServer[str](), Script()
    await server.start(script)
    assert (server.serving, server.serves) == (SERVING, True)
    server.check()
    await server.close()
    await server.close()
    assert script.over.is_set()
    assert not server.serves


async def test_a_server_that_was_never_started_is_stopped_at_once() -> None:
    server = RunningServer[str]()
    await server.close()
    assert not server.serves


async def test_a_failed_start_raises_its_reason_and_can_be_repeated() -> None:
    server = RunningServer[str]()
    with pytest.raises(ModelLoadError, match="gone"):
        await server.start(Script(serves=False, fails=ModelLoadError("gone"), lasts=False))
    assert not server.serves
    await server.start(Script())
    server.check()
    await server.close()


async def test_a_server_that_ends_before_it_serves_has_not_started() -> None:
    with pytest.raises(StartupError, match="ended before it was ready: stopped_before_ready"):
        await RunningServer[str]().start(Script(serves=False, lasts=False))


async def test_being_cancelled_while_it_starts_stops_it() -> None:
    server, script = RunningServer[str](), Script(serves=False)
    starting = asyncio.create_task(server.start(script))
    await script.started.wait()
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert script.over.is_set()


async def test_a_server_that_ends_by_itself_is_unhealthy(caplog: pytest.LogCaptureFixture) -> None:
    server, script = RunningServer[str](), Script(fails=RuntimeError("a defect"))
    await server.start(script)
    script.ends.set()
    await server.ended()
    assert not server.serves
    with pytest.raises(EngineDiedError):
        server.check()
    await server.close()
    await server.close()
    assert caplog.text.count("RuntimeError: a defect") == 1


async def test_a_server_whose_task_was_cancelled_can_be_closed(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: `close` raised CancelledError, as if its caller had been cancelled, and other tasks did not end."""
    server, script = RunningServer[str](), Script(fails=asyncio.CancelledError())
    await server.start(script)
    script.ends.set()
    await server.close()
    await server.close()
    assert not server.serves
    assert caplog.text == ""


async def test_serve_alone_names_the_request_in_an_answer_through_its_proxy() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("hi", headers={"x-request-id": "boat-7", "kept": "yes"})(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(ProxiedApp(app))) as http:
        answer = await http.get("http://here")
    assert "x-request-id" not in answer.headers
    assert (answer.headers["kept"], answer.text) == ("yes", "hi")
