"""The receipt shows the counts of the workers next to the times of the client."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from motet.cli.conversation import Conversation
from motet.cli.demo import Receipt
from motet.deploy.child import BlockSize, CounterSnapshot
from motet.errors import EngineError

SINGLE = CounterSnapshot(
    prompt_tokens=280,
    prefill_tokens=280,
    generation_tokens=480,
    forced_tokens=5,
    spec_decode_num_draft_tokens=31,
    spec_decode_num_accepted_tokens=17,
    forks=3,
    blocks_shared=54,
    bytes_saved=19_906_560,
    trunk_tokens_read=33_320,
    trunk_tokens_unshared=133_280,
    prefills=0,
    kv_transfers=0,
    kv_transfer_bytes=0,
    recomputed_tokens=0,
)
CELL = replace(SINGLE, prefills=1, kv_transfers=1, kv_transfer_bytes=18_000, recomputed_tokens=1)
BLOCK = BlockSize(tokens=16, bytes=1000)


def conversation(*lines: str) -> Conversation:
    ticks = iter(range(100))
    talk = Conversation(2, clock=lambda: next(ticks))
    for line in lines:
        talk.feed(f"data: {line}")
    return talk


def complete() -> Conversation:
    return conversation(
        '{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
        '{"choices": [{"index": 1, "delta": {"content": "b"}}]}',
        '{"choices": [], "usage": {"prompt_tokens": 280, "completion_tokens": 480}}',
        "[DONE]",
    )


def words(receipt: Receipt) -> str:
    console = Console(width=120, file=StringIO(), record=True)
    console.print(receipt.table())
    return " ".join(console.export_text().split())


def test_a_receipt_shows_the_cost_of_an_answer() -> None:
    assert json.loads(Receipt.of(complete(), CELL, block=BLOCK).json()) == {
        "n": 2,
        "prefills": 1,
        "transfers": 1,
        "transfer_bytes": 18_000,
        "trunk_bytes": 18_000,
        "recomputed_tokens": 1,
        "prompt_tokens": 280,
        "prompt_tokens_prefilled": 280,
        "completion_tokens": 480,
        "forced_tokens": 5,
        "draft_tokens": 31,
        "accepted_tokens": 17,
        "blocks_shared": 54,
        "bytes_not_copied": 19_906_560,
        "first_token_s": 1,
        "total_s": 4,
        "tokens_per_s": 120.0,
    }


@pytest.mark.parametrize(("prompt_tokens", "blocks"), [(1, 0), (2, 1), (17, 1), (18, 2), (280, 18)])
def test_the_trunk_is_the_blocks_of_the_prompt_without_its_last_token(prompt_tokens: int, blocks: int) -> None:
    assert BLOCK.bytes_of(prompt_tokens - 1) == blocks * BLOCK.bytes


def test_the_table_shows_the_work_that_was_saved() -> None:
    shown = words(Receipt.of(complete(), CELL, block=BLOCK))
    assert "prefills 1 2, one for each choice" in shown
    assert "KV transfers 1 2, one for each choice" in shown
    assert "KV bytes transferred 18,000 36,000" in shown


def test_the_table_of_a_single_server_has_no_transfers() -> None:
    shown = words(Receipt.of(complete(), SINGLE, block=BLOCK))
    assert "transfer" not in shown
    assert "280 of 280 560" in shown
    assert "draft tokens accepted 17 of 31" in shown


def test_a_stream_without_usage_gives_no_receipt() -> None:
    with pytest.raises(EngineError, match="without usage"):
        Receipt.of(conversation("[DONE]"), CELL, block=BLOCK)
