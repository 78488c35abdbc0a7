"""Tickets come through clients: an invalid field is refused by name, a ticket survives its encodings, and a ticket that
a client has made or changed is not accepted."""

import json

import msgspec
import pytest

from motet.errors import RequestError
from motet.transfer.ticket import ClusterKey, Ticket, TransferAddress, params_of, prompt_digest, ticket_of

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


def test_a_ticket_survives_json() -> None:
    assert ticket_of(json.loads(json.dumps(params_of(TICKET)))) == TICKET


def test_a_ticket_survives_the_encoding_of_an_engine_s_pipe() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(TICKET), type=Ticket) == TICKET


def test_numbers_of_a_ticket_survive_a_json_reader_that_knows_only_doubles() -> None:
    largest = changed(lease_id=2**53 - 1, generations=[2**53 - 1] * 3)
    as_doubles = json.loads(json.dumps(largest), parse_int=lambda digits: int(float(digits)))
    assert ticket_of(as_doubles) == ticket_of(largest)
    with pytest.raises(RequestError, match="lease_id"):
        ticket_of(changed(lease_id=2**53))


RECORDED = bytes.fromhex(
    "de0014b1646f5f72656d6f74655f70726566696c6cc3b0646f5f72656d6f74655f6465636f6465c2b072656d6f74655f656e67696e655f6964ae"
    "70726566696c6c2d302d61316232b172656d6f74655f726571756573745f6964aa63686174636d706c2d31ab72656d6f74655f686f7374a93132"
    "372e302e302e31ab72656d6f74655f706f7274cd4e20b072656d6f74655f626c6f636b5f69647393040509a774705f73697a6501a77665727369"
    "6f6e02aa6e756d5f746f6b656e7328ad70726f6d70745f646967657374d920326138633937623235363330643532366639323361313035353563"
    "3639666634ab67656e65726174696f6e7393070708a86c656173655f6964cd3039aa6c656173655f736c6f7403a76c656173655f73cb404e0000"
    "00000000a77265616465727301ad6361636865645f746f6b656e7300a777656967687473a0a47365616ca0a7666f726569676ea0"
)
"""TICKET as version 2 encodes it between processes; the seal covers these bytes."""


def test_the_encoding_of_a_ticket_is_unchanged_in_this_version() -> None:
    assert TICKET.version == 2, "record the bytes of the new version"
    assert msgspec.msgpack.encode(TICKET) == RECORDED
    assert TICKET.digest == 7565912581432629895
    seal = "12b7a25c7eb4cd29c196312ae04794677927210b93ab1367ff4794cc199eba82"
    assert ClusterKey("secret").sealed(TICKET).seal == seal


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_request_id", "prompt_digest", "seal"])
def test_half_a_surrogate_pair_in_a_ticket_is_refused(field: str) -> None:
    """JSON can contain it, but no message between workers can."""
    with pytest.raises(RequestError, match="not a character"):
        ticket_of(json.loads(json.dumps(changed(**{field: "\ud800"}))))


def test_a_ticket_has_the_field_names_that_gateways_know() -> None:
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
def test_the_digest_covers_every_field_that_describes_the_blocks(change: dict[str, object]) -> None:
    assert msgspec.structs.replace(TICKET, **change).digest != TICKET.digest


def test_the_digest_fits_an_entry_of_the_proof_and_survives_the_wire() -> None:
    assert 0 < TICKET.digest < 2**63
    assert ticket_of(json.loads(json.dumps(params_of(TICKET)))).digest == TICKET.digest


@pytest.mark.parametrize("params", [[], [None], [[]], [{}], "ticket", 7, None, True])
def test_params_without_a_ticket_are_refused(params: object) -> None:
    with pytest.raises(RequestError) as refused:
        ticket_of(params)
    assert refused.value.param == "kv_transfer_params"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"version": 1}, "version is 1"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_host": "metadata.internal"}, "remote_host is 'metadata.internal'; it must be an IP address"),
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
    ],
)
def test_an_invalid_field_of_a_ticket_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestError, match=named) as refused:
        ticket_of(changed(**fields))
    assert refused.value.param == "kv_transfer_params"


def test_a_ticket_of_a_third_party_server_is_refused_with_the_supported_version() -> None:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    with pytest.raises(RequestError, match="version is None; this server supports version 2"):
        ticket_of(params)


def test_different_prompts_have_different_digests() -> None:
    digests = [prompt_digest(tokens) for tokens in ([1, 2], [2, 1], [1, 2, 0], [0x201], [])]
    assert len(set(digests)) == len(digests)
    assert prompt_digest((1, 2)) == digests[0]


KEY, OTHER_KEY, NO_KEY = ClusterKey("ours"), ClusterKey("theirs"), ClusterKey("")


def test_a_sealed_ticket_is_accepted_after_its_way_through_a_gateway() -> None:
    sealed = KEY.sealed(TICKET)
    assert KEY.accepts(ticket_of(json.loads(json.dumps(params_of(sealed)))))
    assert not OTHER_KEY.accepts(sealed)
    assert not KEY.accepts(TICKET)


@pytest.mark.parametrize(
    "change",
    [{"remote_host": "10.0.0.9"}, {"remote_port": 1}, {"lease_s": 1e6}, {"remote_engine_id": "x"}, {"readers": 2}],
)
def test_a_sealed_ticket_that_was_changed_is_not_accepted(change: dict[str, object]) -> None:
    assert not KEY.accepts(msgspec.structs.replace(KEY.sealed(TICKET), **change))


@pytest.mark.parametrize("seal", ["é", "", "\x00", "日本"], ids=ascii)
def test_a_seal_that_is_not_hexadecimal_is_not_accepted(seal: str) -> None:
    """The bug: `hmac.compare_digest` raises for texts that are not ASCII; nothing caught it, and the engine ended."""
    assert not KEY.accepts(msgspec.structs.replace(TICKET, seal=seal))


def test_without_a_key_no_ticket_is_sealed_and_every_ticket_is_accepted() -> None:
    assert NO_KEY.sealed(TICKET) == TICKET
    assert NO_KEY.accepts(TICKET)
    assert NO_KEY.accepts(KEY.sealed(TICKET))
