"""Follows what one worker tells of its blocks, and finds out what it missed.

Messages are numbered. What follows from the number of one that is published:

    the next one                     it is applied
    below the next one               it was in a replay already
    above it                         some were missed: they are asked for
    not above the last published     the worker was started anew: everything from the beginning is asked for

A new connection may lead to a new process too, so everything is asked for then. Who hears nothing for a while asks
whether it missed the last message. What cannot be had is given up: a worker of whose blocks too little is known gets
fewer groups than it might, and that mends itself.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from motet.errors import ConfigError
from motet.kv_events.changes import BlockChange, BlockListener, Cleared
from motet.kv_events.reader import EventReader
from motet.kv_events.schema import events_in
from motet.kv_events.shared_context import SharedContext
from motet.kv_events.subscription import (
    BlockSource,
    Garbled,
    Heard,
    Joined,
    Message,
    Replay,
    ReplayError,
    Silence,
    Subscription,
)

logger = logging.getLogger(__name__)

SILENCE_S = 10.0
REPLAY_TIMEOUT_S = 5.0


class Line(Protocol):
    """To a publisher (`Subscription`)."""

    async def hear(self, patience_s: float) -> Heard: ...

    async def replay(self, start: int, *, patience_s: float) -> Replay: ...


async def follow_blocks(source: BlockSource, listener: BlockListener, *, shared: SharedContext | None = None) -> None:
    """Tells `listener` of a worker's blocks until it is cancelled, whoever is there or not. Returns at once, with a
    warning, if the source can be no address. `shared`: with those who follow other workers."""
    try:
        subscription = Subscription(source, shared)
    except ConfigError as exc:
        logger.warning("%s", exc)
        return
    try:
        await Follower(subscription, listener, source.endpoint).run()
    finally:
        subscription.close()


class Follower:
    """Of one worker. The listener is told Cleared whenever what it was told may not be true any more."""

    def __init__(self, line: Line, listener: BlockListener, name: str, *, silence_s: float = SILENCE_S) -> None:
        """`name`: for the log."""
        self._line = line
        self._listener = listener
        self._name = name
        self._silence_s = silence_s
        self._reader = EventReader()
        self._next: int | None = None
        """Number of the message that is due; None: whichever comes."""
        self._published: int | None = None
        """Number of the last message that was published to us, not replayed."""
        self._said: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            match await self._line.hear(self._silence_s):
                case Joined():
                    self._published = None
                    await self._start_over()
                case Message() as message:
                    await self._take(message)
                case Garbled():
                    self._say_once("what it sends is no message")  # the number of the next one tells what is missing
                case Silence():
                    await self._catch_up()

    async def _take(self, message: Message) -> None:
        if self._published is not None and message.number <= self._published:
            await self._start_over()
        self._published = message.number
        if self._missed_before(message):
            await self._catch_up()
        if self._missed_before(message):
            self._say_once("what was missed cannot be had any more")
            self._tell([self._forgotten()])
            self._next = None
        if self._next is None or message.number == self._next:
            self._next = message.number + 1
            self._tell(self._changes_in([message]))

    def _missed_before(self, message: Message) -> bool:
        return self._next is not None and message.number > self._next

    async def _start_over(self) -> None:
        """From the first message that can still be had."""
        changes: list[BlockChange] = [self._forgotten()]
        messages = await self._replay(0)
        if messages is None:
            self._next = None
        else:
            self._next = messages[-1].number + 1 if messages else 0
            changes += self._changes_in(messages)
        self._tell(changes)

    async def _catch_up(self) -> None:
        """Takes what was published since the last message, as far as it can be had."""
        if self._next is None or not (messages := await self._replay(self._next)):
            return
        changes: list[BlockChange] = [] if messages[0].number == self._next else [self._forgotten()]
        self._next = messages[-1].number + 1
        self._tell(changes + self._changes_in(messages))

    async def _replay(self, start: int) -> list[Message] | None:
        """The messages from number `start` on, or from a later one if they begin there, without a gap. What is dropped
        from a long replay is asked for again. None: it cannot be had."""
        messages: list[Message] = []
        while True:
            try:
                replay = await self._line.replay(start, patience_s=REPLAY_TIMEOUT_S)
            except ReplayError as exc:
                self._say_once(str(exc))
                return messages or None
            if messages and replay.messages and replay.messages[0].number != start:
                return messages
            unbroken = _unbroken(replay.messages)
            messages += unbroken
            if not unbroken or (replay.whole and len(unbroken) == len(replay.messages)):
                return messages
            start = unbroken[-1].number + 1

    def _changes_in(self, messages: Sequence[Message]) -> list[BlockChange]:
        """What is not understood may have been anything, so nothing is known after it."""
        changes: list[BlockChange] = []
        for message in messages:
            try:
                for event in events_in(message.payload):
                    changes += self._not_understood() if event is None else self._reader.changes(event)
            except msgspec.DecodeError:
                changes += self._not_understood()
        return changes

    def _not_understood(self) -> list[BlockChange]:
        self._say_once("what it says is not understood")
        return [self._forgotten()]

    def _forgotten(self) -> Cleared:
        self._reader.forget()
        return Cleared()

    def _tell(self, changes: Sequence[BlockChange]) -> None:
        if changes:
            self._listener(changes)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("block events of %s: %s", self._name, what)


def _unbroken(messages: list[Message]) -> list[Message]:
    """Those before the first gap."""
    first = messages[0].number if messages else 0
    return [message for index, message in enumerate(messages) if message.number == first + index]
