"""The order in which groups and choices are scheduled and admitted, with literal block ids (blocks hold four
tokens), and queues."""

import pytest

from motet.engines.native.scheduling.queues import AgeOrdered
from motet.engines.native.step.sequence import ChoiceSequence, Group, SequenceState
from motet.types import ChoiceStart, SamplingParams
from tests.engines.native.paper import (
    BlockTables,
    PaperEngine,
    PlannedChunks,
    TailSpan,
    TrunkSpan,
    answer,
    chunks,
    group_of,
    request,
    states,
    tables,
)

PROMPT = tuple(range(10))


def test_a_fork_shares_all_trunk_blocks_and_copies_none() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=3))
    engine.step()
    # The trunk's last block is not full. Tails start in blocks of their own, so it is never written again.
    assert tables(group) == BlockTables(trunk=[0, 1, 2], tails=[[3], [4], [5]])
    assert engine.pool.num_held == 6
    assert engine.pool.holders()[0] == 1  # one holder, the group
    engine.run_to_end()
    engine.assert_outputs("a", PROMPT, n=3, tokens=8)


def test_a_tail_grows_by_one_block_when_it_has_filled_the_last() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2))
    engine.steps(5)
    # four tail tokens are computed, the fifth is sampled
    assert tables(group) == BlockTables(trunk=[0, 1, 2], tails=[[3], [4]])
    engine.step()
    assert tables(group) == BlockTables(trunk=[0, 1, 2], tails=[[3, 5], [4, 6]])


def test_a_prompt_is_run_once_and_every_choice_samples_from_its_last_row() -> None:
    engine = PaperEngine(blocks=20)
    engine.submit(request("a", PROMPT, n=3))
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("a", tokens=range(10))])
    assert chunks(engine.step()) == PlannedChunks(
        tails=[
            TailSpan("a", choice=0, tokens=range(1)),
            TailSpan("a", choice=1, tokens=range(1)),
            TailSpan("a", choice=2, tokens=range(1)),
        ]
    )


def test_decoding_choices_come_before_prompts_and_share_the_budget() -> None:
    engine = PaperEngine(blocks=40, budget=8)
    engine.submit(request("a", PROMPT, n=3))
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("a", tokens=range(8))])
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("a", tokens=range(8, 10))])
    engine.submit(request("b", range(50, 63), n=2))
    decode = [TailSpan("a", choice=choice, tokens=range(1)) for choice in range(3)]
    assert chunks(engine.step()) == PlannedChunks(tails=decode, trunks=[TrunkSpan("b", tokens=range(5))])
    engine.step()  # b 5..10
    planned = chunks(engine.step())
    assert len(planned.tails) == 3
    assert planned.trunks == [TrunkSpan("b", tokens=range(10, 13))]
    planned = chunks(engine.step())
    assert [(tail.group, tail.choice) for tail in planned.tails] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    engine.run_to_end()
    engine.assert_outputs("a", PROMPT, n=3, tokens=8)
    engine.assert_outputs("b", tuple(range(50, 63)), n=2, tokens=8)


def test_groups_with_a_common_prefix_are_adjacent() -> None:
    engine = PaperEngine(blocks=300, budget=600)
    prefix = tuple(range(260))  # more than a stretch of 256
    engine.submit(request("a", (*prefix, 900)))
    engine.step()
    engine.submit(request("stranger", PROMPT))
    engine.submit(request("b", (*prefix, 901, 902)))
    engine.step()
    assert [tail.group for tail in chunks(engine.step()).tails] in (["a", "b", "stranger"], ["stranger", "a", "b"])
    engine.run_to_end()
    engine.assert_outputs("b", (*prefix, 901, 902), n=1, tokens=8)


def test_decoding_choices_come_before_an_older_choice_that_replays() -> None:
    engine = PaperEngine(blocks=40, budget=10)
    engine.submit(request("young", [50], n=2))
    engine.step()
    starts = [ChoiceStart(0, 0, tuple(answer(PROMPT, 0, 20)))]
    engine.submit(request("old", PROMPT, starts=starts, max_tokens=30, priority=-1))
    assert chunks(engine.step()) == PlannedChunks(
        tails=[TailSpan("young", choice=0, tokens=range(1)), TailSpan("young", choice=1, tokens=range(1))],
        trunks=[TrunkSpan("old", tokens=range(8))],
    )
    engine.step()
    assert chunks(engine.step()) == PlannedChunks(
        tails=[
            TailSpan("old", choice=0, tokens=range(8)),
            TailSpan("young", choice=0, tokens=range(2, 3)),
            TailSpan("young", choice=1, tokens=range(2, 3)),
        ]
    )


def test_the_older_prompt_is_finished_before_the_younger_one_is_started() -> None:
    engine = PaperEngine(blocks=40, budget=12)
    engine.submit(request("a", PROMPT))
    engine.submit(request("b", PROMPT[::-1]))
    assert chunks(engine.step()) == PlannedChunks(
        trunks=[TrunkSpan("a", tokens=range(10)), TrunkSpan("b", tokens=range(2))]
    )


def test_output_tokens_of_a_resumed_choice_are_replayed_in_chunks_not_sampled() -> None:
    engine = PaperEngine(blocks=40, budget=12)
    output_tokens = answer(PROMPT, 7, 20)
    starts = [ChoiceStart(3, 7, tuple(output_tokens[:15]))]
    engine.submit(request("a", PROMPT, starts=starts, max_tokens=20))
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("a", tokens=range(10))])
    assert not engine.deltas  # no token is sampled from the trunk's last row: the first token is known
    assert chunks(engine.step()) == PlannedChunks(tails=[TailSpan("a", choice=3, tokens=range(12))])
    assert chunks(engine.step()) == PlannedChunks(tails=[TailSpan("a", choice=3, tokens=range(12, 15))])
    assert engine.outputs["a", 3] == output_tokens[15:16]
    engine.run_to_end()
    assert engine.outputs["a", 3] == output_tokens[15:]
    assert engine.counters.replayed_tokens == 14


def test_fresh_and_resumed_choices_of_one_group_run_side_by_side() -> None:
    engine = PaperEngine(blocks=40, budget=64)
    starts = [ChoiceStart(0, 0), ChoiceStart(1, 1, tuple(answer(PROMPT, 1, 5)))]
    engine.submit(request("a", PROMPT, starts=starts, max_tokens=8))
    engine.step()
    assert chunks(engine.step()) == PlannedChunks(
        tails=[TailSpan("a", choice=0, tokens=range(1)), TailSpan("a", choice=1, tokens=range(5))]
    )
    engine.run_to_end()
    assert engine.outputs["a", 0] == answer(PROMPT, 0, 8)
    assert engine.outputs["a", 1] == answer(PROMPT, 1, 8)[5:]


def test_a_prefix_hit_shares_full_blocks_and_runs_the_rest() -> None:
    engine = PaperEngine(blocks=20)
    first = engine.submit(request("a", PROMPT))
    engine.step()
    second = engine.submit(request("b", (*PROMPT[:8], 50, 51, 52)))
    assert chunks(engine.step()) == PlannedChunks(
        tails=[TailSpan("a", choice=0, tokens=range(1))], trunks=[TrunkSpan("b", tokens=range(8, 11))]
    )
    assert tables(first) == BlockTables(trunk=[0, 1, 2], tails=[[3]])
    assert tables(second) == BlockTables(trunk=[0, 1, 4], tails=[[5]])
    assert engine.pool.holders() == {0: 2, 1: 2, 2: 1, 3: 1, 4: 1, 5: 1}
    assert second.facts.num_cached == 8
    engine.run_to_end()
    engine.assert_outputs("b", (*PROMPT[:8], 50, 51, 52), n=1, tokens=8)


def test_the_last_prompt_token_is_computed_even_if_all_blocks_are_cached() -> None:
    engine = PaperEngine(blocks=20)
    engine.serve(request("a", PROMPT[:8]))
    again = engine.submit(request("b", PROMPT[:8]))
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("b", tokens=range(4, 8))])
    # Block 0 is shared; block 1 holds the same tokens, but is computed again, elsewhere: blocks are never rewritten.
    assert again.trunk.blocks[0] == 0
    assert again.trunk.blocks[1] != 1
    engine.run_to_end()
    engine.assert_outputs("b", PROMPT[:8], n=1, tokens=8)


def test_a_block_that_is_not_full_is_never_published() -> None:
    engine = PaperEngine(blocks=20)
    engine.serve(request("a", PROMPT))  # 4 + 4 + 2
    assert engine.pool.num_idle == 2
    engine.submit(request("b", (*PROMPT, 50, 51)))
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("b", tokens=range(8, 12))])


def test_a_block_is_published_when_the_chunk_that_completes_it_is_done() -> None:
    engine = PaperEngine(blocks=20, budget=6)
    first = engine.submit(request("a", PROMPT))
    engine.step()  # 0..6
    assert engine.pool.find(first.trunk.names) == [0]
    engine.step()  # 6..10
    assert engine.pool.find(first.trunk.names) == [0, 1]


def test_blocks_of_another_salt_are_not_shared() -> None:
    engine = PaperEngine(blocks=20)
    engine.serve(request("a", PROMPT, cache_salt="own"))
    other = engine.submit(request("b", PROMPT, cache_salt="other"))
    same = engine.submit(request("c", PROMPT, cache_salt="own"))
    engine.step()
    assert (other.facts.num_cached, same.facts.num_cached) == (0, 8)


def test_a_group_with_prompt_logprobs_ignores_hits_and_computes_its_prompt() -> None:
    engine = PaperEngine(blocks=20)
    engine.serve(request("a", PROMPT))
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=0)
    group = engine.submit(request("b", PROMPT, sampling=sampling))
    assert chunks(engine.step()) == PlannedChunks(trunks=[TrunkSpan("b", tokens=range(10))])
    assert group.facts.num_cached == 0


def test_a_hit_on_idle_blocks_reduces_the_number_of_free_blocks() -> None:
    engine = PaperEngine(blocks=7)
    engine.serve(request("a", PROMPT, max_tokens=1))  # 0 and 1 idle: 7 free
    engine.submit(request("b", range(50, 58), max_tokens=9))  # 2 + 1 blocks: 4 free
    engine.step()
    assert (engine.pool.num_free, engine.pool.num_idle) == (4, 2)
    engine.submit(request("c", PROMPT, n=2))  # 2 hits, 1 + 2 to take; 4 - 2 are left for them
    engine.step()
    assert [group.request.request_id for group in engine.scheduler.waiting.ready] == ["c"]
    engine.run_to_end()
    engine.assert_outputs("c", PROMPT, n=2, tokens=8)


def test_a_trunk_continues_right_after_its_hit_even_if_another_run_fits_better() -> None:
    engine = PaperEngine(blocks=40)
    engine.submit(request("a", PROMPT[:8], n=3, max_tokens=1))  # 0, 1 and 2, 3, 4
    engine.submit(request("stays", [50]))  # 5 and 6
    engine.submit(request("x", [51], max_tokens=1))  # 7 and 8
    engine.submit(request("stays too", [52]))  # 9 and 10
    engine.step()  # idle: 0, 1; free: 2..4, 7..8 and 11..39
    group = engine.submit(request("b", (*PROMPT[:8], *range(60, 67))))
    engine.step()
    assert tables(group) == BlockTables(trunk=[0, 1, 2, 3], tails=[[4]])


def test_a_trunk_that_does_not_fit_after_its_hit_gets_one_run_elsewhere() -> None:
    engine = PaperEngine(blocks=40)
    engine.submit(request("a", PROMPT[:8], max_tokens=1))
    engine.serve(request("x", range(50, 58), max_tokens=1))  # idle: 0, 1 of a and 3, 4 of x; free: 2 and 5..39
    long = engine.submit(request("b", (*PROMPT, *range(60, 70))))
    engine.step()
    # 2 follows the hit, but three blocks are needed in one run
    assert tables(long) == BlockTables(trunk=[0, 1, 5, 6, 7], tails=[[2]])


def test_a_tail_takes_the_smallest_hole_and_leaves_long_runs_to_trunks() -> None:
    engine = PaperEngine(blocks=40)
    engine.submit(request("x", [50], max_tokens=1))  # 0 and 1
    group = engine.submit(request("a", [51]))  # 2 and 3
    engine.steps(6)
    assert tables(group) == BlockTables(trunk=[2], tails=[[3, 0]])  # not 4, which follows 3


def test_the_last_sibling_frees_the_trunk() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2))
    engine.step()
    engine.stop("a", 0)
    assert tables(group) == BlockTables(trunk=[0, 1, 2], tails=[[4]])
    engine.stop("a", 1)
    assert engine.pool.num_held == 0
    assert engine.pool.num_idle == 2
    assert not engine.scheduler.plan()


@pytest.mark.parametrize("steps", range(5))
def test_an_aborted_group_leaves_nothing_behind_whenever_it_is_aborted(steps: int) -> None:
    engine = PaperEngine(blocks=20, budget=6)
    engine.submit(request("a", PROMPT, n=2))
    engine.steps(steps)
    engine.abort("a")
    assert engine.pool.num_held == 0
    assert len(engine.scheduler.waiting.ready) == 0
    assert not engine.scheduler.plan()


def test_a_sequence_waits_runs_and_finishes_as_its_blocks_come_and_go() -> None:
    engine = PaperEngine(blocks=20)
    group = engine.submit(request("a", PROMPT, n=2))
    sequences = list(group.sequences)
    assert [sequence.state for sequence in sequences] == [SequenceState.WAITING] * 2
    engine.step()
    assert [sequence.state for sequence in sequences] == [SequenceState.RUNNING] * 2
    engine.run_to_end()
    assert [sequence.state for sequence in sequences] == [SequenceState.FINISHED] * 2
    assert [sequence.blocks for sequence in sequences] == [[], []]


def groups(*priorities: int) -> list[Group]:
    return [group_of(request(f"g{i}", [1], priority=p), i) for i, p in enumerate(priorities)]


def queue_of(groups: list[Group]) -> AgeOrdered[Group]:
    queue = AgeOrdered[Group]()
    for group in groups:
        queue.add(group)
    return queue


def names(queue: AgeOrdered[Group]) -> list[str]:
    return [str(group.request.request_id) for group in queue]


def test_groups_are_queued_by_priority_number_and_then_by_arrival() -> None:
    for queued in (groups(5, 0, -1, 5, 0), groups(5, 0, -1, 5, 0)[::-1]):
        assert names(queue_of(queued)) == ["g2", "g1", "g4", "g0", "g3"]


def test_a_group_that_is_added_again_gets_its_previous_place() -> None:
    one, two, three = groups(0, 0, 0)
    queue = queue_of([one, two, three])
    queue.remove(two)
    assert names(queue) == ["g0", "g2"]
    queue.add(two)
    assert names(queue) == ["g0", "g1", "g2"]


def test_choices_are_queued_by_group_and_then_by_rank() -> None:
    one, two = (group_of(request(name, [1], n=2), arrival) for arrival, name in enumerate("ab"))
    queue = AgeOrdered[ChoiceSequence]()
    for sequence in (*two.sequences, *one.sequences):
        queue.add(sequence)
    assert list(queue) == [*one.sequences, *two.sequences]


def test_a_group_that_is_not_in_the_queue_cannot_be_removed() -> None:
    one, two, three = groups(0, 0, 0)
    queue = queue_of([one, three])
    for absent in (two, groups(0)[0]):  # the second has the age of one that is there
        with pytest.raises(ValueError, match="no such item of age"):
            queue.remove(absent)
    assert names(queue) == ["g0", "g2"]


def test_the_oldest_is_at_the_start_of_the_queue() -> None:
    queue = AgeOrdered[Group]()
    assert (queue.oldest(), len(queue)) == (None, 0)
    one, two = groups(0, 0)
    queue.add(one)
    queue.add(two)
    assert (queue.oldest(), len(queue)) == (one, 2)


def test_a_group_is_not_admitted_when_the_budget_is_spent() -> None:
    engine = PaperEngine(blocks=40, budget=8)
    engine.submit(request("a", PROMPT))
    late = engine.submit(request("b", [50]))
    engine.step()
    assert tables(late) == BlockTables(trunk=[], tails=[[]])
    engine.step()
    assert late in engine.scheduler.running.groups


def test_a_group_is_admitted_with_all_its_choices_or_not_at_all() -> None:
    engine = PaperEngine(blocks=8)
    small = engine.submit(request("a", PROMPT, n=2))  # 3 + 2 blocks, 3 are left
    large = engine.submit(request("b", range(50, 54), n=3))  # 1 + 3
    engine.step()
    assert list(engine.scheduler.running.groups) == [small]
    assert tables(large) == BlockTables(trunk=[], tails=[[], [], []])
    assert states(large) == ["waiting"] * 3
    engine.abort("a")
    engine.step()
    assert list(engine.scheduler.running.groups) == [large]
    assert states(large) == ["running"] * 3


def test_the_number_of_running_choices_is_limited_over_all_groups() -> None:
    engine = PaperEngine(blocks=40, max_num_seqs=4)
    first = engine.submit(request("a", PROMPT, n=3))
    second = engine.submit(request("b", PROMPT, n=2))
    engine.step()
    assert list(engine.scheduler.running.groups) == [first]
    engine.stop("a", 0)
    engine.step()
    assert list(engine.scheduler.running.groups) == [first, second]


def test_a_small_group_does_not_pass_a_large_one() -> None:
    engine = PaperEngine(blocks=8)
    engine.submit(request("a", PROMPT))  # 4 blocks, 4 are left
    engine.submit(request("b", PROMPT[::-1], n=3))  # needs 6
    engine.submit(request("c", [1]))  # needs 2
    engine.step()
    assert [group.request.request_id for group in engine.scheduler.waiting.ready] == ["b", "c"]


def test_a_refused_group_is_admitted_once_it_has_fewer_choices() -> None:
    engine = PaperEngine(blocks=8)
    engine.submit(request("a", PROMPT))  # 4 blocks, 4 are left
    late = engine.submit(request("b", PROMPT[::-1], n=2))  # needs 5
    engine.step()
    engine.step()
    assert late in engine.scheduler.waiting.all()
    engine.stop("b", 1)
    engine.step()
    assert late in engine.scheduler.running.groups


def test_a_refused_group_is_admitted_once_its_prefix_is_cached() -> None:
    engine = PaperEngine(blocks=6)
    engine.submit(request("a", PROMPT[:8]))  # 3 blocks, 3 are left
    late = engine.submit(request("b", (*PROMPT[:8], 50)))  # needs 4, or 2 after what a has computed
    engine.step()
    assert late in engine.scheduler.waiting.all()
    engine.step()
    assert late in engine.scheduler.running.groups


def test_lower_priority_numbers_are_admitted_first() -> None:
    engine = PaperEngine(blocks=5)
    engine.submit(request("a", PROMPT, priority=1))
    engine.submit(request("b", PROMPT[::-1], priority=0))
    engine.step()
    assert [group.request.request_id for group in engine.scheduler.running.groups] == ["b"]
