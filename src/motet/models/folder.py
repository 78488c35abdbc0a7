"""Checks a model folder before an engine starts with it. An error states in one line what is missing or broken."""

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from motet.errors import ModelLoadError
from motet.models.regular_files import check_folder, read_regular
from motet.models.safetensors_header import check_safetensors

INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
MAX_JSON_BYTES = 16 * 2**20
"""Maximum size of a JSON file. The index of a model with 140,000 tensors has 15 MB."""


class WeightIndex(msgspec.Struct):
    """The fields of an index that are used."""

    weight_map: dict[str, str]
    """Name of the file of each tensor."""


def check_model(folder: Path) -> None:
    """Raises `ModelLoadError` unless config and weights exist and are complete."""
    config = read_object(folder / "config.json")
    if "model_type" not in config:
        raise ModelLoadError(f"{folder / 'config.json'} has no model_type: it is not a transformers model")
    _check_files(folder)
    for file in weight_files(folder):
        check_safetensors(file)


def check_tokenizer(folder: Path) -> None:
    """Raises `ModelLoadError` unless there is a tokenizer."""
    _check_files(folder)
    if not (folder / TOKENIZER).is_file():
        raise ModelLoadError(f"{folder} has no {TOKENIZER}: name a model that has one with --tokenizer")


def weight_files(folder: Path) -> Iterator[Path]:
    """Yields the files with the weights: the files in the index, or all safetensors files."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(msgspec.json.decode(_content(index), type=WeightIndex).weight_map.values()))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ModelLoadError(f"{index} has no weight_map with the file of each tensor: {exc}") from exc
        if not names:
            raise ModelLoadError(f"{index} has an empty weight_map")
        for name in names:
            if Path(name).name != name:
                raise ModelLoadError(f"{index} names {name!r}, which is not the name of a file in its folder")
            yield folder / name
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no weights (*.safetensors)")
    yield from files


def read_object(file: Path) -> dict[str, object]:
    """Reads a JSON object from a file."""
    try:
        content = json.loads(_content(file))
    except (ValueError, RecursionError) as exc:
        raise ModelLoadError(f"{file} is broken: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is broken: an object was expected")
    return content


def _content(file: Path) -> bytes:
    try:
        return read_regular(file, max_bytes=MAX_JSON_BYTES)
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{file} is missing: {file.parent} is not a model folder") from exc
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc


def _check_files(folder: Path) -> None:
    """Raises ModelLoadError for an entry that is neither a regular file nor a folder, because a library that reads it
    could block for ever."""
    try:
        check_folder(folder)
    except OSError as exc:
        raise ModelLoadError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
