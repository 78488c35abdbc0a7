"""A group as large as an engine may run: one prompt and 256 answers, through every layer."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import BadRequestError, OpenAI

from motet.deploy.child import ChildServer, read_figures
from motet.settings.server_config import environment
from tests.e2e.asking import TOKENS, chat, streamed_chat
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

N = 256
SEED = 2**63
"""The choices of a group have this seed and the next ones, modulo 2**64."""


@pytest.fixture
def server(folder: Path, tmp_path: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    """All settings have their defaults, except the limit on n."""
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
        spent = read_figures(http) - before
        assert spent.prefill_tokens == spent.prompt_tokens
        assert spent.forks == N - 1
        assert spent.generation_tokens == N * TOKENS
        assert spent.trunk_tokens_unshared == N * spent.trunk_tokens_read
        assert len(set(streamed)) == N
        assert chat(client, n=N, seed=SEED) == streamed
        for i in (0, 127, 255):
            assert chat(client, n=1, seed=SEED + i) == [streamed[i]], f"choice {i}"
        with pytest.raises(BadRequestError, match="256"):
            chat(client, n=N + 1, seed=SEED)
