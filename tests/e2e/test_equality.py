"""Equality through the complete stack: real server, real sockets, the official client.

Choice i of a group with seed s is the single request with seed s + i, text for text, streamed or not, whatever else the
server does at the same time.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from openai import OpenAI

from motet.deploy.child import ChildServer
from tests.e2e.official_client import MESSAGES, chat, completions, streamed_chat

pytestmark = pytest.mark.slow

PROMPTS = ["the hand in the sand", "hello and then another"]
SEED = 2**62
WORDS = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 2, "maxItems": 3}
    },
    "required": ["words"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def client(request: pytest.FixtureRequest, one_engine: Callable[[str], ChildServer]) -> Iterator[OpenAI]:
    """A client of a server in float32, then of one in bfloat16."""
    with OpenAI(base_url=f"{one_engine(request.param).url}/v1", api_key="none") as openai:
        yield openai


def test_n_answers_have_their_indices_and_their_prompt_is_counted_once(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], n=4, max_tokens=8, seed=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    one = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=1)
    assert one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens == 18  # with the tokens that the template adds


@pytest.mark.parametrize("n", [1, 7, 32])
def test_a_chat_of_n_equals_n_single_chats(client: OpenAI, n: int) -> None:
    complete = chat(client, n=n, seed=SEED)
    assert streamed_chat(client, n=n, seed=SEED) == complete
    assert len(set(complete)) == n
    for i in sorted({0, n // 2, n - 1}):
        assert chat(client, n=1, seed=SEED + i) == [complete[i]], f"choice {i}"


def test_a_chat_of_n_with_a_schema_is_n_single_chats_with_it_and_each_follows_it(client: OpenAI) -> None:
    form = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "words", "schema": WORDS, "strict": True}}
    }
    complete = chat(client, n=8, seed=SEED, tokens=120, **form)
    assert streamed_chat(client, n=8, seed=SEED, tokens=120, **form) == complete
    assert [chat(client, n=1, seed=SEED + i, tokens=120, **form) for i in range(8)] == [[text] for text in complete]
    assert len(set(complete)) == 8
    for text in complete:
        jsonschema.validate(json.loads(text), WORDS)


@pytest.mark.parametrize(
    "group",
    [{"stop_when": {"finished": 3}}, {"start": 3}, {"start": 4, "refill": "all", "deterministic": True}],
    ids=str,
)
def test_the_output_of_a_steered_group_is_the_start_of_the_undisturbed_output(
    client: OpenAI, group: dict[str, object]
) -> None:
    ends = {"stop_token_ids": [40, 80, 120, 160, 200], "return_token_ids": True}
    complete = tokens_of(client, **ends)
    steered = tokens_of(client, **ends, group=group)
    assert list(steered) == list(complete)
    for index, (tokens, finish) in steered.items():
        assert tokens == complete[index][0][: len(tokens)]
        assert finish == "abort" or (tokens, finish) == complete[index]
    finished = sum(finish != "abort" for _, finish in steered.values())
    assert 3 <= finished < 8 if "stop_when" in group else finished == 8


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "logprob_token_ids": [5, 6]},
        {"logit_bias": {"5": 0}, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0, "stop": [], "stop_token_ids": []},
        {"stop": ["no answer contains this"], "include_stop_str_in_output": True, "skip_special_tokens": False},
    ],
    ids=lambda more: next(reversed(more)),
)
def test_what_a_request_reports_and_neutral_values_change_no_token(client: OpenAI, more: dict[str, object]) -> None:
    reported = {"return_token_ids": True, "ignore_eos": True}
    assert tokens_of(client, **reported, **more) == tokens_of(client, **reported)


def tokens_of(client: OpenAI, **more: object) -> dict[int, tuple[list[int], str]]:
    """Returns the tokens and the end of each of eight choices."""
    answer = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        n=8,
        seed=SEED,
        max_tokens=120,
        extra_body={"ignore_eos": True} | more,
    )
    return {choice.index: ((choice.model_extra or {})["token_ids"], choice.finish_reason) for choice in answer.choices}


def test_completions_of_several_prompts_equal_single_ones_in_order(client: OpenAI) -> None:
    complete = completions(client, PROMPTS, n=3, seed=5)
    singles = [completions(client, [prompt], n=1, seed=5 + i)[0] for prompt in PROMPTS for i in range(3)]
    assert complete == singles


def test_concurrent_requests_equal_requests_one_by_one(client: OpenAI) -> None:
    alone = [chat(client, n=n, seed=1000 * n) for n in (1, 3, 5, 8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda n: chat(client, n=n, seed=1000 * n), (1, 3, 5, 8) * 2))
    assert together == alone * 2
