"""Requests of trainers with token ids, to a real server: interrupted rollouts, allowed tokens, rendered chats."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from motet.deploy.child import ChildServer
from tests.e2e.official_client import MESSAGES, TOKENS
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 90))
SEED = 77
CUTS = (0, 1, 17, TOKENS - 1)
"""Number of output tokens of each choice when it was interrupted."""


@pytest.fixture(scope="module")
def client(one_engine: Callable[[str], ChildServer]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=one_engine("bfloat16").url, timeout=PATIENCE_S) as http:
        yield http


def generate(client: httpx.Client, sampling: dict[str, object], **fields: object) -> list[dict[str, Any]]:
    """Returns the choices in order of their index."""
    sampling = {"seed": SEED, "max_tokens": TOKENS, "logprobs": 3, "ignore_eos": True} | sampling
    answer = client.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": sampling, **fields})
    assert answer.status_code == 200, answer.text
    return sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs_mode": "processed_logprobs"},
        {"allowed_token_ids": list(range(30, 120)), "min_tokens": TOKENS, "stop": ["and"]},
        {"structured_outputs": {"regex": "[a-z ]{200}"}},
    ],
    ids=["plain", "greedy", "penalised", "allowed", "grammar"],
)
def test_interrupted_choices_generate_the_tokens_of_undisturbed_ones(
    client: httpx.Client, sampling: dict[str, object]
) -> None:
    complete = generate(client, {**sampling, "n": len(CUTS)})
    assert [len(choice["token_ids"]) for choice in complete] == [TOKENS] * len(CUTS)
    started = [{"index": i, "token_ids": complete[i]["token_ids"][:count]} for i, count in enumerate(CUTS)]
    expected = [
        {
            **choice,
            "token_ids": choice["token_ids"][count:],
            "logprobs": {"content": choice["logprobs"]["content"][count:]},
            "weight_versions": [{"version": "0", "start": 0, "end": TOKENS - count}],
        }
        for choice, count in zip(complete, CUTS, strict=True)
    ]
    assert generate(client, sampling, choices=started) == expected
    assert generate(client, sampling, choices=started[2:]) == expected[2:]


def test_a_group_with_allowed_tokens_equals_single_requests_with_them(client: httpx.Client) -> None:
    allowed = {"allowed_token_ids": [25, 40, 41, 77, 130], "temperature": 1.5}
    complete = generate(client, {**allowed, "n": 5})
    assert {token for choice in complete for token in choice["token_ids"]} == set(allowed["allowed_token_ids"])  # type: ignore[call-overload]
    for i, choice in enumerate(complete):
        (single,) = generate(client, {**allowed, "seed": SEED + i})
        assert {**single, "index": i} == choice


def test_the_sampled_token_has_a_possible_processed_log_probability(client: httpx.Client) -> None:
    processed = {"top_k": 3, "temperature": 0.5, "logprobs_mode": "processed_logprobs", "logprobs": 5}
    for choice in generate(client, {**processed, "n": 4}):
        for entry in choice["logprobs"]["content"]:
            assert -50 < entry["logprob"] <= 0
            listed = [top["logprob"] for top in entry["top_logprobs"]]
            assert listed[3:] == [-9999.0] * 2 and min(listed[:3]) > -9999.0


def test_a_rendered_chat_has_the_tokens_of_the_chat(client: httpx.Client) -> None:
    chat = {"messages": MESSAGES, "n": 3, "seed": SEED, "max_tokens": 12, "ignore_eos": True}
    body = client.post("/v1/chat/completions/render", json=chat).json()
    answer = client.post("/v1/chat/completions", json={**chat, "return_token_ids": True}).json()
    assert body["token_ids"] == answer["prompt_token_ids"]
    choices = client.post("/inference/v1/generate", json=body).json()["choices"]
    assert [one["token_ids"] for one in choices] == [one["token_ids"] for one in answer["choices"]]
