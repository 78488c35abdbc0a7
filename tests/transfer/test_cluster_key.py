"""What a cluster key seals: no ticket that a client has made or changed is believed."""

import json

import msgspec
import pytest

from motet.transfer.cluster_key import ClusterKey
from motet.transfer.ticket import params_of, ticket_of
from tests.transfer.test_ticket import TICKET

OURS, OTHERS, NONE = ClusterKey("ours"), ClusterKey("theirs"), ClusterKey("")


def test_a_sealed_ticket_is_believed_after_its_way_through_a_gateway() -> None:
    sealed = OURS.sealed(TICKET)
    assert OURS.believes(ticket_of(json.loads(json.dumps(params_of(sealed)))))
    assert not OTHERS.believes(sealed)
    assert not OURS.believes(TICKET)


@pytest.mark.parametrize(
    "change",
    [{"remote_host": "10.0.0.9"}, {"remote_port": 1}, {"lease_s": 1e6}, {"remote_engine_id": "x"}, {"readers": 2}],
)
def test_a_ticket_that_points_elsewhere_is_not_believed(change: dict[str, object]) -> None:
    assert not OURS.believes(msgspec.structs.replace(OURS.sealed(TICKET), **change))


def test_without_a_key_nothing_is_sealed_and_everything_believed() -> None:
    assert NONE.sealed(TICKET) == TICKET
    assert NONE.believes(TICKET)
    assert NONE.believes(OURS.sealed(TICKET))
