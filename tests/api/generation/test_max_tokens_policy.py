"""A maximum number of tokens that does not fit into the model: refused, or reduced (`--max-tokens-policy cap`)."""

from typing import Any

import httpx
import pytest

from motet.api.generation.plan import CAPPED_HEADER
from motet.text.choice import CAPPED
from motet.types import FinishReason
from tests.api.serving import PROMPT, Served, Serving, chunks, saying
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

LARGE = 65_536
LENGTH = 4096
"""Length of the fake model."""
TURN = {"role": "user", "content": "hi"}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [TURN], "max_tokens": LARGE}),
    "chat, new name": ("/v1/chat/completions", {"messages": [TURN], "max_completion_tokens": LARGE}),
    "completions": ("/v1/completions", {"prompt": PROMPT, "max_tokens": LARGE}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": LARGE}),
    "messages": ("/v1/messages", {"messages": [TURN], "max_tokens": LARGE}),
    "generate": ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": LARGE}}),
    "SGLang": ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LARGE}}),
    "render": ("/v1/chat/completions/render", {"messages": [TURN], "max_tokens": LARGE}),
    "render, completions": ("/v1/completions/render", {"prompt": PROMPT, "max_tokens": LARGE}),
}
every_body = pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=list(BODIES))


@every_body
async def test_a_maximum_that_does_not_fit_is_refused(refusing: Served, path: str, body: dict[str, Any]) -> None:
    refused = await refusing.http.post(path, json=body)
    assert refused.status_code == 400
    assert str(LARGE) in refused.json()["error"]["message"]


@every_body
async def test_it_is_reduced_to_what_fits(serve: Serving, path: str, body: dict[str, Any]) -> None:
    served = await serve(max_tokens_policy="cap")
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if "render" in path:
        rendered = answer.json()
        (first,) = rendered if isinstance(rendered, list) else [rendered]
        maximum, length = first["sampling_params"]["max_tokens"], len(first["token_ids"])
    else:
        (request,) = served.engine.requests
        maximum, length = request.sampling.max_tokens, len(request.prompt)
    assert maximum + length == LENGTH
    assert answer.headers[CAPPED_HEADER] == str(maximum)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_capped_answer_ends_with_length_and_says_so(serve: Serving, stream: bool) -> None:
    served = await serve(saying("hello", "hello, this is longer"), max_tokens_policy="cap")
    prompt = [5] * (LENGTH - 8)
    answer = await served.complete(prompt, max_tokens=9, n=2, stream=stream)
    assert answer.headers[CAPPED_HEADER] == "8"
    ends = {choice["index"]: choice for choice in _choices(answer, stream) if choice["finish_reason"] is not None}
    assert (ends[0]["finish_reason"], ends[0]["stop_reason"]) == (FinishReason.STOP, None)
    assert (ends[1]["finish_reason"], ends[1]["stop_reason"]) == (FinishReason.LENGTH, CAPPED)
    answer = await served.complete(prompt, max_tokens=8, n=2, stream=stream)
    assert CAPPED_HEADER not in answer.headers
    ends = {choice["index"]: choice for choice in _choices(answer, stream) if choice["finish_reason"] is not None}
    assert (ends[1]["finish_reason"], ends[1]["stop_reason"]) == (FinishReason.LENGTH, None)


def _choices(answer: httpx.Response, stream: bool) -> list[dict[str, Any]]:
    bodies = chunks(answer) if stream else [answer.json()]
    return [choice for body in bodies for choice in body["choices"]]


@pytest.mark.slow
async def test_other_dialects_end_as_at_any_maximum(serve: Serving) -> None:
    served = await serve(saying("x" * LENGTH), max_tokens_policy="cap")
    message = (await served.http.post("/v1/messages", json=BODIES["messages"][1])).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    response = (await served.http.post("/v1/responses", json=BODIES["responses"][1])).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    tokens = (await served.http.post("/generate", json=BODIES["SGLang"][1])).json()["meta_info"]
    assert tokens["finish_reason"] == {"type": "length", "length": LENGTH - len(PROMPT)}


async def test_each_prompt_has_its_own_maximum(serve: Serving) -> None:
    served = await serve(saying("x" * 20), max_tokens_policy="cap")
    prompts = [[5] * (LENGTH - 4), [5] * (LENGTH - 10), [5] * (LENGTH - 2)]
    answer = await served.complete(prompts, max_tokens=10)
    assert answer.headers[CAPPED_HEADER] == "2"
    assert [choice["stop_reason"] for choice in answer.json()["choices"]] == [CAPPED, None, CAPPED]
    assert [request.sampling.max_tokens for request in served.engine.requests] == [4, 10, 2]


async def test_more_choices_of_a_capped_prompt_say_so_too(serve: Serving) -> None:
    served = await serve(saying("x" * 20), max_tokens_policy="cap")
    first = await served.complete([5] * (LENGTH - 4), max_tokens=10, keep_s=60)
    more = await served.http.post(f"/v1/groups/{first.json()['id']}/more", json={"n": 1})
    assert more.headers[CAPPED_HEADER] == first.headers[CAPPED_HEADER] == "4"
    assert more.json()["choices"][0]["stop_reason"] == CAPPED


async def test_what_cannot_be_reduced_is_still_refused(serve: Serving) -> None:
    served = await serve(max_tokens_policy="cap")
    full = [5] * LENGTH
    refused = await served.complete(full, max_tokens=1)
    assert_error(refused, status=400, param="prompt", code="context_length_exceeded")
    refused = await served.complete(PROMPT, max_tokens=LARGE, min_tokens=LENGTH)
    assert_error(refused, status=400, param="min_tokens")
    refused = await served.complete(full, max_tokens=0, echo=True)
    assert_error(refused, status=400, code="context_length_exceeded")


async def test_a_stream_of_sglang_is_limited_by_the_reduced_maximum(serve: Serving) -> None:
    served = await serve(max_tokens_policy="cap")
    path, body = BODIES["SGLang"]
    answer = await served.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200
    assert len(chunks(answer)) > 0
