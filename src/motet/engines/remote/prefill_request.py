"""What a prefill server is sent for a client's request: the same prompt, one token, and nothing else. Pure.

The decode server gets the client's body as it is; prefill gets this one. A server may refuse fields it does not know,
so nothing is added that its route does not have, and what only matters to an answer is left out.
"""

from collections.abc import Mapping
from enum import StrEnum


class Route(StrEnum):
    """The routes that go through prefill and decode, by path."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/inference/v1/generate"


NO_USE = frozenset(
    {
        "best_of",
        "echo",
        "include_stop_str_in_output",
        "logprobs",
        "parallel_tool_calls",
        "prompt_logprobs",
        "response_format",
        "return_token_ids",
        "stop",
        "stop_token_ids",
        "stream_options",
        "structured_outputs",
        "tool_choice",
        "top_logprobs",
    }
)
"""Fields that say what becomes of an answer. `tools` is not among them: a chat template writes tools into the prompt,
and the KV of a prompt without them is the KV of another prompt."""


def prefill_request(
    route: Route, body: Mapping[str, object], *, prompt_number: int = 0, readers: int = 1
) -> dict[str, object]:
    """The body of the prefill request for one prompt of `body`, whose KV so many `readers` will fetch."""
    match route:
        case Route.GENERATE:
            wanted = _without(body, NO_USE) | {"sampling_params": _one_token(body.get("sampling_params"))}
        case Route.COMPLETIONS:
            wanted = _one_token(body) | {"prompt": _one_prompt(body["prompt"], prompt_number)}
        case Route.CHAT:
            wanted = _one_token(body) | {"max_completion_tokens": 1}
            if body.get("tools"):
                wanted["tool_choice"] = "none"  # they are in the prompt, but the one token is no call of them
    transfer = {"do_remote_decode": True, "do_remote_prefill": False, "readers": readers}
    return wanted | {"stream": False, "kv_transfer_params": transfer}


def _one_token(fields: object) -> dict[str, object]:
    kept = _without(fields, NO_USE) if isinstance(fields, Mapping) else {}
    if "min_tokens" in kept:
        kept["min_tokens"] = 0
    return kept | {"n": 1, "max_tokens": 1}


def _one_prompt(prompt: object, number: int) -> object:
    """Of an array of prompts the one with this number; a text or an array of token ids is one prompt by itself."""
    match prompt:
        case [str() | [*_], *_]:
            return prompt[number]
        case _:
            return prompt


def _without(fields: Mapping[str, object], names: frozenset[str]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in names}
