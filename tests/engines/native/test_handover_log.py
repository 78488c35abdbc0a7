"""What workers log of prompts that change hands: a line a group, with the client's id, and a line of figures."""

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.engines.native.drive import group, prompt_of
from tests.engines.native.pair import Pair, with_ticket

Tiny = Callable[[str], Path]


def test_both_workers_name_the_client_s_request(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair(tiny("llama"))
    request = msgspec.structs.replace(group("g", prompt_of(100)), trace="from-the-client")
    pair.submit(with_ticket(request, pair.prefill(request)))
    pair.finish()
    assert "prefilled g (from-the-client) for 1: 99 tokens" in caplog.messages
    assert any(message.startswith("fetched g (from-the-client): ") for message in caplog.messages)


def test_ten_seconds_after_a_transfer_there_is_one_line_of_figures(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = Pair(tiny("llama"))
    request = group("g", prompt_of(100))
    pair.submit(with_ticket(request, pair.prefill(request)))
    pair.finish()
    assert pair.d.wake_s == pair.now_s + 10, "it comes also when there is nothing else to do"
    for _ in range(3):
        pair.now_s += 10
        pair.step_d()
    (line,) = [message for message in caplog.messages if message.startswith("KV transfers:")]
    assert line.startswith("KV transfers: number=1 ")
