"""A complete rollout batch in one completions request has the answers of single requests, and does not hold up other
clients."""

from typing import Any

import pytest

from motet.merge import BATCH
from motet.types import ChoiceStart, GenerateRequest
from tests.api.serving import Served, Serving, chunks, streamed_or_not
from tests.error_response import assert_error
from tests.tiny_tokenizer import FIRST_BYTE_ID

pytestmark = pytest.mark.anyio

N = 4
PROMPTS = [[FIRST_BYTE_ID + 97 + number, *range(10, 10 + number % 7)] for number in range(2 * BATCH + 3)]
FIELDS: dict[str, object] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}


def sampled(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Returns an answer that depends on the prompt and the seed, and whose length depends on both too."""
    first = sum(request.prompt) * 31 + start.seed * 7
    return [FIRST_BYTE_ID + 97 + (first + place) % 26 for place in range(2 + first % 5)]


@pytest.fixture
async def sampling(serve: Serving) -> Served:
    return await serve(sampled, max_waiting_groups=len(PROMPTS))


def by_index(choices: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Joins the pieces of each choice: texts and arrays are concatenated; of other fields the last value is kept."""
    joined: dict[int, dict[str, Any]] = {}
    for piece in choices:
        choice = joined.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": {}})
        choice["text"] += piece["text"]
        choice["token_ids"] += piece["token_ids"]
        for name, entries in (piece["logprobs"] or {}).items():
            choice["logprobs"].setdefault(name, []).extend(entries)
        choice |= {name: piece[name] for name in ("prompt_token_ids", "finish_reason") if piece.get(name) is not None}
    return joined


@pytest.mark.slow
@streamed_or_not
async def test_a_batch_has_the_answers_of_single_requests(sampling: Served, stream: bool) -> None:
    answer = await sampling.complete(PROMPTS, n=N, seed=5, stream=stream, **FIELDS)
    pieces = chunks(answer) if stream else [answer.json()]
    batch = by_index([choice for piece in pieces for choice in piece["choices"]])
    assert [*batch] == [*range(len(PROMPTS) * N)] or stream
    for number, prompt in enumerate(PROMPTS):
        for place in range(N):
            single = (await sampling.complete(prompt, seed=5 + place, **FIELDS)).json()["choices"]
            assert batch[number * N + place] == by_index(single)[0]
            assert len(batch[number * N + place]["token_ids"]) == 6


@pytest.mark.parametrize(
    ("limits", "flag"), [({"max_choices": 100}, "--max-choices"), ({"max_waiting_groups": 20}, "--max-waiting-groups")]
)
async def test_a_batch_above_a_limit_is_refused_with_the_setting(
    serve: Serving, limits: dict[str, Any], flag: str
) -> None:
    served = await serve(**limits)
    refused = await served.complete(PROMPTS, n=N)
    assert_error(refused, status=400, param="prompt")
    assert flag in refused.json()["error"]["message"]
