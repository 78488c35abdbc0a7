"""What models are on this machine: the default one, and those in the hub's cache."""

from dataclasses import dataclass
from pathlib import Path

from motet.models.smollm2 import DEFAULT_MODEL, Smollm2
from motet.models.source import quietly


@dataclass(frozen=True)
class KeptModel:
    name: str
    size_bytes: int
    """0: not here yet."""
    path: Path


def kept_models(cache: Path) -> list[KeptModel]:
    """The default model first, here or not; then the hub's, by name."""
    from huggingface_hub import scan_cache_dir  # here, as in `hub`
    from huggingface_hub.errors import CacheNotFound

    default = Smollm2(cache, say=quietly)
    models = [KeptModel(DEFAULT_MODEL, folder_bytes(default.folder), default.folder)]
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return models
    found = [KeptModel(r.repo_id, r.size_on_disk, r.repo_path) for r in repositories if r.repo_type == "model"]
    return models + sorted(found, key=lambda model: model.name)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
