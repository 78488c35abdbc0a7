"""Equality through the whole stack: real server, real sockets, the official client.

Choice i of a group with seed s is the single request with seed s + i, text for text, streamed or not, whatever else is
being served.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from motet.config import environment
from motet.deploy.child import ChildServer
from tests.e2e.asking import chat, completions, streamed_chat

pytestmark = pytest.mark.slow

PROMPTS = ["the hand in the sand", "hello and then another"]
SEED = 2**62


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def client(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server in float32, then one in bfloat16."""
    arguments = [str(model), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--dtype", request.param]
    environ = {**environment(), "TMPDIR": str(tmp_path_factory.mktemp("server"))}
    with (
        ChildServer([*arguments, "--max-num-batched-tokens", "64", "--max-num-seqs", "64"], environ=environ) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as openai,
    ):
        yield openai


@pytest.mark.parametrize("n", [1, 2, 7, 32])
def test_a_chat_of_n_is_n_single_chats(client: OpenAI, n: int) -> None:
    whole = chat(client, n=n, seed=SEED)
    assert streamed_chat(client, n=n, seed=SEED) == whole
    assert len(set(whole)) == n
    for i in sorted({0, 1, n // 2, n - 1} & set(range(n))):
        assert chat(client, n=1, seed=SEED + i) == [whole[i]], f"choice {i}"


def test_completions_of_several_prompts_are_the_single_ones_in_order(client: OpenAI) -> None:
    whole = completions(client, PROMPTS, n=3, seed=5)
    singles = [completions(client, [prompt], n=1, seed=5 + i)[0] for prompt in PROMPTS for i in range(3)]
    assert whole == singles


def test_requests_at_once_are_the_requests_one_by_one(client: OpenAI) -> None:
    alone = [chat(client, n=n, seed=1000 * n) for n in (1, 3, 5, 8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda n: chat(client, n=n, seed=1000 * n), (1, 3, 5, 8) * 2))
    assert together == alone * 2
