"""Metrics of batches (`--batch-dir`). Counters start at 0 with the server, and not with the folder."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from motet.metrics.declare import counter_field, gauge_field


class LineOutcome(StrEnum):
    """The end of a line of a batch; a label of the metric."""

    COMPLETED = "completed"
    """The answer has a status of 2xx."""
    FAILED = "failed"
    """The answer has another status."""
    EXPIRED = "expired"
    """The batch expired before the line ran."""


@dataclass(kw_only=True)
class BatchFigures:
    """Metrics of all batches of a server. The store owns one instance, to which the runs of batches add."""

    unfinished: int = gauge_field("batches_unfinished", "batches", "Batches that have not ended.")
    running_lines: int = gauge_field("batch_lines_running", "lines", "Lines of batches whose requests run.")
    lines: dict[str, int] = counter_field("batch_lines", "lines", "Lines of batches that ended.", labels=("outcome",))
    retries: int = counter_field(
        "batch_line_retries", "requests", "Requests of lines that were refused because of load, and run again."
    )
    stored_bytes: int = gauge_field("batch_stored_bytes", "bytes", "Size of all files, and of results so far.")

    def __post_init__(self) -> None:
        self.lines = Counter({outcome.value: self.lines.get(outcome, 0) for outcome in LineOutcome})
