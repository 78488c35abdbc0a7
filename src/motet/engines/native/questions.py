"""Questions to an engine process that wait for their answer."""

import asyncio
import contextlib
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from motet.errors import MotetError

Name = TypeVar("Name", bound=Hashable)
Answer = TypeVar("Answer")


class Questions(Generic[Name, Answer]):
    """Open questions of one kind, by name. Answers to questions that nobody asks any more are dropped."""

    def __init__(self) -> None:
        self._open: dict[Name, asyncio.Future[Answer]] = {}

    @contextlib.contextmanager
    def asked(self, name: Name) -> Iterator[asyncio.Future[Answer]]:
        """The answer to come; forgotten at the end of the block."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[name] = answer
        try:
            yield answer
        finally:
            self._open.pop(name, None)
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # seen, also if nobody waits for it any more

    def answer(self, name: Name, answer: Answer) -> None:
        if (question := self._open.get(name)) and not question.done():
            question.set_result(answer)

    def fail(self, name: Name, error: MotetError) -> None:
        if (question := self._open.get(name)) and not question.done():
            question.set_exception(error)

    def fail_all(self, error: MotetError) -> None:
        for name in self._open:
            self.fail(name, error)
