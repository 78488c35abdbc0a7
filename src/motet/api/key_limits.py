"""How much one API key may have under way: requests and choices, from before anything runs to the very end."""

from collections.abc import Mapping
from dataclasses import dataclass

from motet.errors import RateLimitedError

ANONYMOUS = "anonymous"
"""All who bring no key count as one client."""


@dataclass(frozen=True)
class UnderWay:
    """Of one client."""

    requests: int = 0
    choices: int = 0


class KeyLimits:
    """Counts by client. Owned by the service. 0 means that there is no limit."""

    def __init__(self, *, max_requests: int, max_choices: int) -> None:
        self._max_requests = max_requests
        self._max_choices = max_choices
        self._clients: dict[str, UnderWay] = {}

    @property
    def clients(self) -> Mapping[str, UnderWay]:
        """Those with something under way."""
        return self._clients

    @property
    def num_choices(self) -> int:
        """Of all clients."""
        return sum(has.choices for has in self._clients.values())

    def check(self, client: str, num_choices: int) -> None:
        """Raises `RateLimitedError` if such a request would not be let in now."""
        has = self._clients.get(client, UnderWay())
        self._check(client, "requests", has.requests, 1, self._max_requests)
        self._check(client, "choices", has.choices, num_choices, self._max_choices)

    def enter(self, client: str, num_choices: int) -> "Share":
        """One request of so many choices, until it leaves; or an error and nothing is counted."""
        self.check(client, num_choices)
        self._add(client, 1, num_choices)
        return Share(self, client, num_choices)

    def leave(self, client: str, num_choices: int) -> None:
        self._add(client, -1, -num_choices)

    def _add(self, client: str, requests: int, choices: int) -> None:
        has = self._clients.get(client, UnderWay())
        now = UnderWay(has.requests + requests, has.choices + choices)
        if now.requests < 0 or now.choices < 0:
            raise AssertionError(f"{client} has {now} after a request left")
        self._clients[client] = now
        if now == UnderWay():
            del self._clients[client]

    def _check(self, client: str, what: str, has: int, more: int, most: int) -> None:
        if most and has + more > most:
            whose = "without an API key" if client == ANONYMOUS else "of your API key"
            raise RateLimitedError(
                f"Rate limit reached for {what} {whose}: {has} under way and {more} more asked for, while at most "
                f"{most} may be under way at a time. Try again when some have ended."
            )


class Share:
    """What one request takes of its client's limits."""

    def __init__(self, limits: KeyLimits, client: str, num_choices: int) -> None:
        self._limits = limits
        self._client = client
        self._num_choices = num_choices
        self._held = True

    def leave(self) -> None:
        """May be called twice."""
        if self._held:
            self._held = False
            self._limits.leave(self._client, self._num_choices)
