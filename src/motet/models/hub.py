"""Models from the Hugging Face hub, kept in its own cache; without a connection, from that cache alone.

The hub's client is imported where it is used: it takes a fifth of a second, and who has a folder needs none of it.
"""

import re
from pathlib import Path

import httpx

from motet.errors import ModelLoadError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZER_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")
CONNECT_TIMEOUT_S = 5.0


def fetch(name: str, *, revision: str | None) -> Path:
    """The folder of a model, downloaded when it is not there yet (with the hub's progress bar)."""
    return download(name, revision=revision, patterns=MODEL_PATTERNS)


def fetch_tokenizer(name: str, *, revision: str | None) -> Path:
    return download(name, revision=revision, patterns=TOKENIZER_PATTERNS)


def download(name: str, *, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    shown = name if revision is None else f"{name} at {revision}"
    online = is_reachable()
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=not online)
    except GatedRepoError as exc:
        raise ModelLoadError(f"{shown} is gated: accept its terms on the hub, then run `hf auth login`") from exc
    except RepositoryNotFoundError as exc:
        raise ModelLoadError(f"{name}: there is no such model on the hub, or it is private (`hf auth login`)") from exc
    except RevisionNotFoundError as exc:
        raise ModelLoadError(f"{shown}: the model has no such revision") from exc
    except LocalEntryNotFoundError as exc:
        why = (
            "could not be downloaded" if online else f"is not in the cache, and {constants.ENDPOINT} cannot be reached"
        )
        raise ModelLoadError(f"{shown} {why}: check the connection, or give a local folder") from exc
    except (HFValidationError, HfHubHTTPError, OSError) as exc:
        raise ModelLoadError(f"{shown} could not be downloaded: {exc}") from exc
    return Path(folder)


def is_reachable() -> bool:
    """Whether the hub answers at all: its own client knows no time-out and would hang behind a firewall."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=CONNECT_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return True
