"""How operators change which workers there are while the server runs; who keeps the workers makes it true."""

from typing import Protocol

from motet.settings.named_worker import NamedWorker


class Membership(Protocol):
    """Raises `NotFoundError` for an id that no worker has."""

    async def join(self, named: NamedWorker, id: str | None) -> str:
        """Adds a server as a worker, and returns its id once it is listed: as starting, until it has been reached.
        `id`: None for one that is made up. Raises `RequestError` for a URL or an id that is taken."""
        ...

    async def leave(self, id: str, drain_s: float) -> None:
        """It gets no new groups from now on. Returns then; the worker is gone when its groups have ended, or after
        `drain_s`, and those that had not ended go on elsewhere."""
        ...

    async def drain(self, id: str) -> None:
        """It gets no new groups from now on, and stays."""
        ...
