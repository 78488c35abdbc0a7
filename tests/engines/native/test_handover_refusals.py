"""An engine refuses to prefill or to fetch some groups, and releases their tickets. It logs each transfer."""

import logging

import msgspec
import pytest

from motet.errors import ContextLengthError, RequestError
from motet.transfer.orders import FailureKind
from motet.transfer.ticket import ClusterKey
from tests.engines.native.drive import group, make_core, prompt_of
from tests.engines.native.pair import CorePair, with_ticket

pytestmark = pytest.mark.slow


def test_a_ticket_for_another_prompt_is_refused_and_released(pair: CorePair) -> None:
    ticket = pair.prefill(group("g", prompt_of(100)))
    with pytest.raises(RequestError, match="not for this prompt") as refused:
        pair.submit(with_ticket(group("h", prompt_of(100, 1)), ticket))
    assert refused.value.param == "kv_transfer_params"
    assert pair.d_transfers.released == [ticket]
    assert not pair.d.busy


def test_the_ticket_of_a_group_that_can_never_run_here_is_released(pair: CorePair) -> None:
    ticket = pair.prefill(group("g", prompt_of(100)))
    too_many = pair.d.info.max_num_seqs + 1
    with pytest.raises(RequestError, match="at most"):
        pair.submit(with_ticket(group("g", prompt_of(100), n=too_many), ticket))
    assert pair.d_transfers.released == [ticket]


def test_an_engine_without_transfers_ignores_the_release_of_a_ticket(pair: CorePair) -> None:
    ticket = pair.prefill(group("g", prompt_of(100)))
    make_core(pair.folder).release(ticket)
    pair.p.release(ticket)


def test_prompts_of_one_token_and_engines_without_transfer_refuse_to_prefill(pair: CorePair) -> None:
    with pytest.raises(ContextLengthError, match="at least 2"):
        pair.p.prefill(group("short", prompt_of(1)))
    single = make_core(pair.folder)
    with pytest.raises(RequestError, match="does not transfer KV"):
        single.prefill(group("g", prompt_of(10)))
    ticket = pair.prefill(group("g", prompt_of(100)))
    with pytest.raises(RequestError, match="--role"):
        single.submit(with_ticket(group("g", prompt_of(100)), ticket))
    assert not single.busy
    pair.p.release(ticket)


def test_a_ticket_without_the_clusters_seal_is_not_used_and_its_worker_not_contacted(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=2)
    ticket = pair.prefill(request)
    pair.d_transfers.key = ClusterKey("secret")
    pair.submit(with_ticket(request, ticket))
    pair.finish()
    pair.check_same(request)
    assert pair.d.stats().transfer_failures == {FailureKind.REFUSED: 1}
    pair.d.release(ticket)
    assert (pair.d_transfers.expected, pair.d_transfers.released) == ([], [])
    pair.p.release(ticket)


def test_both_workers_log_the_clients_name_of_a_request(pair: CorePair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    request = msgspec.structs.replace(group("g", prompt_of(100)), trace="from-the-client")
    pair.hand_over(request)
    pair.finish()
    assert "prefilled g (from-the-client) for 1: 99 tokens" in caplog.messages
    assert any(message.startswith("fetched g (from-the-client): ") for message in caplog.messages)


def test_ten_seconds_after_a_transfer_one_line_of_figures_is_logged(
    pair: CorePair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    request = group("g", prompt_of(100))
    pair.hand_over(request)
    pair.finish()
    assert pair.d.wake_s == pair.now_s + 10, "the line is due even if there is nothing to compute"
    for _ in range(3):
        pair.now_s += 10
        pair.step_d()
    (line,) = [message for message in caplog.messages if message.startswith("KV transfers:")]
    assert line.startswith("KV transfers: number=1 ")
