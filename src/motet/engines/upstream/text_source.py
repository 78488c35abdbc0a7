"""The interface between the API and text upstreams: JSON passes unchanged, but choices are separated.

A text upstream is not an `Engine`: there are no token ids, and another server cannot continue a text.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from motet.engines.wire import UNREADABLE
from motet.errors import EngineSilentError, MotetError
from motet.tracing.context import TraceContext
from motet.types import FinishReason, Usage

UNKNOWN_LENGTH = 2**31 - 1
"""`max_model_len` of a model whose server does not report it; the server itself refuses a prompt that is too long."""
Fields = dict[str, msgspec.Raw]
"""The members of a JSON object, each value as its original text."""


class TextRoute(StrEnum):
    """Routes of OpenAI's API, as paths below a server's root."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for choices. The fields that Motet has to understand are checked, the others are in `body` only."""

    route: TextRoute
    body: Mapping[str, msgspec.Raw]
    model: str
    """Name of the model: the client's name, until the router replaces it by the server's name."""
    n: int = 1
    prompts: tuple[msgspec.Raw, ...] = ()
    """Each prompt of a completions request; empty for a chat, which has one prompt."""
    seed: int | None = None
    stream: bool = False
    best_of: int | None = None
    trace: str = ""
    """The client's `x-request-id`, for the upstream."""
    traceparent: TraceContext | None = None
    """Span that the request is part of, for the upstream."""
    session_id: str = ""
    authorization: str = ""
    """The client's `Authorization` header, if it may be passed on; never a key of this server."""
    start: tuple[int, ...] | None = None
    """Numbers of the choices that start at once, if choices can start and end separately; None if all start at once."""

    @property
    def num_prompts(self) -> int:
        return max(1, len(self.prompts))

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    @property
    def num_started(self) -> int:
        """Number of choices that start at once."""
        return self.num_choices if self.start is None else len(self.start)


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """A part of one choice if the answer is streamed, else the complete choice."""

    index: int
    """Number of the prompt, times n, plus the number of the choice."""
    fields: Fields
    """All fields of the choice except `index` and `finish_reason`, unchanged."""
    finish: FinishReason | None = None
    """The choice's `finish_reason`, one of OpenAI's values, on its last piece. If the server sent another value,
    `fields` has it as `stop_reason`."""

    @property
    def text(self) -> str:
        """The text of the answer in this piece. If the content is a list of parts, these are the parts with a text.
        Empty if there is no text, or if it cannot be read."""
        message = self.fields.get("delta") or self.fields.get("message")
        try:
            if message is None:
                return _text.decode(self.fields.get("text", _NULL)) or ""
            content = (_message.decode(message) or _MessageContent()).content or ""
            return content if isinstance(content, str) else "".join(part.text or "" for part in content)
        except UNREADABLE:
            return ""


class _ContentPart(msgspec.Struct, frozen=True):
    text: str | None = None


class _MessageContent(msgspec.Struct, frozen=True):
    """A `delta` or a `message`."""

    content: str | list[_ContentPart] | None = None


_NULL = msgspec.Raw(b"null")
_text = msgspec.json.Decoder(str | None)
_message = msgspec.json.Decoder(_MessageContent | None)


class TextStep(msgspec.Struct, frozen=True):
    pieces: tuple[TextPiece, ...]
    extras: Fields = {}
    """Fields next to `choices`, except fields that Motet sets itself: id, object, created, model, usage."""


class TextGroupStream(Protocol):
    """The answer to one request, until each of its choices has finished, or until an error."""

    @property
    def worker(self) -> str:
        """Id of the server that answers; empty while it is not known."""
        ...

    @property
    def usage(self) -> Usage | None:
        """Usage of the group, complete after the last step; None if the server has not reported all of it."""
        ...

    async def read(self) -> Sequence[TextStep]:
        """Returns the steps that have arrived, at least one; an empty sequence at the end. Raises the errors of
        `GroupStream`, and `UpstreamRefusalError`."""
        ...

    def start(self, indices: Sequence[int]) -> None:
        """Starts choices that are not in `TextRequest.start`. Must be called before the next `read`, which returns the
        end once all started choices have ended."""
        ...

    def end_choice(self, index: int) -> None:
        """Ends a choice whose last piece has not been read, and its request at the server, if there is a
        `TextRequest.start`. Drops unread pieces of the choice; the next `read` returns a last piece with the finish
        `ABORT`."""
        ...

    def fail(self, error: MotetError) -> None:
        """Ends the group. Its reader gets `error`."""
        ...

    async def aclose(self) -> None:
        """Closes every connection. Can be called at any time, also twice."""
        ...


TextGenerate = Callable[[TextRequest], TextGroupStream]
"""Returns the stream of an answer. Sends nothing before the first `read`. Raises `RequestError` for a request that no
server can answer."""


def may_go_elsewhere(error: MotetError) -> bool:
    """Returns True if a request that failed with this error can be sent to another server: the server could not be
    reached, or was overloaded. Returns False after a time-out, because another attempt would take the same time."""
    return error.may_retry and not isinstance(error, EngineSilentError)
