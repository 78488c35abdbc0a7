"""The receipt: what the server counted, beside what the client saw."""

import json

import pytest

from motet.cli.conversation import Conversation
from motet.cli.demo import Receipt
from motet.deploy.figures import Figures
from motet.errors import EngineError

SPENT = Figures(
    prompt_tokens=280,
    prefill_tokens=280,
    generation_tokens=480,
    forks=3,
    blocks_shared=54,
    bytes_saved=19_906_560,
    trunk_tokens_read=33_320,
    trunk_tokens_unshared=133_280,
)


def conversation(*lines: str) -> Conversation:
    ticks = iter(range(100))
    talk = Conversation(2, clock=lambda: next(ticks))
    for line in lines:
        talk.feed(f"data: {line}")
    return talk


def test_a_receipt_says_what_it_cost() -> None:
    talk = conversation(
        '{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
        '{"choices": [{"index": 1, "delta": {"content": "b"}}]}',
        '{"choices": [], "usage": {"prompt_tokens": 280, "completion_tokens": 480}}',
        "[DONE]",
    )
    assert json.loads(Receipt.of(talk, SPENT).json()) == {
        "n": 2,
        "prompt_tokens": 280,
        "prompt_tokens_prefilled": 280,
        "completion_tokens": 480,
        "blocks_shared": 54,
        "bytes_not_copied": 19_906_560,
        "first_token_s": 1,
        "total_s": 4,
        "tokens_per_s": 120.0,
    }


def test_a_stream_without_usage_gives_no_receipt() -> None:
    with pytest.raises(EngineError, match="without a usage"):
        Receipt.of(conversation("[DONE]"), SPENT)
