"""Who may come in: groups without a first token are counted, and one too many is refused before its first byte."""

import asyncio

from motet.errors import DrainingError, OverloadedError


class Admission:
    """Counts groups that are open and groups that still wait for their first token. Owned by the service."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.draining = False
        self.waiting = 0
        self.open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def empty(self) -> None:
        """Returns once no group is open."""
        await self._empty.wait()

    def check_room(self, num_groups: int) -> None:
        """Raises if so many groups would not be admitted now."""
        if self.draining:
            raise DrainingError("The server is draining and takes no new requests; try another one.")
        if self.waiting + num_groups > self.max_waiting:
            raise OverloadedError(
                f"The server is overloaded: {self.waiting} groups wait for their first token and this request has "
                f"{num_groups}, while at most {self.max_waiting} may wait. Try again later."
            )

    def admit(self, num_groups: int) -> list["Place"]:
        """A place for each group of a request, or an error and none of them."""
        self.check_room(num_groups)
        return [Place(self) for _ in range(num_groups)]

    def entered(self) -> None:
        self.waiting += 1
        self.open += 1
        self._empty.clear()

    def started(self) -> None:
        self.waiting -= 1

    def left(self) -> None:
        self.open -= 1
        if self.open == 0:
            self._empty.set()

    def check(self) -> None:
        """Raises unless the counts make sense."""
        if not 0 <= self.waiting <= self.open:
            raise AssertionError(f"{self.waiting} groups waiting, {self.open} open")


class Place:
    """One group's place, from admission to its end; each move may come more than once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._waits = True
        self._open = True
        admission.entered()

    def started(self) -> None:
        """The group has its first token."""
        if self._waits:
            self._waits = False
            self._admission.started()

    def leave(self) -> None:
        self.started()
        if self._open:
            self._open = False
            self._admission.left()
