"""What is counted of tickets between vLLM servers. Shared by all engines of a gateway."""

from collections import Counter
from enum import StrEnum


class PullFallback(StrEnum):
    """Why a group did without the KV that its ticket promised; a label of the metric."""

    LATE = "late"
    """Its first token did not come in time."""
    FAILED = "failed"
    """The decode server ended the request that had the ticket."""


class UnusedTicket(StrEnum):
    """What became of a ticket that no decode server took; a label of the metric."""

    RELEASED = "released"
    """The prefill server was told at once."""
    LEFT = "left"
    """Nobody could tell it: its lease ends by itself."""


class PDFigures:
    """All labels are there from the beginning."""

    def __init__(self) -> None:
        self.pull_fallbacks = Counter[str]({reason.value: 0 for reason in PullFallback})
        self.tickets_unused = Counter[str]({end.value: 0 for end in UnusedTicket})
