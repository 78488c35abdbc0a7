"""Whatever happens to a pull, in any order: it ends once, and gives back no block that may still be written."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.transfer.orders import FailureKind, News, PullFailed, PullLanded, PullSettled
from motet.transfer.side_channel import Refused, WrongStart
from motet.transfer.transport import ReadState
from tests.property_settings import examples
from tests.transfer.scene import DONE, FAILED, RUNNING, Scene
from tests.transfer.scripted import NUM_BLOCKS
from tests.transfer.worker import LEASE_SLOT


class PlayedPull:
    """A pull, and all the news of it."""

    def __init__(self) -> None:
        self.scene = Scene()
        self.scene.reader.blocks = self.scene.reader.proof = self.scene.reader.wiring = RUNNING
        self.news: list[News] = []
        self.abandoned = False

    def pass_time(self, seconds: float) -> None:
        self.scene.clock.now_s += seconds

    def stop_posting(self) -> None:
        self.scene.reader.posts = False

    def end_at_once(self) -> None:
        self.scene.reader.blocks = self.scene.reader.proof = self.scene.reader.wiring = DONE

    def end_lease(self) -> None:
        self.scene.owner.shows[NUM_BLOCKS + LEASE_SLOT] = 0

    def reuse_block(self) -> None:
        self.scene.owner.shows[4] += 1

    def abandon(self) -> None:
        self.abandoned = True
        self.hear([news] if (news := self.scene.pull.abandon()) else [])

    def ask_again(self) -> None:
        if not self.scene.dealer.closed:
            self.scene.peer.ask()

    def hear(self, news: list[News]) -> None:
        self.news += news
        for item in news:
            if isinstance(item, PullLanded | PullSettled) or (isinstance(item, PullFailed) and item.settled):
                assert not self.may_write()

    def may_write(self) -> bool:
        """Returns True while the read of the blocks, the only one of that size, runs."""
        return any(read.num_bytes == 3 * 64 and read.state is ReadState.RUNNING for read in self.scene.reader.reads)

    def check_ending(self) -> None:
        match self.news:
            case [PullLanded()] | [PullFailed(settled=True)] | [PullFailed(settled=False), PullSettled()]:
                pass
            case [PullSettled()]:
                assert self.abandoned
            case other:
                raise AssertionError(f"not one ending: {other}")


EVENTS: dict[str, Callable[[PlayedPull], object]] = {
    "welcome": lambda played: played.scene.welcomed(),
    "refused": lambda played: played.scene.dealer.coming.append(Refused("no")),
    "someone else": lambda played: played.scene.dealer.coming.append(WrongStart("p2")),
    "a second": lambda played: played.pass_time(1.0),
    "eleven seconds": lambda played: played.pass_time(11.0),
    "reads end": lambda played: played.scene.end_reads(DONE),
    "reads break": lambda played: played.scene.end_reads(FAILED),
    "reads end by themselves": PlayedPull.end_at_once,
    "nothing can be posted": PlayedPull.stop_posting,
    "lease ends": PlayedPull.end_lease,
    "block is reused": PlayedPull.reuse_block,
    "abandon": PlayedPull.abandon,
    "peer is asked again": PlayedPull.ask_again,
    "peer is lost": lambda played: played.scene.peer.lose("lost", FailureKind.PEER_LOST),
}
UNTIL_OVER = ("eleven seconds", "reads end by themselves", "reads end", "reads end", "reads end")


@pytest.mark.slow
@examples(500)
@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=20))
def test_every_pull_ends_once_and_gives_its_blocks_back_only_when_nothing_writes(events: list[str]) -> None:
    played = PlayedPull()
    for what in (*events, *UNTIL_OVER):
        EVENTS[what](played)
        played.hear(played.scene.step())
    played.check_ending()
    played.scene.check_over()
    if played.scene.peer.error is not None:
        assert played.scene.peer.closed
        assert played.scene.reader.connected == []
