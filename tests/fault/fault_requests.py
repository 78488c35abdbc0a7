"""Requests for tests of faults. They are long enough for a fault in the middle, and each prompt is new to all
caches."""

from typing import Any

from tests.fault.answers import Body

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
STREAMED: Body = {"stream": True, "stream_options": {"include_usage": True}}
COUNTED: Body = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ENDS_AT_RANDOM: Body = {"stop_token_ids": [40, 80, 120, 160, 200]}
"""About every 60 tokens one of these is sampled, so the choices have different lengths."""
GRAMMAR: Body = {"structured_outputs": {"json": {
    "type": "array", "minItems": 2, "maxItems": 4, "items": {"type": "string", "minLength": 12, "maxLength": 16},
}}}  # fmt: skip
"""An answer has more than 20 tokens and fewer than 120."""
VOTING: Body = {"stop_when": {"agree": 3}, "extract": {"regex": "[a-e]"}, "vote": True, "deterministic": True}
VOTE: Body = {"group": VOTING, "return_token_ids": True, **ENDS_AT_RANDOM}
"""The answer of a choice is its first letter from a to e. Some of a dozen choices are needed until three agree."""
TEXT = "the hand in the sand and then the other hand "
ENDLESS = 10_000
"""Number of tokens of an answer, with the model of `long_folder`, that does not end before a fault or an order."""
ENDLESS_ENGINE: dict[str, Any] = {"max_model_len": 16384, "kv_cache_gb": 0.1}
"""Settings of an engine for four such choices."""


def chat(name: str, *more: Body, n: int = 1, max_tokens: int = 60, **fields: object) -> Body:
    """`more` are further fields of the body."""
    message = {"role": "user", "content": f"{name}: {TEXT * 4}"}
    return request({"messages": [message], "n": n, "max_tokens": max_tokens}, *more, fields)


def completion(name: str, *more: Body, n: int = 1, max_tokens: int = 60, prompts: int = 1, **fields: object) -> Body:
    texts = [f"{name} {number}: {TEXT * (4 - number)}" for number in range(prompts)]
    return request({"prompt": texts, "n": n, "max_tokens": max_tokens}, *more, fields)


def request(*parts: Body) -> Body:
    body: Body = {"seed": 7, "ignore_eos": True}
    for part in parts:
        body |= part
    return body
