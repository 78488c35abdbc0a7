"""A follower copes with message numbers that jump, go back, or come twice. A script stands for its subscription."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import pytest

from motet.block_names import block_names
from motet.kv_events import event_schema as schema
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored
from motet.kv_events.follower import Follower, NumberedMessage, Replayed, ReplayError, Subscription, SubscriptionEvent
from tests.kv_events.names import apply_to

pytestmark = pytest.mark.anyio

A, B, C, D = block_names(range(16), 4, salt="")


def stored(number: int, *names: bytes) -> NumberedMessage:
    return message(number, Stored(names, None, tuple(range(4 * len(names)))))


def message(number: int, *changes: BlockChange) -> NumberedMessage:
    return NumberedMessage(number, schema.payload([schema.event(change, 4) for change in changes], 0.0))


Replay = Callable[[int, list[NumberedMessage]], Replayed]
"""Makes the answer to a replay from the number of replays so far and the messages that it should have."""


class Script(Subscription):
    """A subscription without sockets that hears `heard`, then nothing more. It replays `kept` from the number asked
    for, as `replay` says; if `kept` is None it cannot replay."""

    def __init__(
        self,
        heard: Sequence[NumberedMessage | SubscriptionEvent],
        kept: Sequence[NumberedMessage] | None = (),
        replay: Replay = lambda _, messages: Replayed(messages, whole=True),
    ) -> None:
        self.over = asyncio.Event()
        self.asked: list[int] = []
        self._heard = list(heard)
        self._kept = kept
        self._replay = replay

    async def hear(self, patience_s: float) -> NumberedMessage | SubscriptionEvent:
        if not self._heard:
            self.over.set()
            await asyncio.Event().wait()
        return self._heard.pop(0)

    async def replay(self, start: int, *, patience_s: float, quiet_s: float = 0.0) -> Replayed:
        self.asked.append(start)
        if self._kept is None:
            raise ReplayError("it does not replay")
        return self._replay(len(self.asked), [message for message in self._kept if message.number >= start])


async def told(script: Script) -> list[BlockChange]:
    """Returns all changes that the listener gets until the script is over."""
    changes: list[BlockChange] = []
    task = asyncio.create_task(Follower(script, changes.extend, name="w").run())
    await script.over.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return changes


async def known(script: Script) -> set[bytes]:
    names: set[bytes] = set()
    apply_to(names, await told(script))
    return names


async def test_a_follower_that_joins_asks_for_everything_and_goes_on_from_there() -> None:
    script = Script([SubscriptionEvent.JOINED, stored(1, B), stored(2, C)], kept=[stored(0, A), stored(1, B)])
    changes = await told(script)
    assert [type(change) for change in changes] == [Cleared, Stored, Stored, Stored]
    assert [change.names for change in changes if isinstance(change, Stored)] == [(A,), (B,), (C,)]
    assert script.asked == [0]


def growing(asked: int, messages: list[NumberedMessage]) -> Replayed:
    """Only the first message has been published when the follower joins."""
    return Replayed(messages[:1] if asked == 1 else messages, whole=True)


def restarted(asked: int, _: list[NumberedMessage]) -> Replayed:
    return Replayed([] if asked == 1 else [stored(0, C)], whole=True)


async def test_missed_messages_are_asked_for() -> None:
    kept = [stored(0, A), stored(1, B), message(2, Removed((A,))), stored(3, C)]
    script = Script([SubscriptionEvent.JOINED, kept[3], stored(4, D)], kept, growing)
    assert await known(script) == {B, C, D}
    assert script.asked == [0, 1]


async def test_without_a_replay_a_gap_clears_all_known_blocks(caplog: pytest.LogCaptureFixture) -> None:
    script = Script([SubscriptionEvent.JOINED, stored(5, A), stored(6, B), stored(9, C), stored(12, D)], kept=None)
    assert await known(script) == {D}
    assert caplog.messages == [
        "block events of w: it does not replay",
        "block events of w: missed messages are not available any more",
    ]


async def test_a_replay_that_begins_too_late_clears_the_blocks_known_before() -> None:
    kept = [stored(7, C), stored(8, D)]
    assert await known(
        Script([SubscriptionEvent.JOINED, stored(1, B), stored(9, A)], [stored(0, A), *kept], growing)
    ) == {A, C, D}


async def test_numbers_that_go_back_mean_that_the_worker_was_restarted() -> None:
    script = Script(
        [SubscriptionEvent.JOINED, stored(0, A), stored(1, B), stored(0, C), stored(1, D)], replay=restarted
    )
    assert await known(script) == {C, D}
    assert script.asked == [0, 0]


async def test_after_a_new_connection_everything_is_asked_for_whatever_its_numbers() -> None:
    assert await known(
        Script([SubscriptionEvent.JOINED, stored(0, A), SubscriptionEvent.JOINED, stored(1, D)], replay=restarted)
    ) == {C, D}


async def test_a_follower_that_hears_nothing_asks_for_missed_messages() -> None:
    script = Script(
        [SubscriptionEvent.JOINED, SubscriptionEvent.SILENCE, SubscriptionEvent.SILENCE],
        [stored(0, A), stored(1, B)],
        growing,
    )
    assert await known(script) == {A, B}
    assert script.asked == [0, 1, 2]


@pytest.mark.parametrize(("late", "names", "asked"), [(1, {A, B, C}, [0, 0, 3]), (9, {C}, [0, 0, 0])])
async def test_who_was_not_told_of_everything_asks_again_when_it_hears_nothing(
    late: int, names: set[bytes], asked: list[int]
) -> None:
    """A worker that stood still when it was joined was never known, until it had stored every block anew. What is known
    meanwhile stays."""

    def coming_late(asked: int, messages: list[NumberedMessage]) -> Replayed:
        if asked <= late:
            raise ReplayError("its replay did not come in 5 s")
        return Replayed(messages, whole=True)

    kept = [stored(0, A), stored(1, B), stored(2, C)]
    script = Script(
        [SubscriptionEvent.JOINED, kept[2], SubscriptionEvent.SILENCE, SubscriptionEvent.SILENCE], kept, coming_late
    )
    assert await known(script) == names
    assert script.asked == asked


@pytest.mark.parametrize("strange", [b"nonsense", schema.payload([], 0.0)[:4]])
async def test_a_message_that_is_not_understood_only_clears_the_known_blocks(
    strange: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    heard: list[NumberedMessage | SubscriptionEvent] = [
        SubscriptionEvent.JOINED,
        stored(0, A),
        NumberedMessage(1, strange),
        SubscriptionEvent.GARBLED,
    ]
    heard += [stored(2, B), NumberedMessage(3, strange), stored(4, C)]
    assert await known(Script(heard)) == {C}
    assert caplog.messages == [
        "block events of w: its events cannot be understood",
        "block events of w: one of its messages is garbled",
    ]


async def test_a_long_replay_with_gaps_is_asked_for_again() -> None:
    def dropping(asked: int, messages: list[NumberedMessage]) -> Replayed:
        """Loses the third message, then every second one, then the end."""
        got = {1: [*messages[:2], *messages[3:]], 2: messages[::2]}.get(asked, messages)
        return Replayed(got, whole=asked != 3)

    script = Script([SubscriptionEvent.JOINED], [stored(i, name) for i, name in enumerate((A, B, C, D, A))], dropping)
    assert await known(script) == {A, B, C, D}
    assert script.asked == [0, 2, 3, 5]


async def test_a_publisher_that_repeats_itself_is_not_asked_without_end() -> None:
    script = Script([SubscriptionEvent.JOINED], replay=lambda *_: Replayed([stored(3, A)], whole=False))
    assert await known(script) == {A}
    assert script.asked == [0, 4]
