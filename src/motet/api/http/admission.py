"""What a server takes in, decided before the first byte of an answer.

Rights         what the requests of one API key may ask for, and with whom they share cached prompts
KeyLimits      how many requests and choices one API key may have under way, until each has been answered
Admission      how many groups may wait for their first token, and whether the server takes new ones at all

Nobody fills the server for others: while several clients wait, each gets its even share of the places, also when all
are taken. So more groups may wait in all than the limit says, but never those of one client.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from motet.errors import DrainingError, OverloadedError, RateLimitedError, RequestError
from motet.settings.named_worker import numbers_by_key
from motet.settings.server_config import ServerConfig


class Admission:
    """Counts the groups that are open, and those of them that still wait for their first token."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.draining = False
        self.waiting = 0
        self.open = 0
        self._waiting_of: Counter[str] = Counter()
        """Waiting groups of each client that has any."""
        self._empty = asyncio.Event()
        self._empty.set()

    async def empty(self) -> None:
        """Returns once no group is open."""
        await self._empty.wait()

    def check_room(self, num_groups: int, *, client: str) -> None:
        """Raises if this number of groups of one client would not be admitted now."""
        if self.draining:
            raise DrainingError("The server is draining and takes no new requests; try another one.")
        others = len(self._waiting_of.keys() - {client})
        share = self._max_waiting // (others + 1) if others else 0
        if self.waiting + num_groups > self._max_waiting and self._waiting_of[client] + num_groups > share:
            raise OverloadedError(
                f"The server is overloaded: {self.waiting} groups wait for their first token and this request has "
                f"{num_groups}, while at most {self._max_waiting} may wait. Try again later."
            )

    def admit(self, *sizes: int, client: str) -> list["AdmissionSlot"]:
        """Returns a place for each of `sizes`, numbers of groups. Raises, and admits none, unless all have room."""
        self.check_room(sum(sizes), client=client)
        return [AdmissionSlot(self, size, client=client) for size in sizes]

    def entered(self, num_groups: int, *, client: str) -> None:
        self.waiting += num_groups
        self._waiting_of[client] += num_groups
        self.open += num_groups
        self._empty.clear()

    def started(self, num_groups: int, *, client: str) -> None:
        self.waiting -= num_groups
        self._waiting_of[client] -= num_groups
        if not self._waiting_of[client]:
            del self._waiting_of[client]

    def left(self, num_groups: int) -> None:
        self.open -= num_groups
        if not self.open:
            self._empty.set()

    def check(self) -> None:
        """Raises unless the counts make sense."""
        if not 0 <= self.waiting <= self.open or self.waiting != self._waiting_of.total():
            raise AssertionError(f"{self.waiting} groups waiting, {self.open} open")


class AdmissionSlot:
    """The place of one group, or of several that share it, from admission to the end. Both methods may come twice."""

    def __init__(self, admission: Admission, num_groups: int, *, client: str) -> None:
        self._admission = admission
        self._client = client
        self._waiting = self._open = num_groups
        admission.entered(num_groups, client=client)

    def started(self) -> None:
        """The first token has come."""
        if self._waiting:
            self._admission.started(self._waiting, client=self._client)
        self._waiting = 0

    def leave(self) -> None:
        self.started()
        self._admission.left(self._open)
        self._open = 0


ANONYMOUS = "anonymous"
"""All requests without an API key count as one client of this name."""
ANOTHER_SERVER = "another server"
"""All requests of gateways count as one client of this name."""


@dataclass(frozen=True)
class Rights:
    """What one client may ask for."""

    cache_salt: str = ""
    """Begins the salt of its cached prompts; empty: they are shared with all others that have none."""
    least_priority: int | None = None
    """Its requests may have this priority and any higher number, which goes later; None: any."""


EVERYTHING = Rights()


def rights_of(config: ServerConfig) -> Mapping[str, Rights]:
    """Returns the rights of each client with an API key, by the client's name."""
    several, named = len(config.api_keys) > 1, numbers_by_key(config.key_priority)
    salted = config.cache_salt_per_key == "on" or (config.cache_salt_per_key == "auto" and several)
    return {
        f"key-{number}": Rights(
            # Of the key and not of its number, so that servers with the same keys name the same blocks.
            hashlib.sha256(b"motet cache salt\0" + key.encode()).hexdigest() if salted else "",
            named.get(key, 0 if several else None),
        )
        for number, key in enumerate(config.api_keys)
    }


class ClientLoad(NamedTuple):
    """What one client has under way."""

    requests: int = 0
    choices: int = 0


class KeyLimits:
    """Counts what each client has under way. A limit of 0 means that there is no limit."""

    def __init__(self, *, max_requests: int, max_choices: int) -> None:
        self._max_requests = max_requests
        self._max_choices = max_choices
        self.clients: dict[str, ClientLoad] = {}
        """The clients that have something under way."""

    @property
    def num_choices(self) -> int:
        """Number of choices that all clients have under way."""
        return sum(has.choices for has in self.clients.values())

    def check(self, client: str, num_choices: int) -> None:
        """Raises if a request with this many choices would not be let in now: `RateLimitedError` for an API key, which
        asks too much for itself; `OverloadedError` where nobody has a key, since then the server is full; and there
        `RequestError` for what would never be let in."""
        has = self.clients.get(client, ClientLoad())
        for what, now, more, most in (
            ("requests", has.requests, 1, self._max_requests),
            ("choices", has.choices, num_choices, self._max_choices),
        ):
            if most and now + more > most:
                raise _above(what, client, now=now, more=more, most=most)

    def enter(self, client: str, num_choices: int) -> None:
        """Counts a request with its choices until `leave`. Raises and counts nothing if that is too much."""
        self.check(client, num_choices)
        has = self.clients.get(client, ClientLoad())
        self.clients[client] = ClientLoad(has.requests + 1, has.choices + num_choices)

    def leave(self, client: str, num_choices: int) -> None:
        """Takes off what `enter` has counted, once."""
        has = self.clients.pop(client, ClientLoad())
        left = ClientLoad(has.requests - 1, has.choices - num_choices)
        if min(left) < 0:
            raise AssertionError(f"{client} has {left} after a request left")
        if left != ClientLoad():
            self.clients[client] = left


def _above(what: str, client: str, *, now: int, more: int, most: int) -> RequestError | OverloadedError:
    """Returns the error for `more` requests or choices while `now` are under way and `most` may be."""
    if client == ANONYMOUS and more > most:
        said = f"{more} in one request, while this server may have {most} under way in all"
        return RequestError(f"Too many {what}: {said}.", code=f"too_many_{what}")
    said = f"{now} under way and {more} more asked for, while at most {most} may be under way at a time"
    if client == ANONYMOUS:
        return OverloadedError(f"The server is overloaded: {what}: {said}. Try again when some have ended.")
    return RateLimitedError(f"Rate limit reached for {what} of your API key: {said}. Try again when some have ended.")
