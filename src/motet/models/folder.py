"""Checks a model folder before an engine starts with it. An error states in one line what is missing or broken."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from motet.errors import ModelLoadError
from motet.log import cut
from motet.models.gguf_files.gguf_header import SUFFIX, read_gguf
from motet.models.regular_files import check_folder, read_regular
from motet.models.safetensors_header import MAX_NAME_CHARS, Header, check_safetensors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("pytorch_model*.bin", "*.pt", "*.pth")
"""Names of files with weights in Python's pickle format."""
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
    check_index(folder, {file: read_header(file)[0] for file in weight_files(folder)})


def check_tokenizer(folder: Path) -> None:
    """Raises `ModelLoadError` unless there is a tokenizer."""
    _check_files(folder)
    if not (folder / TOKENIZER).is_file():
        raise ModelLoadError(f"{folder} has no {TOKENIZER}: name a model that has one with --tokenizer")


def weight_files(folder: Path) -> Iterator[Path]:
    """Yields the files with the weights, as transformers chooses them: the files in the index, `model.safetensors`, or
    all safetensors files. Without any, a folder can have one GGUF file."""
    index, single = folder / INDEX, folder / WEIGHTS
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        if not names:
            raise ModelLoadError(f"{index} has an empty weight_map")
        if single.exists() and WEIGHTS not in names:
            raise ModelLoadError(f"{folder} has {WEIGHTS} and {INDEX}, which does not name it: remove one of them")
        for name in names:
            if Path(name).name != name:
                raise ModelLoadError(f"{index} names {name!r}, which is not the name of a file in its folder")
            yield folder / name
        return
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files and (files := sorted(folder.glob(f"*{SUFFIX}"))[:2]) and len(files) > 1:
        raise ModelLoadError(f"{folder} has several GGUF files, such as {files[0].name}: serve one of them by its path")
    if not files:
        pickled = [file.name for pattern in PICKLED for file in sorted(folder.glob(pattern))]
        if pickled:
            raise ModelLoadError(
                f"{folder} has its weights in {pickled[0]}, a format that can contain code: convert it with "
                f"`python -m motet.models.convert {folder} NEW_FOLDER`, and serve NEW_FOLDER"
            )
        raise ModelLoadError(f"{folder} has no weights (*.safetensors)")
    yield from files


def read_header(file: Path) -> tuple[Header, int]:
    """Returns the header of a file with weights, and the offset of the data. Raises ModelLoadError."""
    if file.suffix != SUFFIX:
        return check_safetensors(file)
    header = read_gguf(file)
    return header.tensors, header.data_begin


def check_index(folder: Path, headers: Mapping[Path, Header]) -> None:
    """Raises ModelLoadError if the index of a folder names a tensor that is not in its file: a shard was exchanged or
    replaced."""
    index = folder / INDEX
    if not index.exists():
        return
    for tensor, name in _weight_map(index).items():
        if tensor not in headers[folder / name]:
            others = [file.name for file, header in headers.items() if tensor in header]
            found = f"; it is in {others[0]}" if others else ""
            raise ModelLoadError(
                f"{folder / name} has no tensor {cut(tensor, MAX_NAME_CHARS)}, which {INDEX} names{found}: "
                "download the model again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode(_content(index), type=WeightIndex).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ModelLoadError(f"{index} has no weight_map with the file of each tensor: {exc}") from exc


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
