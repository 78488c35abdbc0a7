"""What a chat answer has beside its text, streamed or not, as its request asks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ChatExtras:
    num_top: int | None = None
    """Alternatives beside each token, None without log-probabilities."""
    token_ids: bool = False
    reasoning: bool = True
    """Whether what was thought is shown; it counts all the same."""
    calls: bool = False
    """Whether tools may be called. An answer that only calls has null for its content."""
