"""A hostile chat template of a model folder, or of a gateway's worker."""

import asyncio
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from motet.deploy.server import Outcome
from motet.text.rendering import render_process
from motet.text.tokenizer import Tokenizer
from tests.api.serving import ROUTES, Serving
from tests.deploy.running import Running
from tests.error_response import assert_error
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import build_tiny_tokenizer, save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

LOOPS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
ENDLESS = "{% if messages[0].content == 'run' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"


async def test_a_template_without_an_end_delays_no_other_request(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nested loops in a template stopped the event loop for ever."""
    monkeypatch.setattr(render_process, "TIMEOUT_S", 0.3)
    served = await serve(tokenizer=Tokenizer(build_tiny_tokenizer(), chat_template=ENDLESS))
    path = "/v1/chat/completions"
    running = asyncio.create_task(served.chat("run"))
    await asyncio.sleep(0)
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.post(path, json=ROUTES[path])).status_code == 200
    assert not running.done()
    refused = await running
    assert_error(refused, status=400, param="messages")
    assert "the chat template takes more than 0.3 s for these messages" in refused.text


async def test_a_server_ends_while_a_template_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A thread that waited for the template kept the program from ending."""
    code = "import motet.text.rendering.render_process as limits; limits.CPU_S = 1000; limits.main()"
    waiting, receive = threading.Event(), render_process.receive

    def noted(stream: IO[bytes] | None) -> tuple[bytes, bytes]:
        waiting.set()
        return receive(stream)

    monkeypatch.setattr(render_process, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(render_process, "receive", noted)
    save_tiny_tokenizer(tmp_path, chat_template=ENDLESS + "{# ends #}")
    async with Running(tmp_path) as server:
        body = {"messages": [{"role": "user", "content": "run"}]}
        running = asyncio.create_task(server.http.post("/v1/chat/completions", json=body))
        assert await asyncio.to_thread(waiting.wait, PATIENCE_S)
        server.signals.receive()
        assert_error(await running, status=503, code="engine_closed")
        assert await server.outcome() is Outcome.STOPPED


async def test_a_long_chat_is_rendered_in_a_process_with_the_same_prompt(serve: Serving) -> None:
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    served = await serve(tokenizer=Tokenizer(build_tiny_tokenizer(), chat_template=source))
    path, number = "/v1/chat/completions", 130
    for contents in ("a" * number, "a"), ("a",) * number:
        body = {"messages": [{"role": "user", "content": content} for content in contents]}
        assert (await served.http.post(path, json=body)).status_code == 200
    one, many = (request.prompt for request in served.engine.requests)
    assert len(many) == number and len(one) == number + 1 and set(one) == set(many)
