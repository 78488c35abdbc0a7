"""Programs read these figures from /metrics: counters summed over workers, and the size of a block of KV."""

from dataclasses import fields

import pytest

from motet.deploy.child import BlockSize, CounterSnapshot, block_size_in, figures_in
from motet.errors import EngineError

NAMES = [field.name for field in fields(CounterSnapshot)]


def exposition(prefill: int, decode: int) -> str:
    return "".join(
        f"# TYPE motet:{name} counter\n"
        f'motet:{name}_total{{model_name="m",role="prefill",worker="prefill-0"}} {prefill}.0\n'
        f'motet:{name}_total{{model_name="m",role="decode",worker="decode-0"}} {decode}.0\n'
        for name in NAMES
    )


def test_counters_are_summed_over_the_workers() -> None:
    assert figures_in(exposition(3, 4)) == CounterSnapshot(**dict.fromkeys(NAMES, 7))


def test_the_difference_of_two_readings_counts_the_events_between_them() -> None:
    spent = figures_in(exposition(3, 4)) - figures_in(exposition(1, 1))
    assert spent == CounterSnapshot(**dict.fromkeys(NAMES, 5))


def test_the_block_size_is_read_from_labels() -> None:
    text = (
        "# TYPE motet:cache_config_info gauge\n"
        'motet:cache_config_info{block_size="16",bytes_per_block="1000",num_blocks="9",worker="prefill-0"} 1.0\n'
        'motet:cache_config_info{block_size="16",bytes_per_block="1000",num_blocks="9",worker="decode-0"} 1.0\n'
    )
    assert block_size_in(text) == BlockSize(tokens=16, bytes=1000)


def test_an_exposition_without_a_block_size_is_an_error() -> None:
    with pytest.raises(EngineError, match="cache_config_info"):
        block_size_in("")
