"""Turns the name of a model, as people write it, into a folder that has been looked over.

1. a path (`./m`, `/models/m`, or any folder there is): checked, used where it lies
2. `smollm2`, the default model: made once, kept in the cache folder
3. anything else is a name on the hub, kept in the hub's own cache
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from motet.errors import ModelLoadError
from motet.models.folder import check_model, check_tokenizer
from motet.models.hub import HUB_NAME, fetch, fetch_tokenizer
from motet.models.smollm2 import DEFAULT_MODEL, Smollm2

Say = Callable[[str], None]
"""Tells the user what takes so long, one line a stage."""


@dataclass(frozen=True)
class ModelSource:
    path: Path
    """A folder in Hugging Face's layout, complete when it was looked at."""
    name: str
    """As it was asked for."""


def quietly(line: str) -> None:
    """For callers without anybody to tell."""


def resolve(name: str, *, cache: Path, revision: str | None = None, say: Say = quietly) -> ModelSource:
    """Finds a model, or fetches it; its tokenizer is `resolve_tokenizer`'s business. Raises `ModelLoadError`."""
    if folder := as_folder(name):
        check_model(folder)
        return ModelSource(folder, name)
    if name == DEFAULT_MODEL:
        return ModelSource(Smollm2(cache, say=say).get(), name)
    say(f"looking for {name} on the hub")
    folder = fetch(on_the_hub(name), revision=revision)
    check_model(folder)
    return ModelSource(folder, name)


def resolve_tokenizer(name: str, *, cache: Path, revision: str | None = None, say: Say = quietly) -> Path:
    """Finds a folder of which only the tokenizer is wanted, or fetches that. Raises `ModelLoadError`."""
    if folder := as_folder(name):
        check_tokenizer(folder)
        return folder
    if name == DEFAULT_MODEL:
        return Smollm2(cache, say=say).get()
    folder = fetch_tokenizer(on_the_hub(name), revision=revision)
    check_tokenizer(folder)
    return folder


def as_folder(name: str) -> Path | None:
    """The folder a name stands for; None when it is no path."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelLoadError(f"{name} is a file: give the folder that holds config.json and the weights")
    if name.startswith(("/", "./", "../", "~")):
        raise ModelLoadError(f"{name}: there is no such folder")
    return None


def on_the_hub(name: str) -> str:
    if HUB_NAME.fullmatch(name):
        return name
    raise ModelLoadError(
        f"{name}: neither a folder nor a name on the hub (org/name), nor {DEFAULT_MODEL}, the default model"
    )
