"""Models from the Hugging Face hub, stored in the hub's cache. Without a connection, only that cache is used.

    1. without a connection: the folder in the cache, if it is complete
    2. list the files and their sizes, which also checks that the model exists and that the user has access to it
    3. download the missing files; the hub's client resumes a file whose connection breaks, and a later run keeps all
       files that were complete

The hub's client is imported where it is used: the import takes 0.2 s, and a local folder does not need it."""

import contextlib
import difflib
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from motet.errors import ModelLoadError
from motet.models.progress import SILENT, Progress, folder_bytes, size_text, watched

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZER_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")
CONNECT_TIMEOUT_S = 5.0
SPARE_BYTES = 100 * 2**20
"""Disk space that a download must leave free."""


def fetch(name: str, *, revision: str | None, patterns: tuple[str, ...], progress: Progress = SILENT) -> Path:
    """Returns a folder with a model's files of these patterns; downloads missing ones. Raises ModelLoadError."""
    from huggingface_hub import constants, errors, get_token, snapshot_download

    http_error: type[Exception] = errors.HfHubHTTPError.__mro__[1]
    shown = name if revision is None else f"{name} at {revision}"
    login = "the token of HF_TOKEN or `hf auth login`" + (" has no access to it" if get_token() else " is needed")
    online = is_reachable()
    snapshot = partial(snapshot_download, name, revision=revision, allow_patterns=list(patterns))
    try:
        with _silent_client():
            folder = (
                download(snapshot, name, shown=shown, progress=progress) if online else snapshot(local_files_only=True)
            )
    except errors.GatedRepoError as exc:
        raise ModelLoadError(f"{shown} is gated: accept its terms on {constants.ENDPOINT}/{name}; {login}") from exc
    except errors.RepositoryNotFoundError as exc:
        raise ModelLoadError(
            f"{name}: there is no such model on {constants.ENDPOINT}, or it is private and {login}"
        ) from exc
    except errors.RevisionNotFoundError as exc:
        raise ModelLoadError(f"{shown}: the model has no such revision") from exc
    except errors.LocalEntryNotFoundError as exc:
        raise ModelLoadError(
            _missing(shown) if not online else f"{shown} could not be downloaded: {_reason(exc)}"
        ) from exc
    except (errors.HFValidationError, errors.XetDownloadError, http_error, OSError) as exc:
        if getattr(getattr(exc, "response", None), "status_code", None) == httpx.codes.UNAUTHORIZED:
            raise ModelLoadError(
                f"{shown}: {constants.ENDPOINT} refuses the token of HF_TOKEN or `hf auth login`"
            ) from exc
        raise ModelLoadError(
            f"{shown} could not be downloaded: {_reason(exc)}. Run the command again: it keeps the complete files"
        ) from exc
    except (AttributeError, LookupError, TypeError, ValueError) as exc:  # the hub's client does not check all answers
        raise ModelLoadError(
            f"{shown} could not be downloaded: {constants.ENDPOINT} sent an invalid answer ({_reason(exc)})"
        ) from exc
    return Path(folder)


@contextlib.contextmanager
def _silent_client() -> Iterator[None]:
    """Silences the hub's client, since `progress` shows the download and a connection that resumes needs no warning.
    Afterwards, other downloads of this process have their bars again."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    log, were_disabled = logging.getLogger("huggingface_hub"), are_progress_bars_disabled()
    level = log.level
    disable_progress_bars()
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        if not were_disabled:
            enable_progress_bars()


def download(snapshot: Callable[..., Any], name: str, *, shown: str, progress: Progress) -> str:
    """Returns the folder of a snapshot after downloading the files that it lacks."""
    from huggingface_hub import constants, errors
    from huggingface_hub.file_download import repo_folder_name

    try:
        missing = sum(file.file_size or 0 for file in snapshot(dry_run=True) if file.will_download)
    except errors.DryRunError:  # the download raises the reason, unless the cache has the model
        missing = 0
    if not missing:
        return str(snapshot())
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    if missing + SPARE_BYTES > (free := shutil.disk_usage(cache).free):
        raise ModelLoadError(
            f"{shown} needs {size_text(missing)}, and {cache} has {size_text(free)} free: set HF_HUB_CACHE to a folder"
            " on a larger disk"
        )
    folder = cache / repo_folder_name(repo_id=name, repo_type="model")
    label = f"downloading {shown}"
    with progress.stage(label, missing) as report, watched(folder, report, less_bytes=folder_bytes(folder)):
        return str(snapshot())


def _missing(shown: str) -> str:
    """Returns the error for a model that is not in the cache of a machine without a connection."""
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
    near = difflib.get_close_matches(shown, [name for name, _, _ in kept()], 1)
    advice = f"did you mean {near[0]}?" if near else "name a local folder, or set HF_HUB_CACHE to a cache that has it"
    return f"{shown} is not in the cache {constants.HF_HUB_CACHE}, and {reason}: {advice}"


def _reason(error: Exception) -> str:
    """Returns the first line of an error. The hub's client writes advice for its own callers after it."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def kept() -> list[tuple[str, int, Path]]:
    """Returns name, size in bytes and folder of each model in the hub's cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((r.repo_id, r.size_on_disk, r.repo_path) for r in repositories if r.repo_type == "model")


def is_reachable() -> bool:
    """Returns True if the hub answers. The hub's own client has no timeout and would hang behind a firewall."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=CONNECT_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return True


def cached_folder(name: str) -> Path | None:
    """Returns the folder of a model that was downloaded before; None if it is not in the cache."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (errors.HFValidationError, errors.LocalEntryNotFoundError, OSError):
        return None
