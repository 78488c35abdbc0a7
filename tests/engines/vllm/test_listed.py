"""The log-probabilities of a prompt, as either route tells them."""

import pytest

from motet.engines.vllm.listed import LOWEST, prompt_logprobs_in
from motet.errors import EngineError
from motet.types import TokenLogprob

LISTS = (
    b'[null,{"6":{"logprob":-3.0,"rank":12,"decoded_token":"x"},"2":{"logprob":-0.1,"rank":1,"decoded_token":"a"},'
    b'"3":{"logprob":-0.7,"rank":2,"decoded_token":"b"}},{"3":{"logprob":-0.7,"rank":2,"decoded_token":"b"},'
    b'"2":{"logprob":null,"rank":1,"decoded_token":"a"}}]'
)
TOLD = (
    None,
    TokenLogprob(6, -3.0, 12, ((2, -0.1), (3, -0.7))),
    TokenLogprob(3, -0.7, 2, ((2, LOWEST), (3, -0.7))),
)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"index":0,"token_ids":[9],"prompt_logprobs":' + LISTS + b"}]}",
        b'{"choices":[{"index":0,"token_ids":[9]}],"prompt_logprobs":' + LISTS + b"}",
    ],
    ids=["completions", "generate"],
)
def test_the_log_probabilities_of_a_prompt_are_told_a_token_best_first(body: bytes) -> None:
    assert prompt_logprobs_in(body, (5, 6, 3), 2) == TOLD


def test_without_the_best_only_the_prompts_own_is_told() -> None:
    body = b'{"choices":[{"prompt_logprobs":[null,{"6":{"logprob":-3.0,"rank":12}}]}]}'
    assert prompt_logprobs_in(body, (5, 6), 0) == (None, TokenLogprob(6, -3.0, 12, ()))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"choices":[{}]}', "of 0 of 2 prompt tokens"),
        (b'{"choices":[{"prompt_logprobs":[null]}]}', "of 1 of 2 prompt tokens"),
        (b'{"choices":[{"prompt_logprobs":[null,{"8":{"logprob":-1.0}}]}]}', "of prompt token 6"),
        (b"no", "what cannot be read"),
    ],
)
def test_what_does_not_fit_the_prompt_is_an_error(body: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        prompt_logprobs_in(body, (5, 6), 1)
