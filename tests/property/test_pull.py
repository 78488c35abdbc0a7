"""Whatever happens to a pull, in any order: it ends once, and no block is free while bytes can still arrive in it."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.transfer.orders import FailureKind, PullFailed, PullLanded, PullSettled, TransferEvent
from motet.transfer.side_channel import Refused, WrongStart
from motet.transfer.transport import ReadState
from tests.property_settings import examples
from tests.transfer.pull_scene import DONE, FAILED, RUNNING, PullScene
from tests.transfer.scripted import NUM_BLOCKS
from tests.transfer.worker import LEASE_SLOT


class RecordedPull:
    """A pull, and all its events."""

    def __init__(self) -> None:
        self.scene = PullScene()
        self.scene.reader.blocks_state = self.scene.reader.proof_state = self.scene.reader.first_read_state = RUNNING
        self.events: list[TransferEvent] = []
        self.abandoned = False

    def pass_time(self, seconds: float) -> None:
        self.scene.clock.now_s += seconds

    def stop_posting(self) -> None:
        self.scene.reader.can_post = False

    def end_at_once(self) -> None:
        self.scene.reader.blocks_state = self.scene.reader.proof_state = self.scene.reader.first_read_state = DONE

    def end_lease(self) -> None:
        self.scene.owner.proof_entries[NUM_BLOCKS + LEASE_SLOT] = 0

    def reuse_block(self) -> None:
        self.scene.owner.proof_entries[4] += 1

    def abandon(self) -> None:
        self.abandoned = True
        self.record([event] if (event := self.scene.pull.abandon()) else [])

    def send_hello_again(self) -> None:
        if not self.scene.client.closed:
            self.scene.peer.channel.send_hello()

    def record(self, events: list[TransferEvent]) -> None:
        self.events += events
        for event in events:
            if isinstance(event, PullLanded | PullSettled) or (isinstance(event, PullFailed) and event.settled):
                assert not self.bytes_can_arrive()

    def bytes_can_arrive(self) -> bool:
        """Returns True while the read of the blocks, the only one of this size, runs."""
        return any(read.num_bytes == 3 * 64 and read.state is ReadState.RUNNING for read in self.scene.reader.reads)

    def check_ended_once(self) -> None:
        match self.events:
            case [PullLanded()] | [PullFailed(settled=True)] | [PullFailed(settled=False), PullSettled()]:
                pass
            case [PullSettled()]:
                assert self.abandoned
            case other:
                raise AssertionError(f"the pull did not end exactly once: {other}")


EVENTS: dict[str, Callable[[RecordedPull], object]] = {
    "welcome": lambda pull: pull.scene.welcomed(),
    "refused": lambda pull: pull.scene.client.incoming.append(Refused("no")),
    "wrong start": lambda pull: pull.scene.client.incoming.append(WrongStart("p2")),
    "a second": lambda pull: pull.pass_time(1.0),
    "eleven seconds": lambda pull: pull.pass_time(11.0),
    "reads end": lambda pull: pull.scene.end_reads(DONE),
    "reads break": lambda pull: pull.scene.end_reads(FAILED),
    "reads end by themselves": RecordedPull.end_at_once,
    "nothing can be posted": RecordedPull.stop_posting,
    "lease ends": RecordedPull.end_lease,
    "block is reused": RecordedPull.reuse_block,
    "abandon": RecordedPull.abandon,
    "hello is sent again": RecordedPull.send_hello_again,
    "peer is lost": lambda pull: pull.scene.peer.mark_lost("lost", FailureKind.PEER_LOST),
}
UNTIL_OVER = ("eleven seconds", "reads end by themselves", "reads end", "reads end", "reads end")


@pytest.mark.slow
@examples(500)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=20))
def test_every_pull_ends_once_and_frees_its_blocks_only_when_no_bytes_can_arrive(events: list[str]) -> None:
    pull = RecordedPull()
    for name in (*events, *UNTIL_OVER):
        EVENTS[name](pull)
        pull.record(pull.scene.step())
    pull.check_ended_once()
    pull.scene.check_over()
    if pull.scene.peer.error is not None:
        assert pull.scene.peer.closed
        assert pull.scene.reader.connected == []
