"""The largest group that an engine runs by default: one prompt and 256 answers, through all layers."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI

from motet.deploy.child import ChildServer, read_figures
from motet.settings.server_config import environment
from tests.e2e.official_client import TOKENS, chat, streamed_chat
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

N = 256
SEED = 2**63
"""Seed of the first choice. The seeds of the choices count up from it, modulo 2**64."""


@pytest.fixture
def server(folder: Path, tmp_path: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    """A server with the default settings, except for the limit on n."""
    arguments = [str(folder), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--max-n", str(N)]
    with forking.server(arguments, environ={**environment(), "TMPDIR": str(tmp_path)}) as running:
        yield running


def test_256_choices_of_one_prompt_are_256_single_answers_and_one_prefill(server: ChildServer) -> None:
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        before = read_figures(http)
        streamed = streamed_chat(client, n=N, seed=SEED)
        work = read_figures(http) - before
        assert work.prefill_tokens == work.prompt_tokens
        assert work.forks == N - 1
        assert work.generation_tokens == N * TOKENS
        assert work.trunk_tokens_unshared == N * work.trunk_tokens_read
        assert len(set(streamed)) == N
        assert chat(client, n=N, seed=SEED) == streamed
        for i in (0, 127, 255):
            assert chat(client, n=1, seed=SEED + i) == [streamed[i]], f"choice {i}"
        with pytest.raises(BadRequestError, match="256"):
            chat(client, n=N + 1, seed=SEED)
