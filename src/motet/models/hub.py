"""Models from the Hugging Face hub, stored in the hub's cache. Without a connection, only that cache is used.

The hub's client is imported where it is used: the import takes 0.2 s, and a local folder does not need it."""

import re
from pathlib import Path

import httpx

from motet.errors import ModelLoadError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
TOKENIZER_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja")
MODEL_PATTERNS = (*TOKENIZER_PATTERNS, "*.safetensors")
CONNECT_TIMEOUT_S = 5.0


def fetch(name: str, *, revision: str | None, patterns: tuple[str, ...]) -> Path:
    """Returns a folder with a model's files of these patterns; downloads missing ones. Raises ModelLoadError."""
    from huggingface_hub import constants, errors, snapshot_download

    shown = name if revision is None else f"{name} at {revision}"
    online = is_reachable()
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=not online)
    except errors.GatedRepoError as exc:
        raise ModelLoadError(f"{shown} is gated: accept its terms on the hub, then run `hf auth login`") from exc
    except errors.RepositoryNotFoundError as exc:
        raise ModelLoadError(f"{name}: there is no such model on the hub, or it is private (`hf auth login`)") from exc
    except errors.RevisionNotFoundError as exc:
        raise ModelLoadError(f"{shown}: the model has no such revision") from exc
    except errors.LocalEntryNotFoundError as exc:
        offline = f"is not in the cache, and {constants.ENDPOINT} cannot be reached"
        reason = "could not be downloaded" if online else offline
        raise ModelLoadError(f"{shown} {reason}: check the connection, or use a local folder") from exc
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as exc:
        raise ModelLoadError(f"{shown} could not be downloaded: {exc}") from exc
    return Path(folder)


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
