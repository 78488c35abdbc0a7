"""`/inference/v1/generate`: token ids in, token ids out, in vLLM's shapes."""

from collections import defaultdict
from typing import Any

import httpx
import pytest

from tests.api.serving import SEED, Served, Serving, chunks, saying
from tests.tiny_tokenizer import EOS_ID, fake_answer

pytestmark = pytest.mark.anyio


async def generate(served: Served, sampling: dict[str, object], **fields: object) -> httpx.Response:
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, **fields}
    return await served.http.post("/inference/v1/generate", json=body)


async def test_token_ids_go_in_and_out(served: Served) -> None:
    response = await generate(served, {"n": 2}, request_id="mine")
    assert response.status_code == 200
    assert response.json() == {
        "request_id": "mine",
        "choices": [
            {"index": 0, "logprobs": None, "finish_reason": "stop", "token_ids": fake_answer("hello 0")},
            {"index": 1, "logprobs": None, "finish_reason": "stop", "token_ids": fake_answer("hello 1")},
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2 * len(fake_answer("hello 0")),
            "total_tokens": 3 + 2 * len(fake_answer("hello 0")),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    (request,) = served.engine.requests
    assert request.prompt == (5, 6, 7)
    assert [choice.seed for choice in request.choices] == [SEED, SEED + 1]
    assert request.sampling.max_tokens == served.engine.info.max_model_len - 3


async def test_stream_has_one_choice_a_chunk_and_joins_to_the_whole(served: Served) -> None:
    received = chunks(await generate(served, {"n": 2}, request_id="mine", stream=True))
    ids: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, list[str | None]] = defaultdict(list)
    for chunk in received:
        assert chunk["request_id"] == "mine"
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        ids[choice["index"]].extend(choice["token_ids"])
        reasons[choice["index"]].append(choice["finish_reason"])
    assert ids == {0: fake_answer("hello 0"), 1: fake_answer("hello 1")}
    assert all(r[-1] == "stop" and set(r[:-1]) == {None} for r in reasons.values())


async def test_stream_gives_usage_at_the_end_when_asked_for(served: Served) -> None:
    *_, last = chunks(await generate(served, {}, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3


async def test_logprobs_name_tokens_by_id(serve: Serving) -> None:
    served = await serve(saying("a"))
    body = (await generate(served, {"logprobs": 1, "max_tokens": 1})).json()
    token = fake_answer("a")[0]
    entry = {"token": f"token_id:{token}", "logprob": -0.5, "bytes": None}
    assert body["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}]}


async def test_prompt_logprobs_are_vllms(served: Served) -> None:
    body: dict[str, Any] = (await generate(served, {"prompt_logprobs": 0})).json()
    text = served.tokenizer.token_text
    assert body["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -1.0, "rank": 1, "decoded_token": text(6)}},
        {"7": {"logprob": -2.0, "rank": 1, "decoded_token": text(7)}},
    ]


async def test_sampling_params_reach_the_engine(served: Served) -> None:
    await generate(served, {"seed": 3, "temperature": 0.0, "max_tokens": 2, "detokenize": False}, cache_salt="s")
    (request,) = served.engine.requests
    assert request.choices[0].seed == 3
    assert request.sampling.greedy
    assert request.sampling.max_tokens == 2
    assert request.cache_salt == "s"


@pytest.mark.parametrize(
    ("sampling", "fields", "param"),
    [
        ({"n": 129}, {}, "sampling_params.n"),
        ({"n": "1"}, {}, "sampling_params.n"),
        ({"temperature": 3}, {}, "sampling_params.temperature"),
        ({"unheard_of": 1}, {}, "sampling_params.unheard_of"),
        ({"stop_token_ids": [9999]}, {}, "sampling_params.stop_token_ids"),
        ({"structured_outputs": {}}, {}, "structured_outputs"),
        ({}, {"features": {}}, "features"),
        ({}, {"token_ids": []}, "token_ids"),
        ({}, {"token_ids": [9999]}, "token_ids"),
        ({}, {"token_ids": "x"}, "token_ids"),
        ({}, {"sampling_params": None}, "sampling_params"),
    ],
)
async def test_what_is_refused_is_named(
    served: Served, sampling: dict[str, object], fields: dict[str, object], param: str
) -> None:
    response = await generate(served, sampling, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_end_of_sequence_is_among_the_token_ids(served: Served) -> None:
    body = (await generate(served, {})).json()
    assert body["choices"][0]["token_ids"][-1] == EOS_ID
