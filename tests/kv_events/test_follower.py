"""What a follower makes of numbers that jump, go back, or come twice; over a line that says what the test says."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from motet.block_names import block_names
from motet.kv_events import schema
from motet.kv_events.changes import BlockChange, Cleared, Removed, Stored, apply_to
from motet.kv_events.follower import Follower
from motet.kv_events.subscription import Garbled, Heard, Joined, Message, Replay, ReplayError, Silence

pytestmark = pytest.mark.anyio

A, B, C, D = block_names(range(16), 4, "")


def stored(number: int, *names: bytes) -> Message:
    return message(number, Stored(names, None, tuple(range(4 * len(names)))))


def message(number: int, *changes: BlockChange) -> Message:
    return Message(number, schema.payload([schema.event(change, 4) for change in changes], 0.0))


class Script:
    """Says `heard`, then nothing more. Replays `kept` from the number asked for on, or cannot."""

    def __init__(self, heard: Sequence[Heard], kept: Sequence[Message] | None = ()) -> None:
        self.over = asyncio.Event()
        self.asked: list[int] = []
        self._heard = list(heard)
        self._kept = kept

    async def hear(self, patience_s: float) -> Heard:
        if not self._heard:
            self.over.set()
            await asyncio.Event().wait()
        return self._heard.pop(0)

    async def replay(self, start: int, *, patience_s: float) -> Replay:
        self.asked.append(start)
        if self._kept is None:
            raise ReplayError("it does not replay")
        return Replay([message for message in self._kept if message.number >= start], whole=True)


async def told(script: Script) -> list[BlockChange]:
    """All that the listener hears until the script is over."""
    changes: list[BlockChange] = []
    task = asyncio.create_task(Follower(script, changes.extend, "w").run())
    await script.over.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return changes


async def known(script: Script) -> set[bytes]:
    names: set[bytes] = set()
    apply_to(names, await told(script))
    return names


async def test_who_joins_asks_for_everything_and_goes_on_from_there() -> None:
    script = Script([Joined(), stored(1, B), stored(2, C)], kept=[stored(0, A), stored(1, B)])
    changes = await told(script)
    assert [type(change) for change in changes] == [Cleared, Stored, Stored, Stored]
    assert [change.names for change in changes if isinstance(change, Stored)] == [(A,), (B,), (C,)]
    assert script.asked == [0]


class Growing(Script):
    """Has published only the first message when it is joined."""

    async def replay(self, start: int, *, patience_s: float) -> Replay:
        replay = await super().replay(start, patience_s=patience_s)
        return Replay(replay.messages[:1], whole=True) if len(self.asked) == 1 else replay


async def test_what_was_missed_is_asked_for() -> None:
    kept = [stored(0, A), stored(1, B), message(2, Removed((A,))), stored(3, C)]
    script = Growing([Joined(), kept[3], stored(4, D)], kept)
    assert await known(script) == {B, C, D}
    assert script.asked == [0, 1]


async def test_without_a_replay_a_gap_ends_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    script = Script([Joined(), stored(5, A), stored(6, B), stored(9, C), stored(12, D)], kept=None)
    assert await known(script) == {D}
    assert caplog.messages == [
        "block events of w: it does not replay",
        "block events of w: what was missed cannot be had any more",
    ]


async def test_a_replay_that_begins_too_late_ends_what_was_known_before() -> None:
    kept = [stored(7, C), stored(8, D)]
    assert await known(Growing([Joined(), stored(1, B), stored(9, A)], [stored(0, A), *kept])) == {A, C, D}


async def test_numbers_that_go_back_are_another_start_of_the_worker() -> None:
    class Restarted(Script):
        async def replay(self, start: int, *, patience_s: float) -> Replay:
            await super().replay(start, patience_s=patience_s)
            return Replay([] if len(self.asked) == 1 else [stored(0, C)], whole=True)

    script = Restarted([Joined(), stored(0, A), stored(1, B), stored(0, C), stored(1, D)])
    assert await known(script) == {C, D}
    assert script.asked == [0, 0]


async def test_a_new_connection_is_asked_for_everything_whatever_its_numbers() -> None:
    class Two(Script):
        async def replay(self, start: int, *, patience_s: float) -> Replay:
            await super().replay(start, patience_s=patience_s)
            return Replay([] if len(self.asked) == 1 else [stored(0, C)], whole=True)

    assert await known(Two([Joined(), stored(0, A), Joined(), stored(1, D)])) == {C, D}


async def test_who_hears_nothing_asks_whether_there_was_something() -> None:
    script = Growing([Joined(), Silence(), Silence()], [stored(0, A), stored(1, B)])
    assert await known(script) == {A, B}
    assert script.asked == [0, 1, 2]


@pytest.mark.parametrize("strange", [b"nonsense", schema.payload([], 0.0)[:4]])
async def test_a_message_that_is_not_understood_ends_what_is_known_and_nothing_else(
    strange: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    heard: list[Heard] = [Joined(), stored(0, A), Message(1, strange), Garbled()]
    heard += [stored(2, B), Message(3, strange), stored(4, C)]
    assert await known(Script(heard)) == {C}
    assert caplog.messages == [
        "block events of w: what it says is not understood",
        "block events of w: what it sends is no message",
    ]


async def test_a_long_replay_of_which_some_is_dropped_is_asked_for_again() -> None:
    class Dropping(Script):
        """Loses the third message, then every second one, then the end."""

        async def replay(self, start: int, *, patience_s: float) -> Replay:
            messages = (await super().replay(start, patience_s=patience_s)).messages
            match len(self.asked):
                case 1:
                    return Replay([*messages[:2], *messages[3:]], whole=True)
                case 2:
                    return Replay(messages[::2], whole=True)
                case 3:
                    return Replay(messages, whole=False)
            return Replay(messages, whole=True)

    script = Dropping([Joined()], [stored(i, name) for i, name in enumerate((A, B, C, D, A))])
    assert await known(script) == {A, B, C, D}
    assert script.asked == [0, 2, 3, 5]


async def test_a_publisher_that_repeats_itself_is_not_asked_for_ever() -> None:
    class Stuck(Script):
        async def replay(self, start: int, *, patience_s: float) -> Replay:
            await super().replay(start, patience_s=patience_s)
            return Replay([stored(3, A)], whole=False)

    script = Stuck([Joined()])
    assert await known(script) == {A}
    assert script.asked == [0, 4]
