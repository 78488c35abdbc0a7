"""Runs cover the same blocks as the pairs that they are made from, in the minimum number of pieces; spans and facts."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.transport import BlockRun, KVFacts, RegisteredMemory, block_spans, entry_spans, merged, proof_spans
from tests.transfer.memory import failing

FACTS = KVFacts(model_digest="a1", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
MEMORY = RegisteredMemory(regions=(1000, 5000), region_block_bytes=100, num_blocks=8, proof=9000, proof_entries=12)


@pytest.mark.parametrize(
    ("pairs", "runs"),
    [
        ([], []),
        ([(4, 9)], [BlockRun(4, 9, 1)]),
        ([(4, 9), (5, 10), (6, 11)], [BlockRun(4, 9, 3)]),
        ([(6, 11), (4, 9), (5, 10)], [BlockRun(4, 9, 3)]),  # in any order
        ([(4, 9), (5, 11)], [BlockRun(4, 9, 1), BlockRun(5, 11, 1)]),  # neighbours there, not here
        ([(4, 9), (6, 10)], [BlockRun(4, 9, 1), BlockRun(6, 10, 1)]),  # neighbours here, not there
        ([(4, 10), (5, 9)], [BlockRun(4, 10, 1), BlockRun(5, 9, 1)]),  # crossed
    ],
)
def test_neighbours_on_both_sides_become_one_run(pairs: list[tuple[int, int]], runs: list[BlockRun]) -> None:
    assert merged(pairs) == runs


@given(
    st.lists(st.integers(0, 30), unique=True).flatmap(
        lambda remote: st.permutations(range(len(remote))).map(lambda local: list(zip(remote, local, strict=True)))
    )
)
def test_runs_cover_exactly_the_pairs_and_their_number_is_minimal(pairs: list[tuple[int, int]]) -> None:
    runs = merged(pairs)
    again = [(run.remote + step, run.local + step) for run in runs for step in range(run.count)]
    assert sorted(again) == sorted(pairs)
    followers = sum((remote - 1, local - 1) in pairs for remote, local in pairs)
    assert len(runs) == len(pairs) - followers


def test_differences_of_layouts_name_the_field_and_both_values() -> None:
    other = msgspec.structs.replace(FACTS, dtype="float32", block_size=32)
    assert FACTS.differences(FACTS) == []
    assert FACTS.differences(other) == [
        "dtype is bfloat16 here and float32 there",
        "block_size is 16 here and 32 there",
    ]


def test_every_fact_counts() -> None:
    for name, value in msgspec.structs.asdict(FACTS).items():
        other = msgspec.structs.replace(FACTS, **{name: value * 2})
        assert len(FACTS.differences(other)) == 1, name


def test_a_block_has_one_span_in_every_region() -> None:
    spans = block_spans(MEMORY, [(0, 1), (3, 4)])
    assert spans.tolist() == [[1000, 100], [1300, 400], [5000, 100], [5300, 400]]


def test_an_entry_of_the_proof_has_eight_bytes() -> None:
    assert proof_spans(MEMORY, [(0, 12)]).tolist() == [[9000, 96]]
    assert proof_spans(MEMORY, [(3, 1), (7, 5)]).tolist() == [[9024, 8], [9056, 40]]
    assert entry_spans(0, [(2, 3)]).tolist() == [[16, 24]]


def test_addresses_above_two_to_the_63_are_exact() -> None:
    high = 2**64 - 4096
    memory = msgspec.structs.replace(MEMORY, regions=(high,), proof=high)
    assert block_spans(memory, [(7, 1)]).tolist() == [[high + 700, 100]]
    assert proof_spans(memory, [(1, 1)]).tolist() == [[high + 8, 8]]


@pytest.mark.parametrize("piece", [(8, 1), (7, 2), (-1, 1), (0, 0), (0, -1), (2**60, 1)])
def test_blocks_outside_have_no_span(piece: tuple[int, int]) -> None:
    with failing(FailureKind.REFUSED):
        block_spans(MEMORY, [(0, 1), piece])


@pytest.mark.parametrize("piece", [(12, 1), (11, 2), (-1, 1), (0, 0)])
def test_entries_outside_have_no_span(piece: tuple[int, int]) -> None:
    with pytest.raises(TransferError, match="there are 12") as refused:
        proof_spans(MEMORY, [piece])
    assert refused.value.kind is FailureKind.REFUSED


def test_registered_memory_survives_its_encoding() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(MEMORY), type=RegisteredMemory) == MEMORY
