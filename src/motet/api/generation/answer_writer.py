"""The interface between an answer and its bytes. Each route has one implementation for streamed answers and one for
unstreamed answers; `answer.GeneratedResponse` feeds it and sends what it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from motet.api.http.failure import error_json
from motet.api.http.server_sent_events import DONE, EVENT_STREAM
from motet.text.text_group import GroupStep
from motet.types import Usage

StepT = TypeVar("StepT")
UsedT = TypeVar("UsedT")


class AnswerWriter(ABC, Generic[StepT, UsedT]):
    """Turns the steps of one request into bytes, without I/O. Each answer has its own writer, which is fed in order."""

    content_type = EVENT_STREAM
    streams = True
    """True if there are bytes before the end. If not, an error at any time still has its HTTP status."""
    starts_at_once = False
    """True if the headers are sent as soon as the groups are open, and each send has all steps since the last one."""

    @abstractmethod
    def feed(self, steps: Sequence[StepT], usage: Callable[[], UsedT]) -> bytes:
        """Returns the bytes to send after these steps; empty if there are none. `usage` returns the usage of the
        request so far; it adds up all choices, so a writer calls it only for a chunk that reports the usage."""

    @abstractmethod
    def close(self, usage: UsedT) -> Sequence[bytes]:
        """Returns the end of a stream, or the entire answer, in pieces that are sent one by one, so that other streams
        are served in between."""

    def fail(self, error: Exception) -> bytes:
        """Returns the end of a stream that has started and fails."""
        return b"data: " + error_json(error) + b"\n\n" + DONE

    @property
    def is_long(self) -> bool:
        """True if `close` can take long enough to delay other streams, and must run in a thread."""
        return False

    @property
    def complete(self) -> bool:
        """True if the answer is complete for a client that leaves now, before the end of the body."""
        return False


GroupsWriter = AnswerWriter[GroupStep, Usage]
