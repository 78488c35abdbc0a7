"""Separate prefill and decode engines answer like one engine: real processes, real transfers, the official client.

For every n the cell prefills once, moves the trunk once, and computes one prompt token on decode. Every pair
of values of dtype, n and route occurs in some test.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from motet.deploy.child import ChildServer, CounterSnapshot, read_block_size, read_figures
from motet.settings.server_config import environment
from tests.e2e.official_client import chat, completions, streamed_chat, streamed_completions
from tests.e2e.processes import wait_until_gone
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPTS = ["the hand in the sand", "hello and then another", "then the land and the other"]
SEED = 2**63 - 5
BACKENDS = {"float32": "nixl", "bfloat16": "shared-memory"}


@dataclass(frozen=True)
class Pair:
    """Clients of one engine, and of a cell with the same model that prefills all prompts separately and has no prefix
    cache."""

    single: OpenAI
    cell: OpenAI
    http: httpx.Client
    """Client of the cell."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.fixture(scope="module")
def cell(
    dtype: str, folder: Path, tmp_path_factory: pytest.TempPathFactory, forking: ForkingProcess
) -> Iterator[ChildServer]:
    """A cell with another transport for each dtype. After SIGTERM it must end with exit code 0 and leave nothing."""
    temporary = tmp_path_factory.mktemp("cell")
    arguments = [
        str(folder), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--dtype", dtype,
        "--max-num-seqs", "64", "--max-num-batched-tokens", "64", "--no-prefix-cache", "--threads", "1",
        "--prefill", "1", "--decode", "1", "--bypass-tokens", "0", "--kv-transfer-backend", BACKENDS[dtype],
    ]  # fmt: skip
    with forking.server(arguments, environ={**environment(), "TMPDIR": str(temporary)}) as running:
        yield running
        engines = [worker["pid"] for worker in httpx.get(f"{running.url}/status", timeout=PATIENCE_S).json()["workers"]]
        os.kill(running.pid, signal.SIGTERM)
        assert running.wait() == 0
    assert len(engines) == 2
    for pid in engines:
        wait_until_gone(pid, PATIENCE_S)
    assert list(temporary.glob("motet-*")) == []


@pytest.fixture(scope="module")
def pair(cell: ChildServer, dtype: str, one_engine: Callable[[str], ChildServer]) -> Iterator[Pair]:
    with (
        OpenAI(base_url=f"{one_engine(dtype).url}/v1", api_key="none") as single,
        OpenAI(base_url=f"{cell.url}/v1", api_key="none") as separate,
        httpx.Client(base_url=cell.url, timeout=PATIENCE_S) as http,
    ):
        yield Pair(single, separate, http)


@dataclass(frozen=True)
class CellCost:
    prefills: int
    transfers: int
    recomputed_tokens: int
    """Number of prompt tokens that decode computed."""


def work_since(pair: Pair, before: CounterSnapshot) -> CellCost:
    figures = read_figures(pair.http) - before
    return CellCost(figures.prefills, figures.kv_transfers, figures.recomputed_tokens)


CHATS = {"float32": (1, 8), "bfloat16": (3, 32)}
COMPLETIONS = {"float32": (3, 32), "bfloat16": (1, 8)}


def test_a_chat_equals_that_of_one_engine_with_one_prefill_and_one_transfer(dtype: str, pair: Pair) -> None:
    for n in CHATS[dtype]:
        expected = chat(pair.single, n=n, seed=SEED)
        assert len(set(expected)) == n
        before = read_figures(pair.http)
        assert chat(pair.cell, n=n, seed=SEED) == expected
        assert work_since(pair, before) == CellCost(prefills=1, transfers=1, recomputed_tokens=1)
        assert streamed_chat(pair.cell, n=n, seed=SEED) == expected
        assert work_since(pair, before) == CellCost(prefills=2, transfers=2, recomputed_tokens=2)


def test_completions_of_several_prompts_equal_those_of_one_engine(dtype: str, pair: Pair) -> None:
    for n in COMPLETIONS[dtype]:
        expected = completions(pair.single, PROMPTS, n=n, seed=SEED)
        before = read_figures(pair.http)
        assert completions(pair.cell, PROMPTS, n=n, seed=SEED) == expected
        assert work_since(pair, before) == CellCost(prefills=3, transfers=3, recomputed_tokens=3)
        assert streamed_completions(pair.cell, PROMPTS, n=n, seed=SEED) == expected


def test_resumed_choices_continue_in_a_cell_and_their_prompt_is_transferred_once(dtype: str, pair: Pair) -> None:
    """They are prefilled, transferred and replayed, also with allowed tokens and processed log-probabilities."""
    sampling = {"seed": 5, "max_tokens": 30, "ignore_eos": True, "logprobs": 2, "logprobs_mode": "processed_logprobs"}
    sampling |= {"allowed_token_ids": list(range(20, 150)), "temperature": 1.3, "top_p": 0.95}
    body: dict[str, object] = {"token_ids": list(range(20, 110))}

    def tokens_and_scores(http: httpx.Client, **fields: object) -> list[tuple[list[int], list[object]]]:
        answer = http.post(http.base_url.join("/inference/v1/generate"), json=body | fields)
        assert answer.status_code == 200, answer.text
        return [(choice["token_ids"], choice["logprobs"]["content"]) for choice in answer.json()["choices"]]

    with httpx.Client(base_url=str(pair.single.base_url), timeout=PATIENCE_S) as single:
        complete = tokens_and_scores(single, sampling_params=sampling | {"n": 3})
    before = read_figures(pair.http)
    started = [{"index": i, "token_ids": complete[i][0][:count]} for i, count in enumerate((0, 9, 29))]
    rest = tokens_and_scores(pair.http, sampling_params=sampling, choices=started)
    cuts = zip(complete, (0, 9, 29), strict=True)
    assert rest == [(tokens[count:], scores[count:]) for (tokens, scores), count in cuts]
    cost = work_since(pair, before)
    assert cost == CellCost(prefills=1, transfers=1, recomputed_tokens=cost.recomputed_tokens)


IDS = list(range(20, 110))
SCORED: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {"prompt": PROMPTS[1], "echo": True, "logprobs": 2, "max_tokens": 0}),
    ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 3, "prompt_logprobs_from": 70, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPTS[2]}], "prompt_logprobs": 2}),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"prompt_logprobs": 1, "max_tokens": 2}}),
    (
        "/generate",
        {"input_ids": IDS, "return_logprob": True, "logprob_start_len": 9, "sampling_params": {"max_new_tokens": 0}}
        | {"top_logprobs_num": 2, "token_ids_logprob": [5, 9]},
    ),
    ("/v1/score", {"prompt": IDS, "continuations": [[5, 6], [7]]}),
]
SCORES: tuple[str, ...] = ("prompt_logprobs", "token_logprobs", "top_logprobs", "scores")
SCORES += ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def scores_in(answer: object) -> dict[str, object]:
    """Returns the first value of each field with scores, at any place in the answer."""
    if isinstance(answer, list):
        answer = dict(enumerate(answer))
    found: dict[str, object] = {}
    for name, value in answer.items() if isinstance(answer, dict) else ():
        if name in SCORES and value:
            found.setdefault(str(name), value)
        elif isinstance(value, dict | list):
            found = scores_in(value) | found
    return found


def scores_of(http: httpx.Client, path: str, body: dict[str, object]) -> dict[str, object]:
    answer = http.post(http.base_url.join(path), json=body)
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n") if body.get("stream") else [f"data: {answer.text}"]
    return scores_in([json.loads(line[6:]) for line in lines if line.startswith("data: {")])


@pytest.mark.parametrize(("path", "body"), SCORED, ids=[path for path, _ in SCORED])
def test_scores_equal_those_of_one_engine_that_has_them_cached(path: str, body: dict[str, object], pair: Pair) -> None:
    """Each prompt is computed once, on decode."""
    with httpx.Client(base_url=str(pair.single.base_url), timeout=PATIENCE_S) as single:
        body = body | {"seed": 5} if "max_tokens" in body else body
        first, again = (scores_of(single, path, body) for _ in range(2))
        assert first == again and len(first) == {"/generate": 3}.get(path, 2 if "echo" in body else 1)
        before = read_figures(pair.http)
        for stream in (False, True)[: 1 if path == "/v1/score" else 2]:
            assert scores_of(pair.http, path, body | {"stream": stream}) == first
            assert scores_of(single, path, body | {"stream": stream}) == first
        assert work_since(pair, before) == CellCost(prefills=0, transfers=0, recomputed_tokens=0)


def test_the_transferred_bytes_are_those_of_the_prompt_for_every_n(pair: Pair) -> None:
    block = read_block_size(pair.http)
    for n in (1, 8):
        before = read_figures(pair.http)
        answer = pair.cell.completions.create(model="tiny", prompt=PROMPTS[0], n=n, max_tokens=4)
        assert answer.usage is not None
        moved = (read_figures(pair.http) - before).kv_transfer_bytes
        assert moved == block.bytes_of(answer.usage.prompt_tokens - 1) > 0
