"""Batches of a real server that is killed while they run."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai import OpenAI

from motet.deploy.child import ChildServer
from motet.errors import ConfigError
from tests.forked import ForkingProcess
from tests.hosts.servers import eventually
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

pytestmark = pytest.mark.slow

LINES = 60
PATH: Final = "/v1/completions"


def body_of(number: int) -> dict[str, Any]:
    return {"prompt": [5, 6, number], "n": 2, "seed": number, "max_tokens": 60, "ignore_eos": True}


def texts_of(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_every_line_has_one_result_although_the_server_is_killed(
    folder: Path, tmp_path: Path, forking: ForkingProcess, one_engine: Callable[[str], ChildServer]
) -> None:
    flags = [str(folder), *TINY, "--batch-dir", str(tmp_path / "batches"), "--batch-concurrency", "4"]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": PATH, "body": body_of(number)})
        for number in range(LINES)
    ]
    with forking.server(flags) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        id = client.batches.create(input_file_id=file.id, endpoint=PATH, completion_window="24h").id
        with pytest.raises(ConfigError, match="another server uses it"), forking.server(flags):
            pass
        kill_after(server, id, completed=3)
    with forking.server(flags) as server:
        kill_after(server, id, completed=20)
    with forking.server(flags) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        batch = eventually(lambda: client.batches.retrieve(id), lambda batch: batch.status == "completed")
        assert batch.request_counts is not None and batch.usage is not None
        assert batch.request_counts.model_dump() == {"total": LINES, "completed": LINES, "failed": 0}
        assert batch.usage.output_tokens == LINES * 2 * 60
        assert batch.output_file_id is not None
        results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(result["custom_id"]) for result in results) == [*range(LINES)]
    with httpx.Client(base_url=one_engine("float32").url, timeout=PATIENCE_S) as http:
        for result in results[:: LINES // 10]:
            alone = http.post(PATH, json=body_of(int(result["custom_id"]))).json()
            assert texts_of(result["response"]["body"]) == texts_of(alone)


def kill_after(server: ChildServer, id: str, *, completed: int) -> None:
    """Kills the server when this number of lines has results, and others run."""

    def num_completed() -> int:
        batch = httpx.get(f"{server.url}/v1/batches/{id}", timeout=PATIENCE_S).json()
        return int(batch["request_counts"]["completed"])

    assert eventually(num_completed, lambda number: number >= completed) < LINES
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
