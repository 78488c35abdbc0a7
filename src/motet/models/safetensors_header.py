"""Reads and checks the header of a safetensors file, which states the name, dtype, shape and place of each tensor.

    8 bytes, length of the header, little endian | header, JSON | data

The header comes from a model folder, from a trainer's folder or from the body of a request, so every value is checked:
a broken file is refused with a message that names it and says what is wrong."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec

from motet.errors import ModelLoadError
from motet.log import cut
from motet.models.regular_files import open_regular

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes per element of each dtype that weights can have, by its safetensors name. Engines round to their own dtype."""
STORED_BYTES = {
    **ITEM_BYTES,
    "F64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "U16": 2,
    "I16": 2,
    "U32": 4,
    "I32": 4,
    "U64": 8,
    "I64": 8,
}
"""Bytes per element of the dtypes in files. Quantized weights have others than `ITEM_BYTES`."""
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 2**20
"""Maximum size of a header. The JSON of a tensor has about 120 bytes, so 8,000 tensors fit in one file. The largest
dense models have 1,200 tensors (Llama 3.1 405B), and files of mixtures of experts have up to 2,500."""
LFS_POINTER = b"version https://git-lfs"
MAX_NAME_CHARS = 200
"""Maximum length of a tensor's name in messages."""

Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of a tensor in a header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]
    """Half-open range of the tensor's bytes, from the start of the data on."""

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


Header = dict[str, TensorEntry]
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(TensorEntry)
_METADATA = msgspec.json.Decoder(dict[str, str])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def check_safetensors(file: Path, *, received_as: str = "") -> tuple[Header, int]:
    """Compares a file with its header, so that a broken download is found at once. `received_as`: what a request calls
    the file, if it is not a download. Returns the header, and the offset of the data. Raises ModelLoadError."""
    name, advice = received_as or str(file), "" if received_as else ": download it again"
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            start = opened.read(HEADER_LENGTH_BYTES) or b""  # None: a file of the kernel has nothing to read now
            if start and LFS_POINTER.startswith(start):
                raise ModelLoadError(f"{name} is a git-lfs pointer, not weights: run `git lfs pull` in its repository")
            header_bytes = int.from_bytes(start, "little")
            if len(start) < HEADER_LENGTH_BYTES or not 0 < header_bytes <= size - HEADER_LENGTH_BYTES:
                raise ModelLoadError(f"{name} is not a safetensors file ({size} bytes){advice}")
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelLoadError(f"{name} has a header of {header_bytes} bytes; the maximum is {MAX_HEADER_BYTES}")
            raw = opened.read(header_bytes) or b""
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{name} is missing: download the model again") from exc
    except OSError as exc:
        raise ModelLoadError(f"{name} cannot be read: {exc.strerror}") from exc
    header, data_start = _parsed(raw, name), HEADER_LENGTH_BYTES + header_bytes
    expected = data_start + max((entry.data_offsets[1] for entry in header.values()), default=0)
    if expected != size:
        raise ModelLoadError(f"{name} has {size} bytes, but its header states {expected}{advice}")
    _check_places(header, name)
    return header, data_start


def _parsed(raw: bytes, name: str) -> Header:
    """Returns the entries of a header. Parts are parsed one by one, so that an error names its tensor."""
    part = ""
    header: Header = {}
    try:
        for tensor, entry in _PARTS.decode(raw).items():
            if tensor == "__metadata__":
                part = " in __metadata__"
                _METADATA.decode(entry)
            else:
                part = f" in tensor {cut(tensor, MAX_NAME_CHARS)}"
                header[tensor] = _ENTRY.decode(entry)
    except _UNREADABLE as exc:
        raise ModelLoadError(f"{name} has a broken header{part}: {exc}") from exc

    def check_once(pairs: list[tuple[str, object]]) -> None:
        names = Counter(key for key, _ in pairs)
        if again := next((key for key, times in names.items() if times > 1), None):
            raise ModelLoadError(f"{name} has a broken header: {cut(again, MAX_NAME_CHARS)} is in it twice")

    json.loads(raw, object_pairs_hook=check_once)  # msgspec takes the last of several
    return header


def _check_places(header: Header, name: str) -> None:
    """Raises ModelLoadError unless the tensors fill the data without gaps, each with the bytes of its shape."""
    end = 0
    for tensor, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        shown = f"{name} has a broken header: tensor {cut(tensor, MAX_NAME_CHARS)}"
        begin = entry.data_offsets[0]
        if begin != end or entry.num_bytes < 0:
            raise ModelLoadError(f"{shown} has the bytes {begin} to {entry.data_offsets[1]}, and should start at {end}")
        item_bytes = STORED_BYTES.get(entry.dtype)
        if item_bytes is not None and entry.num_bytes != (needed := math.prod(entry.shape) * item_bytes):
            raise ModelLoadError(f"{shown} has {entry.num_bytes} bytes, and its shape needs {needed}")
        end = entry.data_offsets[1]
