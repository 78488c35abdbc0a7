"""Checks a model folder before an engine starts with it. An error states in one line what is missing or broken."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from motet.errors import ModelLoadError

INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
LFS_POINTER = b"version https://git-lfs"
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 * 2**20


def check_model(folder: Path) -> None:
    """Raises `ModelLoadError` unless config and weights exist and are complete."""
    config = read_object(folder / "config.json")
    if "model_type" not in config:
        raise ModelLoadError(f"{folder / 'config.json'} has no model_type: it is not a transformers model")
    for file in weight_files(folder):
        check_safetensors(file)


def check_tokenizer(folder: Path) -> None:
    """Raises `ModelLoadError` unless there is a tokenizer."""
    if not (folder / TOKENIZER).is_file():
        raise ModelLoadError(f"{folder} has no {TOKENIZER}: name a model that has one with --tokenizer")


def weight_files(folder: Path) -> Iterator[Path]:
    """Yields the files with the weights: the files in the index, or all safetensors files."""
    if (folder / INDEX).is_file():
        places = read_object(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelLoadError(f"{folder / INDEX} has no weight_map")
        yield from (folder / name for name in sorted({str(place) for place in places.values()}))
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(f"{folder} has no weights (*.safetensors)")
    yield from files


def check_safetensors(file: Path) -> tuple[dict[str, Any], int]:
    """Compares a file's size with its header, so that a broken download is found at once. Returns the header's entry of
    each tensor, and the offset of the data.

    A safetensors file is: 8 bytes header length (little endian) | header, JSON | data. `data_offsets` of a tensor are
    half-open and start at the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            start = opened.read(HEADER_LENGTH_BYTES)
            if start and LFS_POINTER.startswith(start):
                raise ModelLoadError(f"{file} is a git-lfs pointer, not weights: run `git lfs pull` in its repository")
            header_bytes = int.from_bytes(start, "little")
            if len(start) < HEADER_LENGTH_BYTES or not 0 < header_bytes <= min(size, MAX_HEADER_BYTES):
                raise ModelLoadError(f"{file} is not a safetensors file ({size} bytes): download it again")
            header = json.loads(opened.read(header_bytes))
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{file} is missing: download the model again") from exc
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ModelLoadError(f"{file} has a broken header: download it again") from exc
    header.pop("__metadata__", None)
    data_start = HEADER_LENGTH_BYTES + header_bytes
    expected = data_start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if expected != size:
        raise ModelLoadError(f"{file} has {size} bytes, but its header states {expected}: download it again")
    return header, data_start


def read_object(file: Path) -> dict[str, object]:
    """Reads a JSON object from a file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{file} is missing: {file.parent} is not a model folder") from exc
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ModelLoadError(f"{file} is broken: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} is broken: an object was expected")
    return content
