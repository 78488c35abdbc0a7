"""Resolves the name of a model to a checked folder, and lists local models.

1. a path (`./m`, `/models/m`, or any folder that exists): checked, and used in place. For a GGUF file, a folder with a
   link to it is made in the cache folder
2. `smollm2`, the default model: made once, stored in the cache folder
3. any other name is a name on the hub, stored in the hub's own cache
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

from motet.errors import ModelLoadError
from motet.models.folder import check_model, check_tokenizer
from motet.models.gguf_files.gguf_folder import check_metadata, gguf_folder, made_folder
from motet.models.gguf_files.gguf_header import SUFFIX, read_gguf
from motet.models.hub import HUB_NAME, MODEL_PATTERNS, TOKENIZER_PATTERNS, cached_folder, fetch, kept
from motet.models.progress import SILENT, Progress, folder_bytes
from motet.models.smollm2 import DEFAULT_MODEL, HUB_MODEL, Smollm2

CLOSE = 0.75
"""Minimum similarity of two names for one to be suggested in place of the other, as `difflib` measures it."""


def resolve(name: str, *, cache: Path, revision: str | None = None, progress: Progress = SILENT) -> Path:
    """Finds or downloads a model, and returns its folder, which can lack a tokenizer. Raises ModelLoadError."""
    folder = _found(name, cache, patterns=MODEL_PATTERNS, revision=revision, progress=progress)
    check_model(folder)
    return folder


def resolve_tokenizer(name: str, *, cache: Path, progress: Progress = SILENT) -> Path:
    """Finds or downloads a folder with a tokenizer, which can lack everything else. Raises `ModelLoadError`."""
    folder = _found(name, cache, patterns=TOKENIZER_PATTERNS, revision=None, progress=progress)
    check_tokenizer(folder)
    return folder


def _found(name: str, cache: Path, *, patterns: tuple[str, ...], revision: str | None, progress: Progress) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file() and path.suffix == SUFFIX:
        return gguf_folder(path, cache, progress=progress)
    check_download_name(name)
    if name == DEFAULT_MODEL:
        return Smollm2(cache, progress=progress).get()
    progress.say(f"looking for {name} on the hub")
    return fetch(name, revision=revision, patterns=patterns, progress=progress)


def public_name(name: str) -> str:
    """Returns the path or the name on the hub with which other programs load this model and its tokenizer."""
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == SUFFIX):
        return str(path.resolve())
    return HUB_MODEL if name == DEFAULT_MODEL else name


def check_download_name(name: str) -> None:
    """Raises ModelLoadError if a name that is not a folder is neither the default model nor a possible name on the
    hub."""
    if name == DEFAULT_MODEL:
        return
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == SUFFIX:
        check_metadata(path, read_gguf(path))
        return
    if path.exists():
        raise ModelLoadError(
            f"{name} is a file: name a GGUF file, or the folder that contains config.json and the weights"
        )
    if name.startswith(("/", "./", "../", "~")):
        raise ModelLoadError(f"{name}: there is no such folder")
    if difflib.get_close_matches(name.lower(), [DEFAULT_MODEL], cutoff=CLOSE):
        raise ModelLoadError(f"{name}: there is no such model: did you mean {DEFAULT_MODEL}?")
    if not HUB_NAME.fullmatch(name):
        raise ModelLoadError(
            f"{name}: neither a folder nor a name on the hub (org/name), nor {DEFAULT_MODEL}, the default model"
        )


def local_folder(name: str, *, cache: Path) -> Path | None:
    """Returns the folder of a model that is on this machine, checked or not; None if it would be downloaded."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file() and path.suffix == SUFFIX:
        return made_folder(path, cache)
    if name == DEFAULT_MODEL:
        folder = Smollm2(cache).folder
        return folder if folder.is_dir() else None
    return cached_folder(name) if HUB_NAME.fullmatch(name) else None


@dataclass(frozen=True)
class LocalModel:
    name: str
    size_bytes: int
    """Size in bytes; 0 if the model has not been downloaded."""
    path: Path


def kept_models(cache: Path) -> list[LocalModel]:
    """Returns the default model, downloaded or not, and then the models in the hub's cache, by name."""
    folder = Smollm2(cache).folder
    return [LocalModel(DEFAULT_MODEL, folder_bytes(folder), folder), *(LocalModel(*model) for model in kept())]
