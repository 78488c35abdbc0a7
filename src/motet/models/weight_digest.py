"""Computes a digest of weights, so that two servers know if they run the same model.

    sha256 over, for each tensor in the order of names: sha256 of name | dtype | shape | bytes

The digest does not depend on how the tensors are spread over files. The digest of large weights is kept in Motet's
cache, by the paths, sizes and times of the files, so that later starts do not read them twice. Current processors have
instructions for SHA-256: 0.16 s for 269 MB, half the time of BLAKE2b. Two threads share the tensors.

Hugging Face's cache names each large file by its SHA-256. This name is checked when the digest is computed, so that a
file that was damaged after its download is noticed."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from operator import itemgetter
from pathlib import Path

from motet.errors import ModelLoadError
from motet.models.checkpoint import checkpoint_files
from motet.models.file_reading import FileReading
from motet.models.folder import check_index, read_header
from motet.models.safetensors_header import Header
from motet.system.threads import in_daemon_thread

SHA256 = re.compile("[0-9a-f]{64}")
KEPT = "weights-2"
"""The folder of kept digests. A change of their form needs another folder."""
THREADS = 2
MIN_KEPT_BYTES = 2**27
"""Minimum size of weights whose digest is kept. For smaller ones it is computed at every start, in at most 0.1 s."""


def start_weights_digest(
    paths: Sequence[Path], cache: Path | None, *, reading: FileReading | None = None
) -> "Future[str]":
    """Computes `weights_digest` in its own thread while the weights are loaded."""
    return in_daemon_thread(lambda: weights_digest(paths, cache, reading=reading), name="weights-digest")


def weights_digest(paths: Sequence[Path], cache: Path | None, *, reading: FileReading | None = None) -> str:
    """Returns 64 hexadecimal digits for the tensors in folders or files. `cache`: folder in which digests of large
    files are kept; None if they are not kept. Raises ModelLoadError for files that are missing or broken, or whose
    reading hangs."""
    reading = reading or FileReading()
    try:
        return _kept_or_computed(paths, cache, reading=reading)
    except OSError as exc:
        raise ModelLoadError(f"{exc.filename} cannot be read: {exc.strerror}") from exc


def read_headers(paths: Sequence[Path], reading: FileReading) -> dict[Path, tuple[Header, int]]:
    """Returns the header of each file of a checkpoint, and the offset of its data. Raises ModelLoadError."""
    headers: dict[Path, tuple[Header, int]] = {}
    for path in paths:
        found = {}
        for file in checkpoint_files([path]):
            reading.note(file)
            found[file] = read_header(file)
        if path.is_dir():
            check_index(path, {file: header for file, (header, _) in found.items()})
        headers |= found
    return headers


def _kept_or_computed(paths: Sequence[Path], cache: Path | None, *, reading: FileReading) -> str:
    headers = read_headers(paths, reading)
    files = list(headers)
    if cache is None or sum(file.stat().st_size for file in files) < MIN_KEPT_BYTES:
        return _checked(headers, reading)
    kept = cache / KEPT / _key(files)
    with contextlib.suppress(OSError):
        if len(digest := kept.read_text(encoding="utf-8")) == 64:
            return digest
    digest = _checked(headers, reading)
    partial = kept.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # then it is computed again the next time
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(digest, encoding="utf-8")
        partial.replace(kept)
    return digest


def _key(files: list[Path]) -> str:
    """Returns a key that changes when a file is written or replaced."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    facts = [(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _checked(headers: Mapping[Path, tuple[Header, int]], reading: FileReading) -> str:
    """Returns the digest. Raises ModelLoadError for a file in Hugging Face's cache whose SHA-256 is not its name."""
    for file in headers:
        blob = file.resolve()
        if blob.parent.name == "blobs" and SHA256.fullmatch(blob.name):
            digest = hashlib.sha256()
            for piece in reading.pieces(blob, begin=0, end=blob.stat().st_size):
                digest.update(piece)
            if digest.hexdigest() != blob.name:
                raise ModelLoadError(
                    f"{file} is damaged: its SHA-256 is not {blob.name}. Delete {blob} and download the model again"
                )
    return _computed(headers, reading)


def _computed(headers: Mapping[Path, tuple[Header, int]], reading: FileReading) -> str:
    places = [
        (name, file, entry, data_begin)
        for file, (header, data_begin) in headers.items()
        for name, entry in header.items()
    ]
    places.sort(key=itemgetter(0, 1))
    digests = [b""] * len(places)
    todo = count()

    def compute() -> None:
        for index in iter(todo.__next__, None):
            if index >= len(places):
                return
            name, file, entry, data_begin = places[index]
            begin, end = entry.data_offsets
            digest = hashlib.sha256(f"{name}|{entry.dtype}|{[*entry.shape]}|{end - begin}\n".encode())
            for piece in reading.pieces(file, begin=data_begin + begin, end=data_begin + end):
                digest.update(piece)  # without the GIL
            digests[index] = digest.digest()

    # Daemon threads: the threads of a pool would delay the end of the process if a read hangs.
    threads = [in_daemon_thread(compute, name="weights-digest") for _ in range(THREADS)]
    for thread in threads:
        reading.wait_for(thread)
    return hashlib.sha256(b"".join(digests)).hexdigest()
