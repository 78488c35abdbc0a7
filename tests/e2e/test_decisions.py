"""Two hundred decisions about one input of 4,000 tokens: the input is computed once, and the probabilities equal the
values of transformers in float32, whatever else is in the batch or in the cache. Separate prefill and decode engines
return the same."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.deploy.child import ChildServer, read_figures
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
INPUT = " ".join(f"{number} and the hand" for number in range(420))
QUESTIONS: list[Any] = [
    *({"type": "predicate", "name": str(number), "instructions": f"the {number}"} for number in range(198)),
    {"type": "choice", "instructions": "then?", "choices": [{"value": "the"}, {"value": "then"}, {"value": "an"}]},
    {"type": "score", "instructions": "in", "levels": [{"label": "a"}, {"label": "an"}, {"label": "and"}]},
]


def flags(folder: Path) -> list[str]:
    return [str(folder), *TINY, "--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "512"]


@pytest.fixture(scope="module")
def single(long_folder: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    with forking.server(flags(long_folder)) as running:
        yield running


@pytest.fixture(scope="module")
def cell(long_folder: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    """A cell that prefills all prompts separately and has no prefix cache."""
    separate = ["--prefill", "1", "--decode", "1", "--bypass-tokens", "0", "--no-prefix-cache"]
    with forking.server([*flags(long_folder), *separate, "--kv-transfer-backend", "shared-memory"]) as running:
        yield running


def decide(server: ChildServer, *questions: object, **fields: object) -> dict[str, Any]:
    body = {"input": INPUT, "questions": questions, **fields}
    response = httpx.post(f"{server.url}/v1/decisions", json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def computed_tokens(server: ChildServer) -> int:
    with httpx.Client(base_url=server.url) as http:
        return read_figures(http).prefill_tokens


def test_an_input_is_computed_once_and_answers_do_not_depend_on_the_batch(single: ChildServer) -> None:
    before = computed_tokens(single)
    first = decide(single, *QUESTIONS, return_token_ids=True)
    computed = computed_tokens(single) - before
    prompts = [answer["prompt_token_ids"] for answer in first["answers"]]
    num_input = next(place for place, tokens in enumerate(zip(*prompts, strict=False)) if len({*tokens}) > 1)
    assert num_input >= 4000
    own = [len(prompt) - num_input for prompt in prompts]
    usage = first["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert usage["input_tokens"] - cached == computed
    assert computed <= num_input + sum(own) + BLOCK_SIZE * len(prompts)
    again = decide(single, *QUESTIONS, return_token_ids=True)
    assert again["answers"] == first["answers"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= usage["input_tokens"] - 17 * len(prompts)
    (alone,) = decide(single, QUESTIONS[7], cache_salt="other")["answers"]
    assert alone["probability"] == first["answers"][7]["probability"]


def test_probabilities_equal_those_of_transformers(single: ChildServer, long_folder: Path) -> None:
    from tests.tiny_models import Reference

    reference = Reference(long_folder)
    answers = decide(single, *QUESTIONS[-3:], input=INPUT[:600], return_token_ids=True)["answers"]
    for answer in answers:
        prompt, texts = answer["prompt_token_ids"], answer["answer_token_ids"]
        sums = []
        for tokens in texts:
            logprobs = reference.logits(prompt + tokens)[len(prompt) - 1 :].log_softmax(-1)
            begins = any(other != tokens and other[: len(tokens)] == tokens for other in texts)
            ended = float(logprobs[-1, reference.model.config.eos_token_id]) if begins else 0.0
            sums.append(sum(float(logprobs[place, token]) for place, token in enumerate(tokens)) + ended)
        weights = [math.exp(value) for value in sums]
        expected = [weight / sum(weights) for weight in weights]
        if answer["type"] == "predicate":
            assert answer["probability"] == pytest.approx(expected[0], abs=1e-5)
            continue
        assert [one["probability"] for one in answer["probabilities"]] == pytest.approx(expected, abs=1e-5)
        assert answer["confidence"] == pytest.approx(max(weights), rel=1e-3)
    assert answers[-1]["score"] == pytest.approx(sum(number * value for number, value in enumerate(expected)), abs=1e-5)


def test_separate_prefill_and_decode_give_the_same_answers(single: ChildServer, cell: ChildServer) -> None:
    few = QUESTIONS[-5:]
    assert decide(cell, *few)["answers"] == decide(single, *few)["answers"]
