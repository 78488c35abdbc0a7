"""vLLM's tickets are carried inside Motet's tickets, unchanged."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.vllm.requests import LEASE_S, params_from, ticket_from
from motet.engines.vllm.vllm_wire import kv_params_in
from motet.errors import EngineError
from motet.transfer.ticket import Ticket, prompt_digest

PARAMS: dict[str, object] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "5c6f",
    "remote_request_id": "cmpl-1-0",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 300,
}
JSON = b'{"id":"cmpl-1","choices":[{"index":0,"token_ids":[5]}],"kv_transfer_params":%b}'


def test_the_ticket_of_a_prefill_is_read_from_its_answer() -> None:
    assert kv_params_in(JSON % b'{"remote_port":5600}') == [{"remote_port": 5600}]


def test_the_tickets_of_several_children_come_in_a_list() -> None:
    assert kv_params_in(JSON % b'[{"a":1},{"a":2}]') == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("params", [b"null", b"[]", b"{}"])
def test_the_error_for_a_missing_ticket_says_how_to_start_the_server(params: bytes) -> None:
    with pytest.raises(EngineError, match=r"p-1 computed .* --kv-transfer-config '\{"):
        kv_params_in(JSON % params, "p-1")


@pytest.mark.parametrize("answer", [b"no", JSON % b'"text"', JSON % b"[1]"])
def test_an_invalid_answer_to_a_prefill_is_an_error(answer: bytes) -> None:
    with pytest.raises(EngineError, match="answer of vLLM to a prefill cannot be read"):
        kv_params_in(answer)


def test_a_ticket_names_its_maker_and_its_prompt() -> None:
    ticket = ticket_from(PARAMS, engine_id="http://p:8000@1.5", prompt=(5, 6, 7))
    assert ticket == Ticket(
        remote_engine_id="http://p:8000@1.5",
        remote_request_id="cmpl-1-0",
        remote_host="10.0.0.7",
        remote_port=5600,
        remote_block_ids=(),
        num_tokens=3,
        prompt_digest=prompt_digest((5, 6, 7)),
        generations=(),
        lease_id=1,
        lease_slot=0,
        lease_s=LEASE_S,
        readers=1,
        foreign=ticket.foreign,
    )
    assert params_from(ticket) == PARAMS


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(), st.lists, max_leaves=5),
        min_size=1,
    )
)
def test_whatever_a_connector_sends_comes_out_unchanged(params: dict[str, object]) -> None:
    assert params_from(ticket_from(params, engine_id="e", prompt=(1,))) == params


@pytest.mark.parametrize("port", [None, 0, 70000, "5600"])
def test_an_invalid_port_is_replaced_by_1(port: object) -> None:
    assert ticket_from(PARAMS | {"remote_port": port}, engine_id="e", prompt=(1,)).remote_port == 1


@pytest.mark.parametrize("foreign", ["", "[]", "no"])
def test_a_ticket_of_another_kind_is_refused(foreign: str) -> None:
    ours = ticket_from(PARAMS, engine_id="e", prompt=(1,))
    with pytest.raises(EngineError, match="the ticket of e is not one of vLLM's"):
        params_from(msgspec.structs.replace(ours, foreign=foreign))
