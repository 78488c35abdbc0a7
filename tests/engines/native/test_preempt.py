"""The order in which choices lose their blocks and get blocks again."""

from motet.engines.native.scheduling.running_groups import youngest_holder
from motet.engines.native.step.sequence import Group
from motet.types import ChoiceStart
from tests.engines.native.paper import (
    BlockTables,
    PaperEngine,
    PlannedChunks,
    TailSpan,
    answer,
    chunks,
    group_of,
    request,
    states,
    tables,
)

PROMPT = tuple(range(10))


def running(name: str, arrival: int, *, n: int, priority: int = 0) -> Group:
    """Returns a group whose trunk and tails have one block each."""
    group = group_of(request(name, [1, 2, 3], n=n, priority=priority), arrival)
    group.trunk.blocks = [100 * arrival]
    for sequence in group.sequences:
        sequence.blocks = [100 * arrival + 1 + sequence.rank]
    return group


def victims(groups: list[Group], growing: Group, choice: int) -> list[str]:
    """Returns the tails and trunks that are taken for one growing choice, in order, up to its own tail. `groups` has
    the oldest group first."""
    order, running = [], list(groups)
    while True:
        victim = youngest_holder(running[-1])
        if victim is None:
            order.append(f"trunk of {running.pop().request.request_id}")
            continue
        order.append(f"{victim.group.request.request_id}{victim.rank}")
        victim.blocks = []
        if victim is growing.sequences[choice]:
            return order


def test_the_youngest_group_loses_its_tails_youngest_first_and_then_its_trunk() -> None:
    a, b, c = running("a", 0, n=2), running("b", 1, n=2), running("c", 2, n=1)
    assert victims([a, b, c], a, 0) == ["c0", "trunk of c", "b1", "b0", "trunk of b", "a1", "a0"]


def test_older_groups_and_older_siblings_are_never_touched() -> None:
    a, b = running("a", 0, n=2), running("b", 1, n=3)
    assert victims([a, b], b, 1) == ["b2", "b1"]


def test_preempted_siblings_have_no_blocks_to_lose() -> None:
    a, b = running("a", 0, n=3), running("b", 1, n=1)
    a.sequences[2].blocks = []
    b.sequences[0].blocks = []
    assert victims([a, b], a, 0) == ["trunk of b", "a1", "a0"]


# Preemption: pools of few blocks, so that choices take blocks from each other.


def test_the_youngest_choice_loses_its_tail_and_replays_its_output_tokens() -> None:
    engine = PaperEngine(blocks=6)
    group = engine.submit(request("a", PROMPT[:4], n=3, max_tokens=8))  # 1 + 3 blocks, later 1 + 6
    engine.steps(5)
    assert tables(group) == BlockTables(trunk=[0], tails=[[1], [2], [3]])
    plan = engine.step()  # 0 and 1 take blocks 4 and 5; 2 gets none
    assert tables(group) == BlockTables(trunk=[0], tails=[[1, 4], [2, 5], []])
    assert chunks(plan) == PlannedChunks(
        tails=[TailSpan("a", choice=0, tokens=range(4, 5)), TailSpan("a", choice=1, tokens=range(4, 5))]
    )
    engine.step()
    engine.step()  # the others have their eighth token
    assert chunks(engine.step()) == PlannedChunks(tails=[TailSpan("a", choice=2, tokens=range(5))])
    engine.run_to_end()
    engine.assert_outputs("a", PROMPT[:4], n=3, tokens=8)
    assert (engine.counters.preemptions, engine.counters.replayed_tokens) == (1, 4)


def test_a_later_group_with_a_better_priority_takes_blocks_first() -> None:
    engine = PaperEngine(blocks=5)
    late = engine.submit(request("a", PROMPT[:4], priority=1))  # 1 + 1 blocks
    engine.step()
    starts = [ChoiceStart(0, 0, tuple(answer(range(50, 54), 0, 2)))]
    first = engine.submit(request("b", range(50, 54), starts=starts, priority=0))  # 1 + 1
    engine.steps(4)
    assert (tables(late), tables(first)) == (BlockTables(trunk=[0], tails=[[1]]), BlockTables(trunk=[2], tails=[[3]]))
    engine.step()  # both need block 4
    assert (tables(late), tables(first)) == (BlockTables(trunk=[0], tails=[[]]), BlockTables(trunk=[2], tails=[[3, 4]]))
    engine.run_to_end()
    engine.assert_outputs("a", PROMPT[:4], n=1, tokens=8)


def test_a_preempted_choice_restarts_only_when_the_others_can_continue() -> None:
    engine = PaperEngine(blocks=8)
    group = engine.submit(request("a", PROMPT[:4], n=3, max_tokens=12))
    engine.steps(10)
    assert states(group) == ["running", "running", "waiting"]  # 1 + 3 + 3 blocks
    engine.stop("a", 1)  # 4 blocks are free: 3 for the output of choice 2, 1 for choice 0 to grow
    engine.step()
    assert states(group) == ["running", "running"]


def test_a_preempted_choice_waits_if_it_would_be_preempted_again_at_once() -> None:
    engine = PaperEngine(blocks=6)
    group = engine.submit(request("a", PROMPT[:4], n=3, max_tokens=12))
    engine.steps(6)
    assert states(group) == ["running", "running", "waiting"]  # 1 + 2 + 2 blocks; choice 2 has 5 tokens
    assert engine.pool.num_free == 1
    engine.step()
    assert states(group) == ["running", "running", "waiting"]


def test_only_a_more_urgent_group_is_admitted_while_a_preempted_choice_of_its_client_waits() -> None:
    engine = PaperEngine(blocks=9)
    group = engine.submit(request("a", PROMPT[:4], n=4, max_tokens=12))
    engine.steps(6)
    assert states(group) == ["running"] * 4  # 1 + 4 x 2 blocks
    engine.steps(4)
    assert states(group) == ["running", "running", "waiting", "waiting"]  # 1 + 2 x 3 blocks
    engine.submit(request("equal", [50], max_tokens=1))
    engine.submit(request("urgent", [50], max_tokens=1, priority=-1))
    engine.step()
    assert engine.outputs["urgent", 0]
    assert "equal" in engine.groups
    assert states(group) == ["running", "running", "waiting", "waiting"]
    engine.run_to_end()
    engine.assert_outputs("equal", (50,), n=1, tokens=1)


def test_a_group_that_lost_its_trunk_waits_in_its_previous_place_and_restarts() -> None:
    engine = PaperEngine(blocks=7)
    engine.submit(request("a", PROMPT[:8], max_tokens=21))  # grows to 2 + 5 blocks
    young = engine.submit(request("b", range(50, 54), n=2, max_tokens=12))  # 1 + 2 blocks
    engine.submit(request("c", [60], max_tokens=3))
    engine.steps(5)
    assert tables(young) == BlockTables(trunk=[3], tails=[[4], [5]])
    engine.step()  # a takes block 6, b's first choice takes its sibling's
    assert tables(young) == BlockTables(trunk=[3], tails=[[4, 5], []])
    engine.steps(4)
    assert tables(young) == BlockTables(trunk=[3], tails=[[], []])  # a has its third tail block
    engine.steps(7)
    assert tables(young) == BlockTables(trunk=[3], tails=[[], []])  # its fourth was free
    engine.step()
    assert tables(young) == BlockTables(trunk=[], tails=[[], []])
    assert [group.request.request_id for group in engine.scheduler.waiting.ready] == ["b", "c"]
    engine.run_to_end()
    engine.assert_outputs("a", PROMPT[:8], n=1, tokens=21)
    engine.assert_outputs("b", tuple(range(50, 54)), n=2, tokens=12)
    engine.assert_outputs("c", (60,), n=1, tokens=3)
    assert engine.counters.prompt_tokens == 8 + 4 + 1  # each prompt once, though one was read twice
    assert engine.counters.prefill_tokens > 13


def test_a_group_with_more_output_than_all_blocks_hold_restarts_in_parts() -> None:
    """The bug: it was never admitted again, as all its tails at once needed more blocks than the engine has."""
    engine = PaperEngine(blocks=17, budget=32)
    engine.submit(request("a", PROMPT, max_tokens=54))  # up to 3 + 14 blocks
    group = engine.submit(request("b", range(50, 54), n=6, max_tokens=60))
    most_blocks = 0
    while engine.groups:
        assert engine.step()
        most_blocks = max(most_blocks, sum(-(-len(s.output_tokens) // 4) for s in group.sequences))
    assert most_blocks > 17
    engine.assert_outputs("a", PROMPT, n=1, tokens=54)
    engine.assert_outputs("b", tuple(range(50, 54)), n=6, tokens=60)


def test_a_resumed_group_larger_than_the_pool_is_served_in_parts() -> None:
    engine = PaperEngine(blocks=17, budget=32)
    answers = [answer(PROMPT[:4], seed, 24) for seed in range(6)]
    starts = [ChoiceStart(i, i, tuple(answers[i][:20])) for i in range(6)]  # 6 x 5 blocks
    group = engine.submit(request("a", PROMPT[:4], starts=starts, max_tokens=24))
    engine.step()
    assert states(group) == ["running"] * 3 + ["waiting"] * 3  # 1 + 3 x 5 blocks of 17
    engine.run_to_end()
    for index in range(6):
        assert engine.outputs["a", index] == answers[index][20:]
