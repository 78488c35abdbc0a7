"""The reasons why decode computes a prompt itself."""

import pytest

from motet.errors import EngineClosedError, EngineDiedError, EngineError, MotetError, OverloadedError
from motet.routing.choosing.prefill_plan import BypassReason, bypass_reason, reason_of, waiting_takes_longer
from motet.routing.workers.worker_load import PromptBacklog

IDLE = PromptBacklog(1000)
BUSY = PromptBacklog(1000, waiting_tokens=5000, tokens_per_s=100.0)


def reason(
    bypass_tokens: int = 128,
    *,
    prompt_tokens: int = 1000,
    cached_tokens: int = 0,
    prompt_logprobs: bool = False,
    prefill: PromptBacklog | None = IDLE,
) -> BypassReason | None:
    decode = PromptBacklog(prompt_tokens - cached_tokens)
    return bypass_reason(
        bypass_tokens, prompt_tokens=prompt_tokens, prompt_logprobs=prompt_logprobs, prefill=prefill, decode=decode
    )


@pytest.mark.parametrize("bypass_tokens", [0, 1, 128])
def test_a_single_token_never_goes_to_prefill(bypass_tokens: int) -> None:
    assert reason(bypass_tokens, prompt_tokens=1) is BypassReason.ONE_TOKEN


@pytest.mark.parametrize(
    ("prompt_tokens", "cached_tokens", "expected"),
    [(127, 0, BypassReason.SHORT), (128, 0, None), (1000, 873, BypassReason.SHORT), (1000, 872, None)],
)
def test_the_uncached_part_of_a_prompt_decides(
    prompt_tokens: int, cached_tokens: int, expected: BypassReason | None
) -> None:
    assert reason(128, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens) is expected


def test_prompt_logprobs_need_every_row_on_decode() -> None:
    assert reason(0, prompt_logprobs=True) is BypassReason.PROMPT_LOGPROBS


def test_a_busy_prefill_is_bypassed() -> None:
    assert reason(prefill=BUSY) is BypassReason.PREFILL_BUSY


@pytest.mark.parametrize("bypass_tokens", [0, 128])
def test_prefill_that_is_down_is_bypassed_unless_another_reason_comes_first(bypass_tokens: int) -> None:
    assert reason(bypass_tokens, prefill=None) is BypassReason.PREFILL_DOWN
    assert reason(bypass_tokens, prefill=None, prompt_logprobs=True) is BypassReason.PROMPT_LOGPROBS
    assert reason(bypass_tokens, prefill=None, prompt_tokens=1) is BypassReason.ONE_TOKEN


def test_prefill_that_is_down_is_counted_only_where_it_would_have_paid() -> None:
    assert reason(128, prefill=None, cached_tokens=900) is BypassReason.SHORT
    assert reason(0, prefill=None, cached_tokens=900) is BypassReason.PREFILL_DOWN


def test_bypass_tokens_0_lets_decode_compute_nothing_by_choice() -> None:
    assert reason(0, prompt_tokens=2) is None
    assert reason(0, prefill=BUSY) is None


@pytest.mark.parametrize(
    ("prefill", "decode", "longer"),
    [
        # (waiting + own) / speed on each side
        (PromptBacklog(1000, 1000, 1000.0), PromptBacklog(1000, 0, 1000.0), True),  # 2.0 s against 1.0 s
        (PromptBacklog(1000, 1000, 1000.0), PromptBacklog(1000, 1000, 1000.0), False),  # 2.0 s against 2.0 s
        (PromptBacklog(1000, 1000, 1000.0), PromptBacklog(1000, 0, 400.0), False),  # 2.0 s against 2.5 s
        (PromptBacklog(1000, 1000, 1000.0), PromptBacklog(900, 0, 500.0), True),  # 2.0 s against 1.8 s
        (
            PromptBacklog(100, 1000, 1000.0),
            PromptBacklog(1000, 0, 800.0),
            False,
        ),  # 1.1 s against 1.25 s: prefill has most of it cached
        (PromptBacklog(1000, 1, 1000.0), PromptBacklog(1000, 0, 1000.0), True),  # 1.001 s against 1.0 s
    ],
)
def test_the_side_that_would_finish_first_gets_the_prompt(
    prefill: PromptBacklog, decode: PromptBacklog, longer: bool
) -> None:
    assert waiting_takes_longer(prefill, decode) is longer


def test_prefill_without_a_queue_is_never_busy_even_if_slow() -> None:
    assert not waiting_takes_longer(PromptBacklog(1000, 0, 1.0), PromptBacklog(1000, 0, 1000.0))


def test_prefill_that_was_not_measured_is_never_busy() -> None:
    assert not waiting_takes_longer(PromptBacklog(1000, 9000, None), PromptBacklog(1000, 0, 1000.0))


def test_decode_that_was_not_measured_counts_as_fast_as_prefill() -> None:
    assert waiting_takes_longer(PromptBacklog(1000, 500, 100.0), PromptBacklog(1000))
    assert not waiting_takes_longer(PromptBacklog(1000, 500, 100.0), PromptBacklog(1000, 600))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OverloadedError("full"), BypassReason.PREFILL_BUSY),
        (EngineDiedError("gone"), BypassReason.PREFILL_DOWN),
        (EngineClosedError("closed"), BypassReason.PREFILL_DOWN),
        (EngineError("sick"), BypassReason.PREFILL_FAILED),
        (MotetError("else"), BypassReason.PREFILL_FAILED),
    ],
)
def test_a_failed_prefill_is_counted_by_its_cause(error: MotetError, reason: BypassReason) -> None:
    assert reason_of(error) is reason
