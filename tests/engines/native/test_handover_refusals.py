"""What an engine refuses to prefill or to take over, and that the leases of what it refuses end."""

from collections.abc import Callable
from pathlib import Path

import pytest

from motet.errors import ContextLengthError, RequestError
from motet.transfer.base import FailureKind
from motet.transfer.ticket import TransferAddress
from tests.engines.native.drive import group, make_core, prompt_of
from tests.engines.native.pair import Pair, alone, tokens, with_ticket

Tiny = Callable[[str], Path]


def test_a_ticket_for_another_prompt_is_refused_and_given_back(tiny: Tiny) -> None:
    pair = Pair(tiny("llama"))
    ticket = pair.prefill(group("g", prompt_of(100)))
    with pytest.raises(RequestError, match="not for this prompt") as refused:
        pair.submit(with_ticket(group("h", prompt_of(100, 1)), ticket))
    assert refused.value.param == "kv_transfer_params"
    assert pair.d_transfers.released == [ticket]
    assert not pair.d.busy
    pair.check_empty()


def test_a_group_that_can_never_run_here_gives_its_ticket_back(tiny: Tiny) -> None:
    pair = Pair(tiny("llama"))
    ticket = pair.prefill(group("g", prompt_of(100)))
    too_many = pair.d.info.max_num_seqs + 1
    with pytest.raises(RequestError, match="at most"):
        pair.submit(with_ticket(group("g", prompt_of(100), n=too_many), ticket))
    assert pair.d_transfers.released == [ticket]
    pair.check_empty()


def test_a_ticket_that_nobody_here_can_give_back_does_no_harm(tiny: Tiny) -> None:
    pair = Pair(tiny("llama"))
    ticket = pair.prefill(group("g", prompt_of(100)))
    make_core(tiny("llama")).release(ticket)
    pair.p.release(ticket)
    pair.check_empty()


def test_prompts_of_one_token_and_engines_without_transfer_refuse_to_prefill(tiny: Tiny) -> None:
    pair = Pair(tiny("llama"))
    with pytest.raises(ContextLengthError, match="at least 2"):
        pair.p.prefill(group("short", prompt_of(1)))
    single = make_core(tiny("llama"))
    with pytest.raises(RequestError, match="keeps its KV cache to itself"):
        single.prefill(group("g", prompt_of(10)))
    with pytest.raises(RequestError, match="--role"):
        single.submit(with_ticket(group("g", prompt_of(100)), pair.prefill(group("g", prompt_of(100)))))
    assert not single.busy


def test_an_engine_without_transfer_says_that_it_meets_nobody(tiny: Tiny) -> None:
    single = make_core(tiny("llama"))
    single.transfers.meet(7, TransferAddress("someone", "127.0.0.1", 1))
    (met,) = single.step().met
    assert met.number == 7
    assert met.error is not None and met.error.kind is FailureKind.REFUSED
    assert single.step().met == []


def test_a_ticket_without_the_cluster_s_seal_is_not_used_and_nobody_is_asked(tiny: Tiny) -> None:
    pair = Pair(tiny("llama"))
    request = group("g", prompt_of(100), n=2)
    ticket = pair.prefill(request)
    pair.d_transfers.trusting = False
    pair.submit(with_ticket(request, ticket))
    pair.finish()
    assert tokens(pair.outcomes, ["g"]) == alone(tiny("llama"), request)
    assert pair.d.stats().transfer_failures == {FailureKind.REFUSED: 1}
    pair.d.release(ticket)
    assert (pair.d_transfers.expected, pair.d_transfers.released) == ([], [])
    pair.p.release(ticket)
    pair.check_empty()
