"""Files and batches, as they are stored, and as clients see them (`FileRecord.shown`, `batch_shown`)."""

from enum import StrEnum

import msgspec

from motet.ids import new_request_id

ANONYMOUS_OWNER = ""
"""The owner of the files and batches of all requests without an API key."""
WINDOW, WINDOW_S = "24h", 24 * 60 * 60
"""The only completion window, in OpenAI's form and in seconds."""


class FilePurpose(StrEnum):
    BATCH = "batch"
    """An uploaded file with the lines of a batch."""
    BATCH_OUTPUT = "batch_output"
    """The output or error file of a batch."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A complete file. Its content is in the folder, under its id."""

    id: str
    owner: str
    """`Rights.client_id` of the API key; `ANONYMOUS_OWNER` without one."""
    num_bytes: int
    created_s: int
    expires_s: int
    filename: str
    """The client's name of the file. It is only shown, and no path contains it."""
    purpose: FilePurpose

    def shown(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchStatus(StrEnum):
    """The states of a batch.

    validating ─► in_progress ─► finalizing ─► completed
        │              │ ├──► expired
        ├──► failed ◄──┘ └──► cancelling ─► cancelled
        └──► cancelling
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class BatchProblem(msgspec.Struct, frozen=True, kw_only=True):
    """A reason why a batch failed: OpenAI's `BatchError`."""

    code: str
    message: str
    line: int | None = None
    """Number of the line in the input file, from 1."""
    param: str | None = None


class LineCounts(msgspec.Struct, frozen=True):
    """Numbers of lines: OpenAI's `BatchRequestCounts`."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchTokens(msgspec.Struct, frozen=True):
    """Numbers of tokens of all answers of a batch."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def plus(self, other: "BatchTokens") -> "BatchTokens":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return BatchTokens(*(mine + more for mine, more in pairs))

    def shown(self) -> dict[str, object]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. `output_id` and `error_id` are the names of its files from the start; clients see them at the end."""

    id: str
    owner: str
    endpoint: str
    input_id: str
    output_id: str
    error_id: str
    created_s: int
    expires_s: int
    status: BatchStatus = BatchStatus.VALIDATING
    times_s: dict[BatchStatus, int] = {}
    """Time at which the batch reached each state after the first."""
    metadata: dict[str, str] | None = None
    output_keep_s: int | None = None
    """Time after which its output and error file expire; None for the server's setting."""
    model: str | None = None
    """The model that all lines name; None if they name several or none."""
    counts: LineCounts = LineCounts()
    tokens: BatchTokens = BatchTokens()
    problems: tuple[BatchProblem, ...] = ()
    has_output: bool = False
    has_errors: bool = False
    """True if the batch has ended and the file has a line."""

    @property
    def ended(self) -> bool:
        return self.status in ENDED


def reached(record: BatchRecord, status: BatchStatus, *, now_s: float) -> "BatchRecord":
    """Returns the batch in another state."""
    times_s = {**record.times_s, status: int(now_s)}
    return msgspec.structs.replace(record, status=status, times_s=times_s)


def batch_shown(record: BatchRecord) -> dict[str, object]:
    """Returns OpenAI's object."""
    times = {f"{status.value}_at": record.times_s.get(status) for status in BatchStatus if status != "validating"}
    problems = [msgspec.to_builtins(problem) for problem in record.problems]
    return {
        "id": record.id,
        "object": "batch",
        "endpoint": record.endpoint,
        "model": record.model,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": record.input_id,
        "completion_window": WINDOW,
        "status": record.status,
        "output_file_id": record.output_id if record.has_output else None,
        "error_file_id": record.error_id if record.has_errors else None,
        "created_at": record.created_s,
        "expires_at": record.expires_s,
        **times,
        "request_counts": msgspec.to_builtins(record.counts),
        "usage": record.tokens.shown() if record.tokens != BatchTokens() else None,
        "metadata": record.metadata,
    }


def new_file_id() -> str:
    return new_request_id("file")


def new_batch_id() -> str:
    return new_request_id("batch_")
