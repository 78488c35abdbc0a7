"""Workers that are not what they should be: what they say of themselves ends where it is read."""

import msgspec
import pytest

from motet.transfer import channel
from motet.transfer.cluster_key import ClusterKey
from motet.transfer.layout import Memory

MEMORY = Memory(regions=(4096, 8192), region_block_bytes=64, num_blocks=8, proof=12288, proof_entries=12)


@pytest.mark.parametrize(
    "impossible",
    [
        {"regions": (4096, -1)},
        {"regions": (4096, 2**63)},
        {"region_block_bytes": -64},
        {"num_blocks": -1},
        {"device": -2},
        {"proof": -8},
        {"proof_entries": 2**64 - 1},
    ],
)
def test_a_welcome_that_names_memory_which_cannot_be_is_not_read(impossible: dict[str, object]) -> None:
    welcome = channel.Welcome("someone", b"how to connect", msgspec.structs.replace(MEMORY, **impossible))
    body = channel.written(welcome, ClusterKey(""), channel.new_nonce())
    with pytest.raises(channel.Unreadable):
        channel.answer_in(channel.opened(body))
