"""The figures of a running batch."""

from dataclasses import dataclass


@dataclass
class BatchProgress:
    """Counts of lines, updated by the run and read by the display."""

    num_lines: int
    """Lines of the input that are not blank."""
    num_before: int = 0
    """Lines that had a result at the start."""
    num_completed: int = 0
    """Lines with a result of this run."""
    num_failed: int = 0
    """Lines in the file of errors."""
    first_failure: str = ""
    """The first request of this run that failed, and the reason; empty before it."""
    num_tokens: int = 0
    """Prompt and output tokens of the results of this run."""
    num_retries: int = 0
    num_in_progress: int = 0
    limit: int = 0
    """Maximum number of requests in progress."""

    @property
    def num_done(self) -> int:
        return self.num_before + self.num_completed + self.num_failed

    @property
    def num_left(self) -> int:
        return max(self.num_lines - self.num_done, 0)
