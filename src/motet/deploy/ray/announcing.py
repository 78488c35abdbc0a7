"""What a worker says of itself, in the directory's ears: at its start, when it has news, and every few seconds."""

import asyncio
import contextlib
from collections.abc import Callable

from motet.deploy.ray.directory import ANNOUNCE_S, Announcement, DirectoryClient, Stage
from motet.deploy.ray.following import RETRY_S, Following
from motet.deploy.stop import first_of
from motet.errors import DirectoryError

Say = Callable[[Stage], Announcement]
"""What there is to be said in this stage, now."""


class Announcing:
    """One announcement after the other: two under way at once could arrive in another order."""

    def __init__(
        self,
        directory: DirectoryClient,
        following: Following,
        say: Say,
        *,
        period_s: float = ANNOUNCE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._directory = directory
        self._following = following
        self._say = say
        self._period_s = period_s
        self._retry_s = retry_s
        self._stage = Stage.MEETING
        self._news = asyncio.Event()
        self._telling = asyncio.Lock()

    async def reach(self, stage: Stage, *, limit_s: float) -> None:
        """Returns once the directory knows. Raises DirectoryError if it cannot be told in time; `keep` may tell it."""
        self._stage = stage
        failure: DirectoryError | None = None
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._announce()
                    except DirectoryError as error:
                        failure = error
                    await asyncio.sleep(self._retry_s)
        except TimeoutError as error:
            said = failure.message if failure else "the directory of workers does not answer"
            raise DirectoryError(f"{said}; it was tried for {limit_s:g} s") from error

    def has_news(self) -> None:
        """It says something else than before."""
        self._news.set()

    async def keep(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await first_of(self._news.wait(), timeout_s=self._period_s)
            self._news.clear()  # before it is said: what is new from now on is said once more
            with contextlib.suppress(DirectoryError):
                await self._announce()

    async def _announce(self) -> None:
        async with self._telling:
            self._following.take(await self._directory.announce(self._say(self._stage), self._following.version))
