"""What another server says in place of an answer. What it means depends on the kind of the server. Pure."""

from dataclasses import dataclass
from http import HTTPStatus

NO_SUCH_ROUTE = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED)
NOT_TAKEN = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
"""Something in the request is not to its liking."""
QUOTED_CHARS = 300


@dataclass(frozen=True)
class Refusal:
    """A response that is not what was asked for."""

    status: int
    phrase: str
    """Of the status line."""
    body: bytes
    retry_after: str = ""

    @property
    def quoted(self) -> str:
        """How its body begins."""
        return self.body.decode(errors="replace").strip()[:QUOTED_CHARS]

    @property
    def retry_after_s(self) -> int | None:
        """None: not told, or not in seconds."""
        return int(self.retry_after) if self.retry_after.isascii() and self.retry_after.isdigit() else None
