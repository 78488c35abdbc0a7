"""The files and bytes of each owner, with their limits."""

from collections import Counter
from collections.abc import Iterable

from motet.errors import RateLimitedError, RequestError
from motet.settings.batch_config import BatchConfig

MAX_UPLOADS, MAX_OWN_UPLOADS = 64, 8
"""Maximum number of uploads at a time, of all owners and of one. Each has a buffer of `store.BUFFER_BYTES`."""


def storage_full(config: BatchConfig) -> RequestError:
    message = (
        f"The files of your API key would have more than {config.batch_max_bytes} bytes, the maximum of this server "
        "(--batch-max-bytes). Delete some (DELETE /v1/files/ID)."
    )
    return RequestError(message, param="file", code="storage_limit_exceeded")


class StorageUsage:
    """Counts what each owner stores, including files that grow."""

    def __init__(self, config: BatchConfig) -> None:
        self._config = config
        self._bytes: Counter[str] = Counter()
        self._files: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()

    def count(self, stored: Iterable[tuple[str, int, int]]) -> None:
        """Counts what a folder has: the owner, a number of files, and their bytes."""
        for owner, num_files, num_bytes in stored:
            self._files[owner] += num_files
            self._bytes[owner] += num_bytes

    def start_upload(self, owner: str) -> None:
        """Counts a file that is uploaded. Raises RequestError above a limit."""
        if self._files[owner] >= self._config.batch_max_files:
            message = (
                f"Your API key has {self._files[owner]} files, and can have at most {self._config.batch_max_files} "
                "(--batch-max-files). Delete some (DELETE /v1/files/ID)."
            )
            raise RequestError(message, param="file", code="too_many_files")
        if self._uploads[owner] >= MAX_OWN_UPLOADS or self._uploads.total() >= MAX_UPLOADS:
            raise RateLimitedError("Too many files are uploaded at this time. Try again when some have ended.")
        self._uploads[owner] += 1
        self._files[owner] += 1

    def end_upload(self, owner: str, *, num_bytes: int, kept: bool) -> None:
        """Undoes `start_upload`. `kept`: False for an upload that failed, whose bytes are freed."""
        self._uploads[owner] -= 1
        if not kept:
            self.remove(owner, num_bytes=num_bytes)

    def add_file(self, owner: str) -> None:
        """Counts a file whose bytes are counted already."""
        self._files[owner] += 1

    def grow(self, owner: str, num_bytes: int) -> None:
        """Counts more bytes. Raises RequestError above the limit, and counts nothing then."""
        if self._bytes[owner] + num_bytes > self._config.batch_max_bytes:
            raise storage_full(self._config)
        self._bytes[owner] += num_bytes

    def remove(self, owner: str, *, num_bytes: int) -> None:
        """Undoes the counts of a file."""
        self._files[owner] -= 1
        self._bytes[owner] -= num_bytes

    @property
    def total_bytes(self) -> int:
        return self._bytes.total()

    def num_bytes(self, owner: str) -> int:
        return self._bytes[owner]

    def num_files(self, owner: str) -> int:
        return self._files[owner]

    def check(self) -> None:
        if min([0, *self._bytes.values(), *self._files.values(), *self._uploads.values()]) < 0:
            raise AssertionError(f"{self._bytes} bytes, {self._files} files and {self._uploads} uploads")
