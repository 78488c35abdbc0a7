"""What is scheduled when, with literal block ids; blocks hold four tokens."""

import pytest

from motet.engines.native.sequence import SequenceState
from motet.types import ChoiceStart, SamplingParams
from tests.engines.native.paper import PaperEngine, answer, chunks, request, tables

PROMPT = tuple(range(10))


def test_a_fork_shares_all_trunk_blocks_and_copies_none() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=3))
    engine.step()
    # The trunk's last block is not full; tails begin in blocks of their own, so nobody ever writes into it again.
    assert tables(group) == ([0, 1, 2], [[3], [4], [5]])
    assert engine.pool.num_held == 6
    assert engine.pool.holders()[0] == 1  # one holder, the group
    engine.run_to_end()
    engine.assert_wrote("a", PROMPT, n=3, tokens=8)


def test_a_tail_grows_by_one_block_when_it_has_filled_the_last() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2))
    for _ in range(5):
        engine.step()
    assert tables(group) == ([0, 1, 2], [[3], [4]])  # four tail tokens computed, the fifth written
    engine.step()
    assert tables(group) == ([0, 1, 2], [[3, 5], [4, 6]])


def test_a_prompt_is_run_once_and_every_choice_draws_from_its_last_row() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT, n=3))
    assert chunks(engine.step()) == ([], [("a", 0, 10)])
    assert chunks(engine.step()) == ([("a", 0, 0, 1), ("a", 1, 0, 1), ("a", 2, 0, 1)], [])


def test_choices_being_written_come_before_prompts_and_share_the_budget() -> None:
    engine = PaperEngine(blocks=40, budget=8)
    engine.submit(request("a", PROMPT, n=3))
    assert chunks(engine.step()) == ([], [("a", 0, 8)])
    assert chunks(engine.step()) == ([], [("a", 8, 10)])
    engine.submit(request("b", range(50, 63), n=2))
    decode = [("a", 0, 0, 1), ("a", 1, 0, 1), ("a", 2, 0, 1)]
    assert chunks(engine.step()) == (decode, [("b", 0, 5)])
    engine.step()  # b 5..10
    tails, trunks = chunks(engine.step())
    assert (len(tails), trunks) == (3, [("b", 10, 13)])
    tails, trunks = chunks(engine.step())
    assert [(name, index) for name, index, *_ in tails] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    engine.run_to_end()
    engine.assert_wrote("a", PROMPT, n=3, tokens=8)
    engine.assert_wrote("b", tuple(range(50, 63)), n=2, tokens=8)


def test_choices_being_written_come_before_an_older_choice_that_replays() -> None:
    engine = PaperEngine(blocks=40, budget=10)
    engine.submit(request("young", [50], n=2))
    engine.step()
    starts = [ChoiceStart(0, 0, tuple(answer(PROMPT, 0, 20)))]
    engine.submit(request("old", PROMPT, starts=starts, max_tokens=30, priority=-1))
    assert chunks(engine.step()) == ([("young", 0, 0, 1), ("young", 1, 0, 1)], [("old", 0, 8)])
    engine.step()
    assert chunks(engine.step()) == ([("old", 0, 0, 8), ("young", 0, 2, 3), ("young", 1, 2, 3)], [])


def test_the_older_prompt_is_finished_before_the_younger_one_is_begun() -> None:
    engine = PaperEngine(blocks=40, budget=12)
    engine.submit(request("a", PROMPT))
    engine.submit(request("b", PROMPT[::-1]))
    assert chunks(engine.step()) == ([], [("a", 0, 10), ("b", 0, 2)])


def test_what_a_resumed_choice_has_written_is_replayed_in_chunks_and_not_drawn_again() -> None:
    engine = PaperEngine(blocks=40, budget=12)
    written = answer(PROMPT, 7, 20)
    starts = [ChoiceStart(3, 7, tuple(written[:15]))]
    engine.submit(request("a", PROMPT, starts=starts, max_tokens=20))
    assert chunks(engine.step()) == ([], [("a", 0, 10)])
    assert not engine.deltas  # nobody draws from the trunk's last row: the first token is known
    assert chunks(engine.step()) == ([("a", 3, 0, 12)], [])
    assert chunks(engine.step()) == ([("a", 3, 12, 15)], [])
    assert engine.wrote["a", 3] == written[15:16]
    engine.run_to_end()
    assert engine.wrote["a", 3] == written[15:]
    assert engine.counters.replayed_tokens == 14


def test_fresh_and_resumed_choices_of_one_group_run_side_by_side() -> None:
    engine = PaperEngine(blocks=40, budget=64)
    starts = [ChoiceStart(0, 0), ChoiceStart(1, 1, tuple(answer(PROMPT, 1, 5)))]
    engine.submit(request("a", PROMPT, starts=starts, max_tokens=8))
    engine.step()
    assert chunks(engine.step()) == ([("a", 0, 0, 1), ("a", 1, 0, 5)], [])
    engine.run_to_end()
    assert engine.wrote["a", 0] == answer(PROMPT, 0, 8)
    assert engine.wrote["a", 1] == answer(PROMPT, 1, 8)[5:]


def test_a_prefix_hit_shares_full_blocks_and_runs_the_rest() -> None:
    engine = PaperEngine(blocks=20)
    first = engine.submit(request("a", PROMPT))
    engine.step()
    second = engine.submit(request("b", (*PROMPT[:8], 50, 51, 52)))
    assert chunks(engine.step()) == ([("a", 0, 0, 1)], [("b", 8, 11)])
    assert tables(first) == ([0, 1, 2], [[3]])
    assert tables(second) == ([0, 1, 4], [[5]])
    assert engine.pool.holders() == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert second.cached_tokens == 8
    engine.run_to_end()
    engine.assert_wrote("b", (*PROMPT[:8], 50, 51, 52), n=1, tokens=8)


def test_the_last_prompt_token_is_run_though_all_its_blocks_are_known() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT[:8]))
    engine.run_to_end()
    again = engine.submit(request("b", PROMPT[:8]))
    assert chunks(engine.step()) == ([], [("b", 4, 8)])
    # Block 0 is shared; block 1 holds the same tokens, but is computed again, elsewhere: blocks are never rewritten.
    assert again.blocks[0] == 0
    assert again.blocks[1] != 1
    engine.run_to_end()
    engine.assert_wrote("b", PROMPT[:8], n=1, tokens=8)


def test_a_block_that_is_not_full_is_never_published() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT))  # 4 + 4 + 2
    engine.run_to_end()
    assert engine.pool.num_idle == 2
    engine.submit(request("b", (*PROMPT, 50, 51)))
    assert chunks(engine.step()) == ([], [("b", 8, 12)])


def test_a_block_is_published_when_the_chunk_that_completes_it_is_done() -> None:
    engine = PaperEngine(blocks=20, budget=6)
    first = engine.submit(request("a", PROMPT))
    engine.step()  # 0..6
    assert engine.pool.find(first.names) == [0]
    engine.step()  # 6..10
    assert engine.pool.find(first.names) == [0, 1]


def test_blocks_of_another_salt_are_not_shared() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT, cache_salt="mine"))
    engine.run_to_end()
    other = engine.submit(request("b", PROMPT, cache_salt="yours"))
    same = engine.submit(request("c", PROMPT, cache_salt="mine"))
    engine.step()
    assert (other.cached_tokens, same.cached_tokens) == (0, 8)


def test_a_group_that_wants_prompt_logprobs_skips_hits_and_runs_all_of_its_prompt() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT))
    engine.run_to_end()
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    group = engine.submit(request("b", PROMPT, sampling=sampling))
    assert chunks(engine.step()) == ([], [("b", 0, 10)])
    assert group.cached_tokens == 0


def test_a_hit_on_idle_blocks_counts_against_the_room_there_is() -> None:
    engine = PaperEngine(blocks=7)
    engine.submit(request("a", PROMPT, max_tokens=1))
    engine.run_to_end()  # 0 and 1 idle: 7 free
    engine.submit(request("b", range(50, 58), max_tokens=9))  # 2 + 1 blocks: 4 free
    engine.step()
    assert (engine.pool.num_free, engine.pool.num_idle) == (4, 2)
    engine.submit(request("c", PROMPT, n=2))  # 2 hits, 1 + 2 to take; 4 - 2 are left for them
    engine.step()
    assert [group.request.request_id for group in engine.scheduler.waiting] == ["c"]
    engine.run_to_end()
    engine.assert_wrote("c", PROMPT, n=2, tokens=8)


def test_a_trunk_goes_on_right_behind_its_hit_though_another_run_fits_better() -> None:
    engine = PaperEngine(blocks=40)
    engine.submit(request("a", PROMPT[:8], n=3, max_tokens=1))  # 0, 1 and 2, 3, 4
    engine.submit(request("stays", [50]))  # 5 and 6
    engine.submit(request("x", [51], max_tokens=1))  # 7 and 8
    engine.submit(request("stays too", [52]))  # 9 and 10
    engine.step()  # idle: 0, 1; free: 2..4, 7..8 and 11..39
    group = engine.submit(request("b", (*PROMPT[:8], *range(60, 67))))
    engine.step()
    assert tables(group) == ([0, 1, 2, 3], [[4]])


def test_a_trunk_that_does_not_fit_behind_its_hit_lies_in_one_run_elsewhere() -> None:
    engine = PaperEngine(blocks=40)
    engine.submit(request("a", PROMPT[:8], max_tokens=1))
    engine.submit(request("x", range(50, 58), max_tokens=1))
    engine.run_to_end()  # idle: 0, 1 of a and 3, 4 of x; free: 2 and 5..39
    long = engine.submit(request("b", (*PROMPT, *range(60, 70))))
    engine.step()
    assert tables(long) == ([0, 1, 5, 6, 7], [[2]])  # 2 follows the hit, but three are wanted in one run


def test_a_tail_takes_the_smallest_hole_and_leaves_long_runs_to_trunks() -> None:
    engine = PaperEngine(blocks=40)
    engine.submit(request("x", [50], max_tokens=1))  # 0 and 1
    group = engine.submit(request("a", [51]))  # 2 and 3
    for _ in range(6):
        engine.step()
    assert tables(group) == ([2], [[3, 0]])  # not 4, which follows 3


def test_the_last_sibling_takes_the_trunk_with_it() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2))
    engine.step()
    engine.stop("a", 0)
    assert tables(group) == ([0, 1, 2], [[4]])
    engine.stop("a", 1)
    assert engine.pool.num_held == 0
    assert engine.pool.num_idle == 2
    assert not engine.scheduler.plan()


@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_group_leaves_nothing_behind_at_any_time(steps: int) -> None:
    engine = PaperEngine(blocks=20, budget=6)
    engine.submit(request("a", PROMPT, n=2))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    assert engine.pool.num_held == 0
    assert len(engine.scheduler.waiting) == 0
    assert not engine.scheduler.plan()


def test_states_are_those_of_the_tables() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2))
    sequences = list(group.sequences)
    assert [sequence.state for sequence in sequences] == [SequenceState.WAITING] * 2
    engine.step()
    assert [sequence.state for sequence in sequences] == [SequenceState.RUNNING] * 2
    engine.run_to_end()
    assert [sequence.state for sequence in sequences] == [SequenceState.FINISHED] * 2
    assert [sequence.blocks for sequence in sequences] == [[], []]
