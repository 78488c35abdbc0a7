"""A group that never was: where an engine cannot even be asked."""

from motet.errors import MotetError
from motet.types import GroupDelta


class NoGroup:
    """The stream of a group that was not taken."""

    def __init__(self, error: MotetError) -> None:
        self._error = error

    def __aiter__(self) -> "NoGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        raise self._error

    async def aclose(self) -> None:
        """There is nothing to free."""
