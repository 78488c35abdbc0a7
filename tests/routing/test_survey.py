"""The facts for choosing a worker: loads, cached prefixes, sessions and refusals of all ready workers."""

import msgspec
import pytest

from motet.block_names import block_names
from motet.engine import WorkerState
from motet.routing.choosing.survey import COMPARE_ALL, Survey, survey
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.serving import WorkKind
from motet.testing.fake_engine import fake_info
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest
from tests.clock import Clock
from tests.engines.native.work import lines
from tests.routing.cells import CellScene
from tests.routing.scene import cache_prefix, group, worker

pytestmark = pytest.mark.anyio

BLOCK = fake_info().block_size


def fleet(*names: str, clock: Clock | None = None) -> Fleet:
    return Fleet([worker(name)[0] for name in names], clock=clock or Clock())


def survey_of(fleet: Fleet, request: GenerateRequest, work: WorkKind = WorkKind.GENERATE) -> Survey:
    found = survey(fleet, work, request=request)
    assert found is not None
    return found


def test_without_ready_workers_the_survey_is_empty() -> None:
    assert survey(Fleet(), WorkKind.GENERATE, request=group()) is None
    workers = fleet("prefill-0", "decode-0")
    assert survey(workers, WorkKind.PREFILL, request=group(), excluding=["prefill-0"]) is None
    for state in set(WorkerState) - {WorkerState.READY}:
        workers.mark("decode-0", state)
        assert survey(workers, WorkKind.GENERATE, request=group()) is None


def test_only_workers_for_such_work_are_considered_and_no_excluded_ones() -> None:
    workers = fleet("prefill-0", "decode-0", "decode-1", "both-0")
    assert [one.id for one in survey_of(workers, group()).candidates] == ["decode-0", "decode-1", "both-0"]
    assert [one.id for one in survey_of(workers, group(), WorkKind.PREFILL).candidates] == ["prefill-0"]
    rest = survey(workers, WorkKind.GENERATE, request=group(), excluding=["decode-1", "unknown"])
    assert rest is not None
    assert [one.id for one in rest.candidates] == ["decode-0", "both-0"]
    assert [member.id for member, _ in rest.compared] == ["decode-0", "both-0"]


def test_the_needs_of_a_group_are_its_choices_and_prompt() -> None:
    needs = survey_of(fleet("both-0"), group(n=5, prompt_tokens=33)).needs
    assert (needs.work, needs.choices, needs.prompt_tokens) == (WorkKind.GENERATE, 5, 33)
    assert needs.needs_prompt


async def test_a_prompt_with_a_ticket_need_not_be_computed() -> None:
    cell = CellScene()
    ticket: Ticket = await cell.router.prefill(group())
    assert not survey_of(fleet("both-0"), group(ticket=ticket)).needs.needs_prompt
    await cell.router.release(ticket)


def test_candidates_have_the_loads_of_their_workers() -> None:
    workers = fleet("both-0", "both-1")
    member = workers.members[1]
    member.load.given_choices, member.load.trunk_blocks, member.load.tail_blocks = 3, 7, 5
    member.load.prompts.add(90)
    member.load.record_report(10)
    idle, busy = survey_of(workers, group()).candidates
    assert (idle.open_choices, idle.trunk_blocks, idle.tail_blocks, idle.queued_tokens) == (0, 0, 0, 0)
    assert (busy.open_choices, busy.trunk_blocks, busy.tail_blocks, busy.queued_tokens) == (10, 7, 5, 90)
    assert (busy.max_choices, busy.num_blocks) == (fake_info().max_num_seqs, fake_info().num_blocks)


def test_cached_tokens_of_the_prompt_lower_the_backlog() -> None:
    workers = fleet("both-0", "both-1", "both-2")
    cache_prefix(workers, "both-1", group(), 4 * BLOCK)
    cache_prefix(workers, "both-2", group(prompt_tokens=500), 10 * BLOCK)
    found = survey_of(workers, group())
    assert [one.cached_tokens for one in found.candidates] == [0, 64, 160]
    assert [found.backlog(place).own_tokens for place in range(3)] == [200, 136, 40]


def test_the_last_token_of_a_prompt_is_never_cached() -> None:
    """The logits of this token are needed, so it is always computed: a block that ends with it does not count."""
    workers, request = fleet("both-0"), group(prompt_tokens=2 * BLOCK)
    cache_prefix(workers, "both-0", request, 2 * BLOCK)
    assert survey_of(workers, request).candidates[0].cached_tokens == BLOCK


def test_groups_of_another_salt_find_nothing_cached() -> None:
    workers, request = fleet("both-0"), group()
    salted = msgspec.structs.replace(request, cache_salt="mine")
    cache_prefix(workers, "both-0", request, 4 * BLOCK)
    assert survey_of(workers, salted).candidates[0].cached_tokens == 0
    workers.cached_blocks.stored("both-0", block_names(request.prompt[: 2 * BLOCK], BLOCK, salt="mine"))
    assert survey_of(workers, salted).candidates[0].cached_tokens == 2 * BLOCK
    assert survey_of(workers, request).candidates[0].cached_tokens == 4 * BLOCK


def test_the_session_s_worker_is_marked() -> None:
    workers = fleet("both-0", "both-1")
    workers.sessions[WorkKind.GENERATE].record("mine", "both-1")
    request = msgspec.structs.replace(group(), session_id="mine")
    assert [one.has_session for one in survey_of(workers, request).candidates] == [False, True]
    assert [one.has_session for one in survey_of(workers, group()).candidates] == [False, False]
    workers.put(worker("both-1")[0])
    assert [one.has_session for one in survey_of(workers, request).candidates] == [False, False]


def test_a_worker_that_has_just_refused_is_avoided() -> None:
    clock = Clock()
    workers = fleet("both-0", "both-1", clock=clock)
    workers.members[0].faults.record_refusal()
    assert [one.avoid for one in survey_of(workers, group()).candidates] == [True, False]
    clock.now_s += 0.5
    assert [one.avoid for one in survey_of(workers, group()).candidates] == [False, False]


def test_the_prompt_speed_of_a_worker_is_part_of_its_backlog() -> None:
    clock = Clock()
    workers = fleet("both-0", clock=clock)
    prompts = workers.members[0].load.prompts
    prompt = prompts.add(1000)
    clock.now_s += 2.0
    prompts.finish(prompt, computed_tokens=1000)
    backlog = survey_of(workers, group()).backlog(0)
    assert (backlog.own_tokens, backlog.waiting_tokens, backlog.tokens_per_s) == (200, 0, 500.0)


@pytest.mark.slow
def test_of_many_workers_some_are_considered_and_all_that_are_special_for_the_group() -> None:
    names = [f"both-{number}" for number in range(COMPARE_ALL + 72)]
    workers = fleet(*names)
    cache_prefix(workers, "both-150", group(), BLOCK)
    workers.sessions[WorkKind.GENERATE].record("mine", "both-199")
    found = survey_of(workers, msgspec.structs.replace(group(), session_id="mine"))
    assert len(found.candidates) < len(names)
    special = {one.id for one in found.candidates if one.cached_tokens or one.has_session}
    assert special == {"both-150", "both-199"}
    assert [member.id for member, _ in found.compared] == [one.id for one in found.candidates]


def test_the_worker_with_most_cached_tokens_is_considered_whatever_its_block_size() -> None:
    many = fleet(*(f"both-{number}" for number in range(2 * COMPARE_ALL)))
    many.put(worker("both-wide", info=msgspec.structs.replace(fake_info(), block_size=4 * BLOCK))[0])
    request = group(prompt_tokens=10 * BLOCK)
    for member in many.members[:-1]:
        cache_prefix(many, member.id, request, 6 * BLOCK)
    many.cached_blocks.stored(
        "both-wide", block_names(request.prompt[: 8 * BLOCK], 4 * BLOCK, salt="")
    )  # two of its blocks
    (wide,) = (one for one in survey_of(many, request).candidates if one.id == "both-wide")
    assert wide.cached_tokens == 8 * BLOCK


@pytest.mark.slow
def test_a_decision_is_as_much_work_in_a_fleet_of_one_thousand_as_of_250() -> None:
    """A decision used to go through all workers four times, which took 4 ms at 10,000."""

    def work(members: int) -> int:
        large = fleet(*(f"both-{number}" for number in range(members)))
        request = group(prompt_tokens=10 * BLOCK)
        for member in large.members:
            cache_prefix(large, member.id, request, 2 * BLOCK)
        survey_of(large, request)  # finds the eligible workers, which are kept until a member changes
        return lines(lambda: survey_of(large, request))

    assert work(1000) < 1.1 * work(250)
