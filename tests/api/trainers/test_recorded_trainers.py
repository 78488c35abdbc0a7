"""The requests of trainers are answered, with what each trainer reads in the answer.

`recorded_trainers` has them, written down from the public source that each file names: their values are examples,
their fields and routes are the trainer's. docs/rollouts.md lists trainers that need something that Motet does not
serve.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.noted_control import NotedControl
from tests.api.serving import Serving

pytestmark = pytest.mark.anyio

FILES = sorted((Path(__file__).parents[1] / "recorded_trainers").glob("*.json"))
RECORDED: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text()) for file in FILES}


def has_tokens_of_a_chat(answer: Any) -> bool:
    (choice,) = answer["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return bool(answer["prompt_token_ids"]) and len(choice["token_ids"]) == len(logprobs) > 0


def has_tokens(answer: Any) -> bool:
    """Returns True if the answer has tokens as SkyRL reads them, with log-probabilities, or prime-rl, which scores a
    prompt."""
    if answer["prompt_logprobs"]:
        return answer["prompt_logprobs"][0] is None and all(answer["prompt_logprobs"][1:])
    return all(
        choice["finish_reason"] and len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
        for choice in answer["choices"]
    )


def has_tokens_of_a_completion(answer: Any) -> bool:
    """AReaL takes the tokens from their names, and TRL from a field of their own."""
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    named = [int(token.removeprefix("token_id:")) for token in logprobs["tokens"] if token.startswith("token_id:")]
    tokens = choice["token_ids"] if choice.get("token_ids") else named
    return len(tokens) == len(logprobs["token_logprobs"]) > 0


def has_tokens_in_sglangs_form(answer: Any) -> bool:
    logprobs = answer["meta_info"]["output_token_logprobs"]
    return answer["meta_info"]["finish_reason"]["type"] == "stop" and [token for _, token, _ in logprobs] != []


READ: dict[str, Callable[[Any], bool]] = {
    "/health": lambda answer: True,
    "/liveness": lambda answer: True,
    "/v1/models": lambda answer: answer["data"][0]["id"] == "tiny",
    "/v1/chat/completions": has_tokens_of_a_chat,
    "/v1/completions": has_tokens_of_a_completion,
    "/inference/v1/generate": has_tokens,
    "/generate": has_tokens_in_sglangs_form,
    "/pause_generation": lambda answer: True,
    "/update_weights_from_disk": lambda answer: answer["success"] is True,
    "/continue_generation": lambda answer: True,
    "/tokenize": lambda answer: len(answer["tokens"]) > 0,
    "/detokenize": lambda answer: isinstance(answer["prompt"], str),
    "/pause": lambda answer: answer["status"] == "paused",
    "/update_weights": lambda answer: bool(answer["weight_version"]),
    "/reset_prefix_cache": lambda answer: answer["success"] is True,
    "/get_world_size": lambda answer: answer["world_size"] == 1,
    "/sleep": lambda answer: answer["status"] == "sleeping",
    "/wake_up": lambda answer: bool(answer["status"]),
    "/resume": lambda answer: answer["status"] == "resumed",
}
"""True if the answer has what trainers read in it, by path."""


@pytest.mark.parametrize("name", RECORDED)
async def test_every_request_of_a_trainer_is_answered_with_what_it_reads(serve: Serving, name: str) -> None:
    served = await serve(rl=True)
    served.service.control = NotedControl()
    recorded = RECORDED[name]
    assert recorded["repository"] and recorded["commit"] and recorded["files"]
    for request in recorded["requests"]:
        response: httpx.Response = await served.http.request(
            request["method"], request["path"], json=request.get("body")
        )
        assert response.status_code == 200, (request, response.text)
        assert READ[request["path"].partition("?")[0]](response.json()), (request, response.text)
