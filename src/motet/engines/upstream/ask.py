"""What a server is sent for a group: one request for all of it, or one a choice. Pure.

All fields go as the client wrote them, but

    model             the server's own name for it
    n                 left out where one choice is asked for
    seed              s + i for choice i, modulo 2^64, in the signed form, which every server takes
    prompt            the one prompt of the choice
    stream_options    `include_usage` where the server takes it, so that what was used is known
    best_of, session_id  left out where a group is several requests: one session cannot write two answers at once
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from motet.engines.upstream.base import TextRequest, TextRoute
from motet.engines.upstream.merge import Merge, named
from motet.errors import RequestError

USAGE = msgspec.Raw(b'{"include_usage":true}')


@dataclass(frozen=True)
class Ask:
    """One request to a server."""

    request: TextRequest
    model: str
    """The server's own name for it."""
    usage: bool
    """Whether a stream is asked for its usage."""
    first: int
    """Number of its first choice in the group."""
    count: int

    @property
    def name(self) -> str:
        """What it is for, in messages."""
        return named(range(self.first, self.first + self.count))

    def merge(self) -> Merge:
        return Merge(self.first, self.count, chat=self.request.route is TextRoute.CHAT)

    def body(self) -> bytes:
        request = self.request
        fields = dict(request.body)
        fields["model"] = _raw(self.model)
        fields.pop("stream_options", None)
        if request.stream and self.usage:
            fields["stream_options"] = USAGE
        number = 0
        if self.count < request.num_choices:
            prompt, number = divmod(self.first, request.n)
            for name in ("best_of", "session_id"):
                fields.pop(name, None)
            if request.prompts:
                fields["prompt"] = request.prompts[prompt]
        if self.count == 1:
            fields.pop("n", None)
        if request.seed is not None:
            fields["seed"] = _raw(signed(request.seed + number))
        return msgspec.json.encode(fields)


@dataclass(frozen=True)
class Asks:
    """The requests of a group."""

    request: TextRequest
    model: str
    """The server's own name for it."""
    usage: bool
    """Whether streams are asked for their usage."""
    at_once: bool
    """Whether one request is for all choices, or each for one."""

    @property
    def number(self) -> int:
        return 1 if self.at_once else self.request.num_choices

    @property
    def prompts_at(self) -> range:
        """First choices of the requests in which a prompt is seen first."""
        return range(0, 1 if self.at_once else self.request.num_choices, self.request.n)

    def __iter__(self) -> Iterator[Ask]:
        count = self.request.num_choices // self.number
        return (Ask(self.request, self.model, self.usage, number * count, count) for number in range(self.number))

    def as_singles(self) -> "Asks":
        """Raises RequestError for what single requests cannot give."""
        request = self.request
        if request.num_choices > 1 and request.best_of is not None and request.best_of > request.n:
            raise RequestError(
                f"Unsupported parameter: the server of `{request.model}` has no 'best_of' for several choices.",
                param="best_of",
                code="unsupported_parameter",
            )
        return replace(self, at_once=False)


def signed(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    return (seed + 2**63) % 2**64 - 2**63


def _raw(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
