"""Which token ends a choice, and how."""

import pytest

from motet.engines.native.finish import finish_of
from motet.types import Finish, FinishReason, SamplingParams

EOS, STOP_TOKEN, OTHER = 2, 50, 7
SAMPLING = SamplingParams(max_tokens=10, stop_token_ids=(STOP_TOKEN,))
AT_STOP_TOKEN = Finish(FinishReason.STOP, STOP_TOKEN)


def finish(token_id: int, sampling: SamplingParams = SAMPLING, *, written: int = 3, total: int = 13) -> Finish | None:
    return finish_of(
        token_id,
        num_written=written,
        num_total=total,
        sampling=sampling,
        eos=frozenset({EOS}),
        max_model_len=100,
    )


def test_an_ordinary_token_ends_nothing() -> None:
    assert finish(OTHER) is None


def test_end_of_sequence_stops_without_naming_a_token() -> None:
    assert finish(EOS) == Finish(FinishReason.STOP)


def test_a_stop_token_is_named() -> None:
    assert finish(STOP_TOKEN) == AT_STOP_TOKEN


def test_end_of_sequence_may_be_ignored_but_a_stop_token_not() -> None:
    ignoring = SamplingParams(max_tokens=10, stop_token_ids=(STOP_TOKEN, EOS), ignore_eos=True)
    assert finish(OTHER, ignoring) is None
    assert finish(EOS, ignoring) == Finish(FinishReason.STOP, EOS)
    assert finish(EOS, SamplingParams(max_tokens=10, ignore_eos=True)) is None


@pytest.mark.parametrize(("written", "expected"), [(9, None), (10, Finish(FinishReason.LENGTH))])
def test_max_tokens_counts_what_is_written(written: int, expected: Finish | None) -> None:
    assert finish(OTHER, written=written) == expected


@pytest.mark.parametrize(("total", "expected"), [(99, None), (100, Finish(FinishReason.LENGTH))])
def test_the_models_length_counts_the_prompt_too(total: int, expected: Finish | None) -> None:
    assert finish(OTHER, total=total) == expected


def test_a_stop_on_the_last_token_allowed_is_a_stop() -> None:
    assert finish(EOS, written=10) == Finish(FinishReason.STOP)
    assert finish(STOP_TOKEN, written=10) == AT_STOP_TOKEN
