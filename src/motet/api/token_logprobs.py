"""Log-probabilities where there is no text: vLLM's chat form with `token_id:5` in place of the token's text."""

from collections.abc import Sequence
from typing import TypedDict

from motet.text.logprobs import LOWEST
from motet.types import TokenLogprob


class TopTokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobEntry(TopTokenLogprob):
    top_logprobs: list[TopTokenLogprob]


class TokenLogprobs(TypedDict):
    content: list[TokenLogprobEntry]


def token_logprobs(logprobs: Sequence[TokenLogprob], *, num_top: int) -> TokenLogprobs:
    return {
        "content": [
            {
                **_entry(entry.token_id, entry.logprob),
                "top_logprobs": [_entry(token, logprob) for token, logprob in entry.top[:num_top]],
            }
            for entry in logprobs
        ]
    }


def _entry(token_id: int, logprob: float) -> TopTokenLogprob:
    return {"token": f"token_id:{token_id}", "logprob": max(logprob, LOWEST), "bytes": None}
