"""A follower with message numbers that jump, go back, or come twice. A script replaces its subscription."""

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
    """A subscription without sockets that receives `received`, and then nothing more. It replays `kept` from the
    requested number on, as `replay` determines; if `kept` is None, it cannot replay."""

    def __init__(
        self,
        received: Sequence[NumberedMessage | SubscriptionEvent],
        kept: Sequence[NumberedMessage] | None = (),
        replay: Replay = lambda _, messages: Replayed(messages, complete=True),
    ) -> None:
        self.ended = asyncio.Event()
        self.replays: list[int] = []
        """First numbers of the requested replays."""
        self._received = list(received)
        self._kept = kept
        self._replay = replay

    async def next(self, patience_s: float) -> NumberedMessage | SubscriptionEvent:
        if not self._received:
            self.ended.set()
            await asyncio.Event().wait()
        return self._received.pop(0)

    async def replay(self, start: int, *, patience_s: float, gap_s: float = 0.0) -> Replayed:
        self.replays.append(start)
        if self._kept is None:
            raise ReplayError("it does not replay")
        return self._replay(len(self.replays), [message for message in self._kept if message.number >= start])


async def changes_of(script: Script) -> list[BlockChange]:
    """Returns all changes that the listener gets until the end of the script."""
    changes: list[BlockChange] = []
    task = asyncio.create_task(Follower(script, changes.extend, name="w").run())
    await script.ended.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return changes


async def known(script: Script) -> set[bytes]:
    names: set[bytes] = set()
    apply_to(names, await changes_of(script))
    return names


async def test_a_follower_that_joins_requests_all_messages_and_continues_after_them() -> None:
    script = Script([SubscriptionEvent.JOINED, stored(1, B), stored(2, C)], kept=[stored(0, A), stored(1, B)])
    changes = await changes_of(script)
    assert [type(change) for change in changes] == [Cleared, Stored, Stored, Stored]
    assert [change.names for change in changes if isinstance(change, Stored)] == [(A,), (B,), (C,)]
    assert script.replays == [0]


def growing(num_replays: int, messages: list[NumberedMessage]) -> Replayed:
    """Only the first message has been published when the follower joins."""
    return Replayed(messages[:1] if num_replays == 1 else messages, complete=True)


def restarted(num_replays: int, _: list[NumberedMessage]) -> Replayed:
    return Replayed([] if num_replays == 1 else [stored(0, C)], complete=True)


async def test_missed_messages_are_requested() -> None:
    kept = [stored(0, A), stored(1, B), message(2, Removed((A,))), stored(3, C)]
    script = Script([SubscriptionEvent.JOINED, kept[3], stored(4, D)], kept, growing)
    assert await known(script) == {B, C, D}
    assert script.replays == [0, 1]


async def test_without_a_replay_a_gap_clears_all_known_blocks(caplog: pytest.LogCaptureFixture) -> None:
    script = Script([SubscriptionEvent.JOINED, stored(5, A), stored(6, B), stored(9, C), stored(12, D)], kept=None)
    assert await known(script) == {D}
    assert caplog.messages == [
        "block events of w: it does not replay",
        "block events of w: missed messages are not available any more",
    ]


async def test_a_replay_that_starts_too_late_clears_the_blocks_known_before() -> None:
    kept = [stored(7, C), stored(8, D)]
    assert await known(
        Script([SubscriptionEvent.JOINED, stored(1, B), stored(9, A)], [stored(0, A), *kept], growing)
    ) == {A, C, D}


async def test_numbers_that_go_back_mean_that_the_worker_has_restarted() -> None:
    script = Script(
        [SubscriptionEvent.JOINED, stored(0, A), stored(1, B), stored(0, C), stored(1, D)], replay=restarted
    )
    assert await known(script) == {C, D}
    assert script.replays == [0, 0]


async def test_after_a_new_connection_all_messages_are_requested_with_any_numbers() -> None:
    assert await known(
        Script([SubscriptionEvent.JOINED, stored(0, A), SubscriptionEvent.JOINED, stored(1, D)], replay=restarted)
    ) == {C, D}


async def test_a_follower_that_receives_nothing_requests_missed_messages() -> None:
    script = Script(
        [SubscriptionEvent.JOINED, SubscriptionEvent.SILENCE, SubscriptionEvent.SILENCE],
        [stored(0, A), stored(1, B)],
        growing,
    )
    assert await known(script) == {A, B}
    assert script.replays == [0, 1, 2]


@pytest.mark.parametrize(("failures", "names", "replays"), [(1, {A, B, C}, [0, 0, 3]), (9, {C}, [0, 0, 0])])
async def test_a_follower_without_all_messages_requests_them_again_after_a_silence(
    failures: int, names: set[bytes], replays: list[int]
) -> None:
    """Regression: the blocks of a worker that was stopped when the follower joined stayed unknown until they were
    stored again. Blocks that become known during this time are kept."""

    def failing_first(num_replays: int, messages: list[NumberedMessage]) -> Replayed:
        if num_replays <= failures:
            raise ReplayError("its replay was not received within 5 s")
        return Replayed(messages, complete=True)

    kept = [stored(0, A), stored(1, B), stored(2, C)]
    script = Script(
        [SubscriptionEvent.JOINED, kept[2], SubscriptionEvent.SILENCE, SubscriptionEvent.SILENCE], kept, failing_first
    )
    assert await known(script) == names
    assert script.replays == replays


@pytest.mark.parametrize("invalid", [b"nonsense", schema.payload([], 0.0)[:4]])
async def test_an_invalid_message_only_clears_the_known_blocks(
    invalid: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    received: list[NumberedMessage | SubscriptionEvent] = [
        SubscriptionEvent.JOINED,
        stored(0, A),
        NumberedMessage(1, invalid),
        SubscriptionEvent.GARBLED,
    ]
    received += [stored(2, B), NumberedMessage(3, invalid), stored(4, C)]
    assert await known(Script(received)) == {C}
    assert caplog.messages == [
        "block events of w: one of its events is invalid",
        "block events of w: one of its messages is malformed",
    ]


async def test_a_long_replay_with_gaps_is_requested_again() -> None:
    def dropping(num_replays: int, messages: list[NumberedMessage]) -> Replayed:
        """Loses the third message, then every second one, then the end."""
        kept = {1: [*messages[:2], *messages[3:]], 2: messages[::2]}.get(num_replays, messages)
        return Replayed(kept, complete=num_replays != 3)

    script = Script([SubscriptionEvent.JOINED], [stored(i, name) for i, name in enumerate((A, B, C, D, A))], dropping)
    assert await known(script) == {A, B, C, D}
    assert script.replays == [0, 2, 3, 5]


async def test_a_publisher_that_repeats_messages_does_not_cause_endless_requests() -> None:
    script = Script([SubscriptionEvent.JOINED], replay=lambda *_: Replayed([stored(3, A)], complete=False))
    assert await known(script) == {A}
    assert script.replays == [0, 4]
