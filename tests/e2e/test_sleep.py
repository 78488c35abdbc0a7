"""A server with the default model sleeps: it and its engine release their memory, and answers stay the same."""

from collections.abc import Iterator

import httpx
import psutil
import pytest

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import environment
from tests.forked import USED_KV, ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("default_weights")]

KV_GB = 0.5
MB = 2**20
KV_BYTES, WEIGHT_BYTES = KV_GB * 2**30, 256 * MB


@pytest.fixture
def server(default_weights: None, forking: ForkingProcess) -> Iterator[ChildServer]:
    environ = {**environment(), USED_KV: "1"}
    with forking.server([DEFAULT_MODEL, "--rl", "--kv-cache-gb", str(KV_GB)], environ=environ) as running:
        yield running


def resident(server: ChildServer, client: httpx.Client) -> int:
    """Returns the resident memory of the server and its engines, in bytes."""
    workers = client.get("/status").json()["workers"]
    pids = [server.pid, *(worker["pid"] for worker in workers)]
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in pids)


@pytest.mark.long
def test_memory_of_the_default_model_is_released_and_its_answers_stay_the_same(server: ChildServer) -> None:
    body = {"messages": [{"role": "user", "content": "Name a boat."}], "n": 4, "max_tokens": 20, "seed": 1}
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:

        def answer() -> object:
            choices = client.post("/v1/chat/completions", json=body).json()["choices"]
            return [choice["message"]["content"] for choice in choices]

        expected, awake_bytes = answer(), resident(server, client)
        for level, minimum in ((1, 0.9 * KV_BYTES), (2, 0.9 * (KV_BYTES + WEIGHT_BYTES))):
            client.post("/sleep", params={"level": level}).raise_for_status()
            assert awake_bytes - resident(server, client) > minimum
            client.post("/wake_up").raise_for_status()
            assert awake_bytes - resident(server, client) > 0.8 * KV_BYTES, "the KV cache grows back as it is used"
            assert answer() == expected
