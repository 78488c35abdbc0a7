"""Log-probabilities of prompts in streams, and from a token on."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.api.serving import ROUTES, Served, chunks, every_route
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


def scoring(path: str, **fields: object) -> dict[str, Any]:
    """Returns a body for two choices with log-probabilities of the prompt."""
    scored = {"n": 2, "prompt_logprobs": 1, **fields}
    body = dict(ROUTES[path])
    if path == "/inference/v1/generate":
        return {**body, "sampling_params": scored}
    return {**body, **scored}


def found_in(body: Mapping[str, Any]) -> list[Any]:
    """Returns the log-probabilities of the prompt in an answer or a chunk, and in its choices."""
    return [owner["prompt_logprobs"] for owner in (body, *body["choices"]) if "prompt_logprobs" in owner]


@every_route
@pytest.mark.parametrize("start", [0, 2, 1000])
async def test_a_stream_starts_with_the_log_probabilities_of_the_prompt(served: Served, path: str, start: int) -> None:
    """These fields were refused in a stream."""
    body = scoring(path, prompt_logprobs_from=start)
    answer = (await served.http.post(path, json=body)).json()
    prompt = served.engine.requests[-1].prompt
    listed = found_in(answer)
    assert len(listed) == (2 if path == "/v1/completions" else 1)
    expected = [None, *({str(token): -float(place)} for place, token in enumerate(prompt[1:], 1))][start:]
    for own in listed:
        assert [one and {token: entry["logprob"] for token, entry in one.items()} for one in own] == expected
    streamed = chunks(await served.http.post(path, json={**body, "stream": True}))
    holding = [number for number, chunk in enumerate(streamed) if found_in(chunk)]
    assert [own for chunk in streamed for own in found_in(chunk)] == listed
    assert holding == [*range(len(listed))]


async def test_echo_and_the_log_probabilities_of_the_prompt_are_in_one_chunk_of_each_choice(served: Served) -> None:
    fields = {"echo": True, "logprobs": 0, "prompt_logprobs": 0, "prompt_logprobs_from": 1, "return_token_ids": True}
    first, *others = chunks(await served.complete("xyz", **fields, stream=True))
    (choice,) = first["choices"]
    assert (choice["text"], len(choice["logprobs"]["tokens"]), len(choice["prompt_logprobs"])) == ("xyz", 3, 2)
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([], [*served.engine.requests[-1].prompt])
    assert not any("prompt_token_ids" in other for chunk in others for other in chunk["choices"])


@every_route
async def test_a_start_without_log_probabilities_of_the_prompt_is_refused(served: Served, path: str) -> None:
    param = "sampling_params.prompt_logprobs_from" if path == "/inference/v1/generate" else "prompt_logprobs_from"
    for fields in ({"prompt_logprobs": None, "prompt_logprobs_from": 1}, {"prompt_logprobs_from": -1}):
        assert_error(await served.http.post(path, json=scoring(path, **fields)), status=400, param=param)


@every_route
async def test_streams_have_fewer_log_probabilities_of_prompts(served: Served, path: str) -> None:
    """Their first chunks are made in one piece."""
    long = {"/v1/chat/completions": {"messages": [{"role": "user", "content": "x" * 3900}]}}
    ids = {"token_ids" if path == "/inference/v1/generate" else "prompt": [5] * 3900}
    body = {**scoring(path, prompt_logprobs=20, max_tokens=1, n=1), **long.get(path, ids)}
    assert (await served.http.post(path, json={**body, "stream": True})).status_code == 200
    if path == "/v1/completions":
        body |= {"n": 3}
        assert_error(await served.http.post(path, json={**body, "stream": True}), status=400, param="prompt")


async def test_a_rendered_request_has_the_start_of_the_log_probabilities(served: Served) -> None:
    body = scoring("/v1/chat/completions", prompt_logprobs_from=3)
    rendered = (await served.http.post("/v1/chat/completions/render", json=body)).json()
    assert rendered["sampling_params"]["prompt_logprobs_from"] == 3
    answers = [
        (await served.http.post(path, json=sent)).json()
        for path, sent in (("/v1/chat/completions", body), ("/inference/v1/generate", rendered))
    ]
    assert answers[0]["prompt_logprobs"] == answers[1]["prompt_logprobs"]
