"""The files and bytes of each owner, with their limits."""

from collections import Counter
from collections.abc import Iterable

from motet.errors import RateLimitedError, RequestError
from motet.settings.batch_config import BatchConfig

MAX_UPLOADS, MAX_OWN_UPLOADS = 64, 8
"""Maximum number of uploads at a time, of all owners and of one. Each has a buffer of `store.BUFFER_BYTES`."""
MAX_OWN_DOWNLOADS = 64
"""Maximum number of downloads of an owner at a time. Each has an open file."""


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
        self._downloads: Counter[str] = Counter()
        self._readers: Counter[str] = Counter()
        """Number of downloads of each file."""
        self._unlinked: dict[str, tuple[str, int]] = {}
        """Owner and bytes of each deleted file that is still downloaded, and takes space until then."""

    def count(self, stored: Iterable[tuple[str, int, int]]) -> None:
        """Counts what a folder has: the owner, a number of files, and their bytes."""
        for owner, num_files, num_bytes in stored:
            self._files[owner] += num_files
            self._bytes[owner] += num_bytes

    def start_upload(self, owner: str) -> None:
        """Counts a file that is uploaded. Raises RequestError above a limit."""
        self.check_num_files(owner, param="file")
        if self._uploads[owner] >= MAX_OWN_UPLOADS or self._uploads.total() >= MAX_UPLOADS:
            raise RateLimitedError("Too many files are uploaded at this time. Try again when some have ended.")
        self._uploads[owner] += 1
        self._files[owner] += 1

    def check_num_files(self, owner: str, *, param: str) -> None:
        """Raises RequestError if an owner cannot have more files. `param`: the field that needs another file."""
        if self._files[owner] >= self._config.batch_max_files:
            message = (
                f"Your API key has {self._files[owner]} files, and can have at most {self._config.batch_max_files} "
                "(--batch-max-files). Delete some (DELETE /v1/files/ID)."
            )
            raise RequestError(message, param=param, code="too_many_files")

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
        """Undoes the counts of a file that takes no space any more."""
        self._files[owner] -= 1
        self._bytes[owner] -= num_bytes

    def start_download(self, owner: str, *, id: str) -> None:
        """Counts a download. Raises RateLimitedError above the limit."""
        if self._downloads[owner] >= MAX_OWN_DOWNLOADS:
            raise RateLimitedError("Too many files are downloaded at this time. Try again when some have ended.")
        self._downloads[owner] += 1
        self._readers[id] += 1

    def end_download(self, owner: str, *, id: str) -> None:
        """Undoes `start_download`."""
        self._downloads[owner] -= 1
        self._readers[id] -= 1
        if not self._readers[id]:
            del self._readers[id]
            if (unlinked := self._unlinked.pop(id, None)) is not None:
                self.remove(unlinked[0], num_bytes=unlinked[1])

    def remove_stored(self, owner: str, *, id: str, num_bytes: int) -> None:
        """Undoes the counts of a deleted file: at once, or at the end of its last download."""
        if id in self._readers:
            self._unlinked[id] = (owner, num_bytes)
        else:
            self.remove(owner, num_bytes=num_bytes)

    @property
    def total_bytes(self) -> int:
        return self._bytes.total()

    def num_bytes(self, owner: str) -> int:
        return self._bytes[owner]

    def num_files(self, owner: str) -> int:
        return self._files[owner]

    def check(self) -> None:
        if (
            min([0, *self._bytes.values(), *self._files.values(), *self._uploads.values(), *self._downloads.values()])
            < 0
        ):
            raise AssertionError(f"{self._bytes} bytes, {self._files} files and {self._uploads} uploads")
