"""Prefill and decode apart answer as one engine does: real processes, real transfers, the official client.

For every n the cell prefills once, moves the trunk once, and computes one prompt token on decode.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from motet.config import environment
from motet.deploy.child import ChildServer
from motet.deploy.figures import Figures, read_block_size, read_figures
from tests.e2e.asking import chat, completions, streamed_chat, streamed_completions

pytestmark = pytest.mark.slow

PROMPTS = ["the hand in the sand", "hello and then another", "then the land and the other"]
SEED = 2**63 - 5


@dataclass(frozen=True)
class Served:
    openai: OpenAI
    http: httpx.Client


@dataclass(frozen=True)
class Pair:
    """The same model as one engine and as a cell that always prefills apart, without a prefix cache."""

    single: Served
    cell: Served


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    environ = {**environment(), "TMPDIR": str(tmp_path_factory.mktemp("servers"))}
    arguments = [
        str(model), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--dtype", request.param,
        "--max-num-seqs", "64", "--max-num-batched-tokens", "64", "--no-prefix-cache", "--threads", "1",
    ]  # fmt: skip
    with ExitStack() as stack:

        def serve(*more: str) -> Served:
            url = stack.enter_context(ChildServer([*arguments, *more], environ=environ)).url
            openai = stack.enter_context(OpenAI(base_url=f"{url}/v1", api_key="none"))
            return Served(openai, stack.enter_context(httpx.Client(base_url=url)))

        yield Pair(serve(), serve("--prefill", "1", "--decode", "1", "--bypass-tokens", "0"))


def spent(served: Served, before: Figures) -> tuple[int, int, int]:
    """Prefills, transfers, prompt tokens computed on decode."""
    figures = read_figures(served.http) - before
    return figures.prefills, figures.kv_transfers, figures.recomputed_tokens


@pytest.mark.parametrize("n", [1, 3, 8, 32])
def test_a_chat_is_the_chat_of_one_engine_for_one_prefill_and_one_transfer(pair: Pair, n: int) -> None:
    expected = chat(pair.single.openai, n=n, seed=SEED)
    assert len(set(expected)) == n
    before = read_figures(pair.cell.http)
    assert chat(pair.cell.openai, n=n, seed=SEED) == expected
    assert spent(pair.cell, before) == (1, 1, 1)
    assert streamed_chat(pair.cell.openai, n=n, seed=SEED) == expected
    assert spent(pair.cell, before) == (2, 2, 2)


@pytest.mark.parametrize("n", [1, 3, 8, 32])
def test_completions_of_several_prompts_are_those_of_one_engine(pair: Pair, n: int) -> None:
    expected = completions(pair.single.openai, PROMPTS, n=n, seed=SEED)
    before = read_figures(pair.cell.http)
    assert completions(pair.cell.openai, PROMPTS, n=n, seed=SEED) == expected
    assert spent(pair.cell, before) == (3, 3, 3)
    assert streamed_completions(pair.cell.openai, PROMPTS, n=n, seed=SEED) == expected


def test_the_bytes_moved_are_the_prompt_s_whatever_n_is(pair: Pair) -> None:
    block = read_block_size(pair.cell.http)
    for n in (1, 8):
        before = read_figures(pair.cell.http)
        answer = pair.cell.openai.completions.create(model="tiny", prompt=PROMPTS[0], n=n, max_tokens=4)
        assert answer.usage is not None
        moved = (read_figures(pair.cell.http) - before).kv_transfer_bytes
        assert moved == block.bytes_of(answer.usage.prompt_tokens - 1) > 0
