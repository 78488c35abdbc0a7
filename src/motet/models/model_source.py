"""Resolves the name of a model to a checked folder, and lists local models.

1. a path (`./m`, `/models/m`, or any folder that exists): checked, and used in place
2. `smollm2`, the default model: made once, stored in the cache folder
3. any other name is a name on the hub, stored in the hub's own cache
"""

from dataclasses import dataclass
from pathlib import Path

from motet.errors import ModelLoadError
from motet.models.folder import check_model, check_tokenizer
from motet.models.hub import HUB_NAME, MODEL_PATTERNS, TOKENIZER_PATTERNS, fetch
from motet.models.smollm2 import DEFAULT_MODEL, Say, Smollm2, silent


def resolve(name: str, *, cache: Path, revision: str | None = None, say: Say = silent) -> Path:
    """Finds or downloads a model, and returns its folder, which can lack a tokenizer. Raises ModelLoadError."""
    folder = _found(name, cache, patterns=MODEL_PATTERNS, revision=revision, say=say)
    check_model(folder)
    return folder


def resolve_tokenizer(name: str, *, cache: Path, say: Say = silent) -> Path:
    """Finds or downloads a folder with a tokenizer, which can lack everything else. Raises `ModelLoadError`."""
    folder = _found(name, cache, patterns=TOKENIZER_PATTERNS, revision=None, say=say)
    check_tokenizer(folder)
    return folder


def _found(name: str, cache: Path, *, patterns: tuple[str, ...], revision: str | None, say: Say) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelLoadError(f"{name} is a file: name the folder that contains config.json and the weights")
    if name.startswith(("/", "./", "../", "~")):
        raise ModelLoadError(f"{name}: there is no such folder")
    if name == DEFAULT_MODEL:
        return Smollm2(cache, say=say).get()
    if not HUB_NAME.fullmatch(name):
        raise ModelLoadError(
            f"{name}: neither a folder nor a name on the hub (org/name), nor {DEFAULT_MODEL}, the default model"
        )
    say(f"looking for {name} on the hub")
    return fetch(name, revision=revision, patterns=patterns)


@dataclass(frozen=True)
class LocalModel:
    name: str
    size_bytes: int
    """Size in bytes; 0 if the model has not been downloaded."""
    path: Path


def kept_models(cache: Path) -> list[LocalModel]:
    """Returns the default model, downloaded or not, and then the models in the hub's cache, by name."""
    from huggingface_hub import scan_cache_dir  # imported here, as in `hub`
    from huggingface_hub.errors import CacheNotFound

    folder = Smollm2(cache).folder
    size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    models = [LocalModel(DEFAULT_MODEL, size_bytes, folder)]
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return models
    found = [LocalModel(r.repo_id, r.size_on_disk, r.repo_path) for r in repositories if r.repo_type == "model"]
    return models + sorted(found, key=lambda model: model.name)
