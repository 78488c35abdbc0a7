"""The seam between the API and text upstreams: JSON passes unchanged, but choices are separated.

It is no `Engine`: there are no token ids, and another server cannot go on with what a choice has written.
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
    """One request for choices, checked as far as we must understand it."""

    route: TextRoute
    body: Mapping[str, msgspec.Raw]
    model: str
    """The client's name for the model; whoever routes the request puts the server's name in its place."""
    n: int = 1
    prompts: tuple[msgspec.Raw, ...] = ()
    """The prompts of completions, each by itself. Empty for a chat, which has one."""
    seed: int | None = None
    stream: bool = False
    best_of: int | None = None
    trace: str = ""
    """The client's `x-request-id`, for the next hop."""
    traceparent: TraceContext | None = None
    """The span that the request is a part of, for the next hop."""
    session_id: str = ""
    authorization: str = ""
    """The client's own header, if it may be passed on: never a key of this server."""
    start: tuple[int, ...] | None = None
    """Numbers of the choices that start at once, if each choice starts and ends by itself; None if all start and end
    together."""

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
    """A part of one choice if the answer is streamed, else the whole choice."""

    index: int
    """prompt x n + number."""
    fields: Fields
    """All fields of the choice but `index` and `finish_reason`, as the server wrote them."""
    finish: FinishReason | None = None
    """Its `finish_reason` in OpenAI's words, set on its last piece. If the server used another word, `fields` has that
    as `stop_reason`."""

    @property
    def text(self) -> str:
        """The text of the answer in this piece. Of a content that is a list of parts these are the parts with a text;
        where there is none, or it cannot be read, the text is empty."""
        said = self.fields.get("delta") or self.fields.get("message")
        try:
            if said is None:
                return _text.decode(self.fields.get("text", _NULL)) or ""
            content = (_said.decode(said) or _MessageContent()).content or ""
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
_said = msgspec.json.Decoder(_MessageContent | None)


class TextStep(msgspec.Struct, frozen=True):
    pieces: tuple[TextPiece, ...]
    extras: Fields = {}
    """The fields beside `choices`, except those that we write: id, object, created, model, usage."""


class TextGroupStream(Protocol):
    """The answer to one request, until each of its choices has finished. After an error it is over."""

    @property
    def worker(self) -> str:
        """The id of the server that answers, once it is known."""
        ...

    @property
    def usage(self) -> Usage | None:
        """Complete after the last step; None if the server did not report all of it."""
        ...

    async def read(self) -> Sequence[TextStep]:
        """Returns the steps that have come, at least one; none at the end. Raises `MotetError`, as `GroupStream` does,
        and `UpstreamRefusalError`."""
        ...

    def start(self, indices: Sequence[int]) -> None:
        """Starts choices that `TextRequest.start` has held back. `read` is at its end when all choices that have
        started have ended, so this is called between two reads."""
        ...

    def end_choice(self, index: int) -> None:
        """Ends a choice of a request with `TextRequest.start`, whose last piece has not been read, and its request at
        the server. Its unread pieces are dropped; the next `read` returns a last piece with the finish `ABORT`."""
        ...

    def fail(self, error: MotetError) -> None:
        """Ends the group with `error`, which its reader gets."""
        ...

    async def aclose(self) -> None:
        """Closes every connection. May be called at any time, twice too."""
        ...


TextGenerate = Callable[[TextRequest], TextGroupStream]
"""Returns the stream of an answer. Nothing is sent before the first `read`. Raises `RequestError` if the request can
never be answered."""


def may_go_elsewhere(error: MotetError) -> bool:
    """Returns True if a request without any answer yet may be tried once more: the server could not be reached, or was
    overloaded. If a server took the request and then was silent for too long, another try would take as long again."""
    return error.may_retry and not isinstance(error, EngineSilentError)
