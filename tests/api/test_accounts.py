"""One log line and one set of figures a group, whatever became of it; and nothing heavy is imported for HTTP."""

import logging
import subprocess
import sys
from typing import Any

import pytest

from motet.errors import EngineError
from tests.api.serving import Served, Serving, WatchedEngine
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio


def group_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.message == "group ended"]


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="motet.api")


async def test_a_group_is_logged_once_with_the_clients_request_id(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": ["x", "yy"], "n": 3}
    await served.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    first, second = group_lines(caplog)
    assert (first["request_id"], second["request_id"]) == ("mine", "mine")
    assert first["group"] != second["group"]
    assert (first["status"], first["n"], first["finished"]) == (200, 3, 3)
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (1, 2)
    assert first["completion_tokens"] == 3 * len(fake_answer("hello 0"))
    assert first["total_s"] >= first["last_choice_first_token_s"] >= first["first_token_s"] >= 0


async def test_a_failed_group_is_logged_with_its_status(serve: Serving, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(engine=WatchedEngine(fail_after={1: EngineError("broke")}))
    await served.complete(stream=True)  # after the first byte: the client saw a 200
    (line,) = group_lines(caplog)
    assert (line["status"], line["finished"], line["completion_tokens"]) == (500, 0, 1)


async def test_scrape_shows_what_was_done(served: Served) -> None:
    await served.chat(n=4)
    text = (await served.http.get("/metrics")).text
    assert 'motet:request_success_total{finished_reason="stop",model_name="tiny"} 4.0' in text
    assert 'motet:groups_total{model_name="tiny",status="200"} 1.0' in text
    assert 'motet:time_to_first_token_last_choice_seconds_count{model_name="tiny"} 1.0' in text
    assert 'motet:generation_tokens_total{model_name="tiny",role="both",worker="engine-0"} 16.0' in text
    assert 'handler="/v1/chat/completions",method="POST",status="200"' in text


async def test_unknown_routes_are_counted_together(served: Served) -> None:
    for path in ("/a", "/b"):
        await served.http.get(path)
    text = (await served.http.get("/metrics")).text
    assert 'motet:http_requests_total{handler="none",method="GET",status="404"} 2.0' in text


def test_http_imports_no_torch() -> None:
    program = "import sys, motet.api.app, motet.metrics.prometheus, motet.log; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
