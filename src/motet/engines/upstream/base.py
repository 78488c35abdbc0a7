"""The seam between the API and text upstreams: JSON goes in and out as it is, choices are told apart.

It is no `Engine`: there are no token ids, and another server cannot go on with what a choice has written.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from motet.errors import EngineSilentError, MotetError

UNKNOWN_LENGTH = 2**31 - 1
"""`max_model_len` of a model whose server does not tell it; it refuses by itself what is too long."""


Fields = dict[str, msgspec.Raw]
"""Of a JSON object, each value as it was written."""


class TextRoute(StrEnum):
    """Routes of OpenAI's API, as paths below a server's root."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for choices, checked as far as we have to understand it."""

    route: TextRoute
    body: Mapping[str, msgspec.Raw]
    """The fields as the client wrote them."""
    model: str
    """As the client wrote it."""
    n: int = 1
    """Choices of each prompt."""
    prompts: tuple[msgspec.Raw, ...] = ()
    """Of completions: each by itself. Empty for a chat, which has one."""
    seed: int | None = None
    stream: bool = False
    best_of: int | None = None
    trace: str = ""
    """The client's `x-request-id`, for the next hop."""
    session_id: str = ""
    authorization: str = ""
    """The client's own header, where it may be passed on: never a key of this server."""

    @property
    def num_prompts(self) -> int:
        return max(1, len(self.prompts))

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What came of one choice: a part of it on a stream, else the whole."""

    index: int
    """prompt x n + number."""
    fields: Fields
    """All fields of the choice but `index` and `finish_reason`, as the server wrote them."""
    finish: str | None = None
    """Its `finish_reason`: comes once, and nothing after it."""


class TextStep(msgspec.Struct, frozen=True):
    """What came in one go."""

    pieces: tuple[Piece, ...]
    extras: Fields = {}
    """What stood beside `choices`, but for what is ours: id, object, created, model, usage."""


class TextUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt counted once, the choices summed; as far as it was told."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Of the prompt; None: not told."""
    reasoning_tokens: int | None = None
    """Of the choices; None: not told."""


class TextGroup(Protocol):
    """What comes of one request, until each of its choices has finished. After an error it is over."""

    @property
    def worker(self) -> str:
        """The id of who answers, once it is known."""
        ...

    @property
    def usage(self) -> TextUsage | None:
        """Complete after the last step; None: the server did not tell all of it."""
        ...

    async def read(self) -> Sequence[TextStep]:
        """What has come since, at least something; empty at the end. Raises `MotetError`, as `GroupStream` does, and
        `UpstreamRefusalError`."""
        ...

    def fail(self, error: MotetError) -> None:
        """Ends it with `error`, which whoever reads it gets."""
        ...

    async def aclose(self) -> None:
        """Closes every connection. May be called at any time, twice too."""
        ...


class TextSource(Protocol):
    """Whoever answers for text models."""

    def generate(self, request: TextRequest) -> TextGroup:
        """Asks nobody before the first `read`. Raises `RequestError` for what can never be answered."""
        ...


def may_go_elsewhere(error: MotetError) -> bool:
    """Whether a request that has brought nothing yet may be tried once more: the server could not be reached, or was
    not up to it. One that took it and was silent for too long is not asked again: that would take as long."""
    return error.may_retry and not isinstance(error, EngineSilentError)
