"""The size of the KV cache that is chosen for an amount of memory."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.kv.cache_size import ENGINE_BYTES, MAX_SHARE, CacheSize, cache_size
from motet.errors import KVMemoryError
from motet.system.machine import GIB, MachineMemory
from tests.property_settings import examples

LAPTOP = MachineMemory(8 * GIB, 5 * GIB)


def size(
    setting: float | None,
    needed_gb: float = 0.25,
    *,
    memory: MachineMemory,
    num_engines: int = 1,
    weights_gb: float = 0.25,
) -> CacheSize:
    weights_bytes = int(weights_gb * GIB)
    return cache_size(
        setting, int(needed_gb * GIB), memory=memory, num_engines=num_engines, weights_bytes=weights_bytes
    )


def test_two_gib_are_the_default_where_they_are_at_most_half_of_the_available_memory() -> None:
    assert size(None, memory=LAPTOP) == CacheSize(2.0, "default")
    assert size(None, memory=MachineMemory(64 * GIB, 8 * GIB), num_engines=2) == CacheSize(2.0, "default")


def test_engines_share_half_of_the_available_memory() -> None:
    reason = "50% of the 5.0 GiB of available memory, divided among 2 engines"
    assert size(None, memory=LAPTOP, num_engines=2) == CacheSize(1.25, reason)


def test_weights_and_engines_leave_the_rest_of_the_available_memory() -> None:
    """Otherwise the requests of one client fill the cache until the system ends an engine."""
    cell = size(None, 0.125, memory=MachineMemory(4 * GIB, 3 * GIB), num_engines=3)
    reason = "3.0 GiB of available memory, divided among 3 engines, without 0.25 GiB of weights and 0.5 GiB"
    assert cell == CacheSize(0.25, f"{reason} for the engine")
    assert size(None, memory=LAPTOP, weights_gb=3.0) == CacheSize(
        1.5, "5.0 GiB of available memory, without 3.00 GiB of weights and 0.5 GiB for the engine"
    )
    assert size(None, memory=LAPTOP, weights_gb=4.5, needed_gb=9.0).gb == 0.0


def test_one_sequence_that_weights_and_engines_do_not_leave_space_for_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert size(None, 1.0, memory=LAPTOP, weights_gb=3.5).gb == 1.0
        assert not caplog.messages
        assert size(None, 1.0, memory=LAPTOP, weights_gb=4.0).gb == 1.0
    assert caplog.messages == [
        "one sequence of maximum length needs 1.00 GiB of KV cache, and weights and engines leave 0.50 GiB of the "
        "available memory: the system can end the server when the cache fills; lower --max-model-len"
    ]


def test_one_sequence_of_maximum_length_fits_if_the_memory_can_hold_it() -> None:
    assert size(None, 3.0, memory=LAPTOP).gb == 3.0
    assert size(None, 1.5, memory=LAPTOP, num_engines=2).gb == 1.5
    assert "one sequence of maximum length" in size(None, 3.0, memory=LAPTOP).reason
    assert size(None, 4.5, memory=LAPTOP).gb == 2.0


def test_a_setting_is_honoured_with_a_warning_above_the_available_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert size(5.0, memory=LAPTOP).gb == 5.0
        assert not caplog.messages
        assert size(3.0, memory=LAPTOP, num_engines=2).gb == 3.0
    assert caplog.messages == [
        "--kv-cache-gb 3 for each of 2 engines exceeds the available memory, 5.0 GiB: the system can end the server "
        "when the cache fills"
    ]


@pytest.mark.parametrize(("setting", "num_engines"), [(8.1, 1), (4.1, 2)])
def test_a_setting_above_the_memory_of_the_machine_is_refused(setting: float, num_engines: int) -> None:
    with pytest.raises(
        KVMemoryError, match=r"--kv-cache-gb .* exceeds the memory of this machine, 8\.0 GiB \(5\.0 are available\)"
    ):
        size(setting, memory=LAPTOP, num_engines=num_engines)


@examples(200)
@given(st.integers(0, 2**36), st.integers(1, 2**36), st.integers(1, 8), st.integers(0, 2**34))
def test_engines_together_never_get_more_than_the_maximum(
    available: int, needed: int, num_engines: int, weights: int
) -> None:
    memory = MachineMemory(2**36, available)
    gb = cache_size(None, needed, memory=memory, num_engines=num_engines, weights_bytes=weights).gb
    part = available / num_engines
    remainder = max(0, part - weights - ENGINE_BYTES)
    assert gb * GIB <= min(MAX_SHARE * part, max(remainder, needed))
    assert gb * GIB >= needed or needed > MAX_SHARE * part
