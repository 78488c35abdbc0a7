"""Real vLLM servers with a gateway, for prefill and decode together and separately, in both dialects."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from bench.servers.vllm import MODEL_NAME
from motet.deploy.child import ChildServer
from tests.fault.answers import Answer, Body
from tests.patience import PATIENCE_S
from tests.real.answers import check, request, streaming
from tests.real.vllm_servers import BYTES, SUSPECT, TRANSFERS, RealVLLM, gateway, until

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(400)]

TOKENS = 8
LONG = " ".join(f"In year {year} the harbour had {year % 7} ships and {year % 11} boats." for year in range(1900, 1918))
GREEDY = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
ROUTES = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True)
class Cell:
    """A gateway with its prefill server and its decode server, which can be the same server."""

    gateway: ChildServer
    prefill: RealVLLM
    decode: RealVLLM

    @property
    def is_separate(self) -> bool:
        return self.prefill is not self.decode

    def answer(self, route: str, prompt: str, **fields: object) -> Answer:
        return request(self.gateway.url, route, body_of(route, prompt, **fields))


def new_prompt() -> str:
    """Returns a prompt that is in no cache."""
    return f"{uuid4()}. {LONG}"


def body_of(route: str, prompt: str, **fields: object) -> Body:
    messages = [{"role": "user", "content": prompt}]
    prompt_field: Body = {"prompt": prompt} if route == ROUTES[0] else {"messages": messages}
    options: Body = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    return {"model": MODEL_NAME, **prompt_field, **options, **fields}


@pytest.fixture(scope="module", params=["together", "completions", "generate"])
def cell(
    request: pytest.FixtureRequest,
    pair: tuple[RealVLLM, RealVLLM],
    weights: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cell]:
    plain, scale_out = pair
    prefill, decode = {"together": (plain, plain), "completions": (scale_out, plain), "generate": (plain, scale_out)}[
        request.param
    ]
    workers = (
        ["--worker", decode.url]
        if prefill is decode
        else ["--worker", f"{prefill.url},prefill", "--worker", f"{decode.url},decode"]
    )
    with ExitStack() as stack:
        server = stack.enter_context(gateway(weights, tmp_path_factory.mktemp("gateway"), *workers))
        yield Cell(server, prefill, decode)
        for one in pair:
            until(lambda one=one: one.holds_nothing, f"{one.url} still holds blocks")  # type: ignore[misc]
            assert SUSPECT not in one.log


@pytest.mark.parametrize(
    ("n", "route", "stream"), [(1, ROUTES[0], False), (3, ROUTES[1], True), (8, ROUTES[0], True), (8, ROUTES[1], False)]
)
def test_n_choices_are_sent_finished_and_counted_once_with_one_transfer(
    cell: Cell, n: int, route: str, stream: bool
) -> None:
    transfers = cell.decode.metric(TRANSFERS)
    answer = cell.answer(route, new_prompt(), n=n, stream=stream, **GREEDY)
    check(answer, n=n, tokens=TOKENS)
    assert len(set(answer.texts)) == 1
    if cell.is_separate:
        until(lambda: cell.decode.metric(TRANSFERS) == transfers + 1, "the prompt's KV was not transferred once")
        assert cell.decode.metric(BYTES) > 0


def test_greedy_choices_equal_vllm_s_own_answer(cell: Cell) -> None:
    (expected,) = choices_of(cell.decode.answer(prompt=LONG, **GREEDY))
    assert cell.answer(ROUTES[0], LONG, n=8, **GREEDY).texts == [expected] * 8


def test_choice_i_of_a_seeded_group_is_vllm_s_answer_to_that_seed_plus_i(cell: Cell) -> None:
    """The answers are short: in bf16 the rest of a batch can decide between tokens of almost equal probability."""
    seeded = {"max_tokens": 2, "temperature": 1.0, "ignore_eos": True}
    expected = [choices_of(cell.decode.answer(prompt=LONG, seed=40 + i, **seeded))[0] for i in range(3)]
    assert cell.answer(ROUTES[0], LONG, n=3, seed=40, **seeded).texts == expected


def test_unseeded_choices_differ_and_their_prompt_is_transferred_once(cell: Cell) -> None:
    transfers, computed = cell.decode.metric(TRANSFERS), cell.decode.local("local_compute")
    answer = cell.answer(ROUTES[0], new_prompt(), n=8, max_tokens=16, ignore_eos=True, stream=True)
    check(answer, n=8, tokens=16)
    assert len(set(answer.texts)) > 1
    if cell.is_separate:
        until(lambda: cell.decode.metric(TRANSFERS) == transfers + 1, "the prompt's KV was not transferred once")
        recomputed = cell.decode.local("local_compute") - computed
        assert recomputed < 8 * 128, "siblings compute less than a block each"


def test_allowed_and_named_tokens_equal_vllm_s_own(cell: Cell) -> None:
    """The two routes list log-probabilities differently; the gateway's list is the same for both."""
    allowed, named = [260, 28, 378, 1], [28, 1, 5]
    sampling = {"temperature": 0, "max_tokens": 3, "allowed_token_ids": allowed, "ignore_eos": True}
    fields = {"logprobs": 1, "logprob_token_ids": named, "return_tokens_as_token_ids": True}
    (expected,) = logprobs_of(cell.decode.answer(prompt=LONG, **sampling, **fields))
    body = body_of(ROUTES[0], LONG, **sampling, **fields, n=2)
    answer = httpx.post(f"{cell.gateway.url}{ROUTES[0]}", json=body, timeout=PATIENCE_S).json()
    sampled = [int(token.removeprefix("token_id:")) for token in expected["tokens"]]
    assert set(sampled) <= set(allowed)
    for logprobs in logprobs_of(answer):
        assert logprobs["tokens"] == expected["tokens"]
        for top, expected_top, token in zip(logprobs["top_logprobs"], expected["top_logprobs"], sampled, strict=True):
            assert list(top) == [f"token_id:{one}" for one in dict.fromkeys((token, *named))]
            assert top == pytest.approx(expected_top, abs=0.1)


def test_a_client_that_leaves_at_any_point_leaves_nothing(cell: Cell) -> None:
    for num_chunks in (0, 1, 5):
        body = body_of(ROUTES[0], new_prompt(), n=3, max_tokens=500, ignore_eos=True, stream=True)
        with streaming(cell.gateway.url, ROUTES[0], body) as stream:
            while stream.reader.chunks < num_chunks:
                stream.reader.line(next(stream.lines))
    for one in (cell.prefill, cell.decode):
        until(lambda one=one: one.holds_nothing, f"{one.url} still holds blocks")  # type: ignore[misc]


def logprobs_of(answer: dict[str, object]) -> list[dict[str, Any]]:
    assert isinstance(answer["choices"], list)
    return [choice["logprobs"] for choice in answer["choices"]]


def choices_of(answer: dict[str, object]) -> list[str]:
    assert isinstance(answer["choices"], list)
    return [choice["text"] for choice in answer["choices"]]
