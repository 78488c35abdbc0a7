"""One prefill, one ticket, one transfer: the costs of a group, the blocks that are held, and equal answers.

The transfers are scripted, but the cores and their memory are real. The reference is a single core.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from motet.ids import RequestId
from motet.transfer.orders import FailureKind
from tests.engines.native.conftest import MakePair
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.pair import CorePair, alone, tokens, with_ticket

pytestmark = pytest.mark.slow

Tiny = Callable[[str], Path]
FAMILIES = ("llama", "mistral", "gemma2")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_choices_after_a_transfer_equal_those_of_a_single_engine(family: str, dtype: str, tiny: Tiny) -> None:
    folder = tiny(family)
    requests = [
        group(f"n={n} length={length}", prompt_of(length, seed=n), n=n, seed=100 * n, logprobs=2)
        for n, length in ((1, 2), (1, 64), (3, 65), (8, 131), (32, 50))
    ]
    pair = CorePair(folder, dtype=dtype)
    for request in requests:
        pair.hand_over(request)
    pair.finish()
    names = [request.request_id for request in requests]
    assert tokens(pair.outcomes, names) == alone(folder, *requests, dtype=dtype)
    pair.check_empty()


def test_a_group_costs_one_prefill_one_pull_and_one_recomputed_token_whatever_n_is(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=32, seed=5)
    pair.hand_over(request)
    pair.finish()
    p, d = pair.p.stats(), pair.d.stats()
    assert (p.prefills, p.prefill_tokens, p.generated_tokens) == (1, 99, 0)
    assert (d.transfers, d.recomputed_tokens, d.prefill_tokens) == (1, 1, 1)
    assert d.transfer_bytes == 13 * pair.d.info.bytes_per_block  # 99 tokens in blocks of 8
    assert sum(d.transfer_seconds) == 1


def test_the_engine_waits_for_the_device_before_transfers_use_its_memory(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=2)
    ticket = pair.prefill(request)
    assert pair.runners["P"].settled == 1
    pair.submit(with_ticket(request, ticket))
    pair.step_d()
    assert (pair.runners["D"].settled, len(pair.d_transfers.orders)) == (1, 1)
    pair.finish()


def test_a_prompt_cached_on_decode_shrinks_the_pull(pair: CorePair) -> None:
    common, own = prompt_of(64, 1), prompt_of(40, 2)
    first = group("first", common + prompt_of(9, 3), n=2)
    second = group("second", common + own, n=3, seed=7)
    pair.submit(first)
    pair.finish()
    pair.hand_over(second)
    pair.step_d()
    (order,) = pair.d_transfers.orders.values()
    assert len(order.pairs) == 5, "103 tokens are 13 blocks, and 8 of them are cached"
    pair.finish()
    assert pair.d.stats().pull_blocks_avoided == 8
    pair.check_same(second)


def test_a_prompt_fully_cached_on_decode_is_not_pulled_and_its_lease_ends(pair: CorePair) -> None:
    request = group("g", prompt_of(65), n=2)
    pair.submit(group("before", prompt_of(65)))
    pair.finish()
    pair.hand_over(request)
    pair.finish()
    stats = pair.d.stats()
    assert (stats.transfers, stats.pulls_avoided, stats.pull_blocks_avoided) == (0, 1, 8)
    pair.check_same(request)


def test_a_prompt_cached_on_prefill_is_not_computed_again(pair: CorePair) -> None:
    request = group("a", prompt_of(65))
    first = pair.prefill(request)
    second = pair.prefill(group("b", prompt_of(65)))
    assert second.remote_block_ids == first.remote_block_ids
    assert (first.cached_tokens, second.cached_tokens) == (0, 64)
    assert pair.p.stats().prefill_tokens == 64
    pair.p.release(first)
    pair.submit(with_ticket(request, second))
    pair.finish()
    outcome = pair.outcomes["a"]
    assert outcome.prompt is not None
    assert outcome.prompt.cached_tokens == 64, "tokens that were not computed for this request"


@pytest.mark.parametrize("kind", [FailureKind.STALE, FailureKind.PEER_LOST])
def test_the_prompt_of_a_failed_pull_is_computed_instead(kind: FailureKind, pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=5, seed=3)
    ticket = pair.hand_over(request)
    pair.step_d()
    pair.d_transfers.fail(0, kind)
    pair.finish()
    pair.check_same(request)
    stats = pair.d.stats()
    assert (stats.transfers, stats.recomputed_tokens) == (0, 100)
    assert stats.transfer_failures == {kind: 1}
    pair.p.release(ticket)


def test_a_late_write_of_a_pull_that_timed_out_changes_no_answer(make_pair: MakePair) -> None:
    pair = make_pair(decode_blocks=80)
    request = group("g", prompt_of(100), n=2, seed=3)
    others = [group(f"o{i}", prompt_of(60, 40 + i), n=2, seed=9 + i, max_tokens=60) for i in range(4)]
    ticket = pair.hand_over(request)
    pair.step_d()
    pair.d_transfers.fail(0, FailureKind.TIMEOUT, settled=False)
    pair.submit(*others)
    for _ in range(30):
        pair.step_d()
    stats = pair.d.stats()
    assert (stats.pulls_open, stats.blocks_pulling) == (1, 13)
    pair.d_transfers.settle(0)  # the bytes arrive now, in blocks that no other group can have taken
    pair.finish()
    pair.check_same(request, *others)
    pair.p.release(ticket)


def test_the_blocks_of_an_aborted_group_stay_with_its_pull_until_it_is_settled(make_pair: MakePair) -> None:
    pair = make_pair(decode_blocks=70)
    request = group("g", prompt_of(100), n=2)
    other = group("o", prompt_of(200, 8), n=2, seed=4)
    pair.hand_over(request)
    pair.step_d()
    pair.d.abort(RequestId("g"))
    pair.d.check()
    assert pair.d_transfers.abandoned == {0}
    assert (pair.d.stats().blocks_used, pair.d.stats().blocks_pulling) == (13, 13)
    pair.submit(other)
    for _ in range(5):
        pair.step_d()
    pair.d_transfers.settle(0)
    pair.finish()
    pair.check_same(other)


def test_a_pull_that_lands_after_its_group_has_ended_frees_the_blocks(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=2)
    pair.hand_over(request)
    pair.step_d()
    pair.d_transfers.land(0)
    pair.d.abort(RequestId("g"))
    pair.step_d()


def test_a_group_that_ends_while_it_waits_for_blocks_releases_its_ticket(make_pair: MakePair) -> None:
    pair = make_pair(decode_blocks=66)
    big = group("big", prompt_of(400, 5), n=2, max_tokens=60)
    request = group("g", prompt_of(100), n=2)
    pair.submit(big)
    pair.step_d()
    ticket = pair.hand_over(request)
    pair.step_d()
    assert pair.d_transfers.expected == [ticket]
    assert not pair.d_transfers.orders
    pair.d.abort(RequestId("g"))
    assert pair.d_transfers.released == [ticket]
    pair.finish()


def test_a_group_that_is_preempted_while_it_pulls_gets_the_same_answers(make_pair: MakePair) -> None:
    pair = make_pair(decode_blocks=66)
    old = group("old", prompt_of(200, 5), n=4, seed=50, max_tokens=100)
    young = group("young", prompt_of(100), n=2, seed=3)
    pair.submit(old)
    pair.step_d()
    pair.hand_over(young)
    while pair.d.stats().preemptions == 0 or pair.d_transfers.abandoned == set():
        pair.step_d()
    assert pair.d.stats().blocks_pulling == 13
    pair.d_transfers.settle(0)
    pair.finish()
    pair.check_same(old, young)


def test_a_lease_is_held_until_its_last_reader_is_done(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=2)
    ticket = pair.prefill(request, readers=2)
    assert pair.p_transfers.leases_held == 1
    pair.submit(with_ticket(request, ticket))
    pair.finish()
    pair.settle_p()
    assert pair.p.stats().leases == 1
    pair.d_transfers.address = msgspec.structs.replace(pair.d_transfers.address, engine_id="D2")
    pair.submit(with_ticket(group("h", request.prompt, n=3), ticket))
    pair.finish()


def test_a_lease_without_readers_expires_and_its_slot_and_blocks_are_used_again(make_pair: MakePair) -> None:
    pair = make_pair(prefill_blocks=66)
    ticket = pair.prefill(group("g", prompt_of(400)))
    after = group("h", prompt_of(400, 1))
    pair.p.prefill(after)
    assert not pair.p.step().ran, "its blocks are leased"
    assert pair.p.wake_s == pair.now_s + pair.lease_s
    pair.now_s = pair.p.wake_s
    later = pair.step_p_until(lambda tickets: RequestId("h") in tickets)[RequestId("h")]
    assert pair.p.stats().leases_expired == 1
    reused = set(ticket.remote_block_ids) & set(later.remote_block_ids)
    assert reused
    before = dict(zip(ticket.remote_block_ids, ticket.generations, strict=True))
    now = dict(zip(later.remote_block_ids, later.generations, strict=True))
    assert all(now[block] > before[block] for block in reused), "a reader with the old ticket detects the reuse"
    pair.p.release(later)


def test_aborting_a_prefill_ends_its_group_or_its_lease(pair: CorePair) -> None:
    pair.p.prefill(group("running", prompt_of(300)))
    pair.p.step()
    pair.p.abort(RequestId("running"))
    pair.prefill(group("done", prompt_of(300, 1)))
    pair.p.abort(RequestId("done"))


def test_a_worker_that_gets_its_own_ticket_uses_its_prefix_cache(pair: CorePair) -> None:
    request = group("g", prompt_of(97), n=2, seed=4)
    ticket = pair.prefill(request)
    outcomes = run(pair.p, [with_ticket(request, ticket)])
    assert outcomes["g"].tokens == alone(pair.folder, request)["g"]
    assert pair.p.stats().cached_tokens == 96


def test_a_group_with_prompt_logprobs_computes_its_prompt(pair: CorePair) -> None:
    request = group("g", prompt_of(50), n=2, prompt_logprobs=1)
    pair.hand_over(request)
    pair.finish()
    report, alone_report = pair.outcomes["g"].prompt, run(make_core(pair.folder), [request])["g"].prompt
    assert report is not None and alone_report is not None
    assert report.parts == alone_report.parts and report.parts
    assert pair.d.stats().transfers == 0


def test_unread_leases_of_one_client_do_not_stop_the_prompts_of_another(make_pair: MakePair) -> None:
    """The oldest lease ends for the other client, and its reader computes the prompt."""
    pair = make_pair(prefill_blocks=32, max_model_len=120)
    requests = [
        msgspec.structs.replace(group(f"hog{number}", prompt_of(66, seed=number)), client="hog") for number in range(3)
    ]
    tickets = [pair.prefill(request) for request in requests]  # 9 blocks each
    pair.prefill(msgspec.structs.replace(group("other", prompt_of(80, seed=9)), client="other"))  # 10 blocks of 16
    stats = pair.p.stats()
    assert (stats.leases, stats.prefills, stats.blocks_used) == (3, 4, 28)
    pair.submit(with_ticket(requests[0], tickets[0]))
    pair.step_d()
    pair.d_transfers.fail(min(pair.d_transfers.orders), FailureKind.LEASE_ENDED)
    pair.finish()
    pair.check_same(requests[0])
    pair.p.forget_kv()
