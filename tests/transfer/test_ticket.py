"""A ticket comes from outside: what cannot be is refused by name, what goes out comes back."""

import json

import msgspec
import pytest

from motet.errors import RequestError
from motet.transfer.ticket import Ticket, TransferAddress, params_of, prompt_digest, ticket_of

TICKET = Ticket(
    remote_engine_id="prefill-0-a1b2",
    remote_request_id="chatcmpl-1",
    remote_host="127.0.0.1",
    remote_port=20000,
    remote_block_ids=(4, 5, 9),
    num_tokens=40,
    prompt_digest=prompt_digest(range(40)),
    generations=(7, 7, 8),
    lease_id=12345,
    lease_slot=3,
    lease_s=60.0,
)


def changed(**fields: object) -> dict[str, object]:
    return params_of(TICKET) | fields


def test_a_ticket_comes_back_from_json_as_it_went() -> None:
    assert ticket_of(json.loads(json.dumps(params_of(TICKET)))) == TICKET


def test_a_ticket_comes_back_from_the_pipe_of_an_engine_as_it_went() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(TICKET), type=Ticket) == TICKET


def test_numbers_of_a_ticket_survive_a_json_reader_that_knows_only_doubles() -> None:
    largest = changed(lease_id=2**53 - 1, generations=[2**53 - 1] * 3)
    as_doubles = json.loads(json.dumps(largest), parse_int=lambda digits: int(float(digits)))
    assert ticket_of(as_doubles) == ticket_of(largest)
    with pytest.raises(RequestError, match="lease_id"):
        ticket_of(changed(lease_id=2**53))


def test_field_names_are_those_that_gateways_know() -> None:
    known = ("do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id", "remote_host")
    assert {*known, "remote_port", "remote_block_ids", "tp_size"} <= params_of(TICKET).keys()


def test_the_address_names_the_start_of_the_worker() -> None:
    assert TICKET.address == TransferAddress("prefill-0-a1b2", "127.0.0.1", 20000)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": (4, 5, 8)},
        {"remote_block_ids": (5, 4, 9)},
        {"remote_block_ids": (4, 5), "generations": (9, 7, 7, 8)},
        {"generations": (7, 7, 9)},
        {"num_tokens": 39},
        {"cached_tokens": 16},
        {"prompt_digest": prompt_digest(range(1, 41))},
        {"lease_id": 12346},
        {"lease_slot": 4},
    ],
)
def test_whatever_says_what_the_blocks_hold_is_in_its_digest(change: dict[str, object]) -> None:
    assert msgspec.structs.replace(TICKET, **change).digest != TICKET.digest


def test_the_digest_fits_an_entry_of_the_proof_and_survives_the_wire() -> None:
    assert 0 < TICKET.digest < 2**63
    assert ticket_of(json.loads(json.dumps(params_of(TICKET)))).digest == TICKET.digest


@pytest.mark.parametrize("params", [[], [None], [[]], [{}], "ticket", 7, None, True])
def test_what_is_no_ticket_is_refused(params: object) -> None:
    with pytest.raises(RequestError) as refused:
        ticket_of(params)
    assert refused.value.param == "kv_transfer_params"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"version": 2}, "version is 2"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_host": "metadata.internal"}, "remote_host is 'metadata.internal'; it must be an address"),
        ({"remote_port": "20000"}, "remote_port"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"remote_block_ids": [4, 5, -1]}, "remote_block_ids"),
        ({"remote_block_ids": [4, 5]}, "differ in length"),
        ({"remote_block_ids": [4, 5, 4]}, "a block twice"),
        ({"remote_block_ids": [], "generations": []}, "remote_block_ids is empty"),
        ({"generations": [7, 7, 2**53]}, "generations"),
        ({"lease_id": 0}, "lease_id"),
        ({"lease_slot": -1}, "lease_slot"),
        ({"lease_s": 0}, "lease_s"),
        ({"readers": 0}, "readers"),
        ({"tp_size": 2}, "tp_size is 2"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"lease": 1}, "lease"),
    ],
)
def test_a_ticket_that_cannot_be_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named) as refused:
        ticket_of(changed(**fields))
    assert refused.value.param == "kv_transfer_params"


def test_a_ticket_of_another_server_is_refused_with_the_version_understood_here() -> None:
    theirs = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    with pytest.raises(RequestError, match="version is None; this server understands 1"):
        ticket_of(theirs)


def test_a_prompt_digest_tells_prompts_apart() -> None:
    digests = [prompt_digest(tokens) for tokens in ([1, 2], [2, 1], [1, 2, 0], [0x201], [])]
    assert len(set(digests)) == len(digests)
    assert prompt_digest((1, 2)) == digests[0]
