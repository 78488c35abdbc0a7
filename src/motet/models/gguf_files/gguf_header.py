"""Reads and checks the header of a GGUF file: its metadata, and the name, type, shape and place of each tensor.

    GGUF | version | number of tensors | number of metadata | metadata | tensors | padding | data

Numbers are little endian. Every count and length is compared with the size of the file before it is used, because the
file can come from anywhere. The library `gguf` does not do this, so it gets only files that were checked here."""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from motet.errors import ModelLoadError
from motet.log import cut
from motet.models.regular_files import open_regular
from motet.models.safetensors_header import MAX_NAME_CHARS, Header, TensorEntry

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SUFFIX = ".gguf"
BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Name, number of weights in a block and bytes of a block, by the number of a type."""
QUANTIZED = {name: (number, weights, num_bytes) for number, (name, weights, num_bytes) in BLOCKS.items() if weights > 1}
"""Number, weights of a block and bytes of a block of each type that is not a float, by its name."""
MAX_TENSORS, MAX_METADATA, MAX_DIMENSIONS = 100_000, 10_000, 4
MAX_KEY_BYTES, MAX_TEXT_BYTES = 65_535, 2**24
ALIGNMENT, MAX_ALIGNMENT = 32, 2**16

TEXT, ARRAY = 8, 9
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""The format of each type of number in the metadata."""
Value = int | float | bool | str
"""A value of the metadata. Arrays are represented by their length."""


@dataclass(frozen=True)
class GgufHeader:
    metadata: Mapping[str, Value]
    tensors: Header
    """Shapes are in the order of torch. The dtype is a name in `BLOCKS`."""
    data_begin: int


def read_gguf(file: Path) -> GgufHeader:
    """Returns the header of a file. Raises ModelLoadError, which names the file and what is wrong."""
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size < len(MAGIC):
                raise ModelLoadError(f"{file} is not a GGUF file ({size} bytes)")
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Parser(content, size, file=file).header()
    except FileNotFoundError as exc:
        raise ModelLoadError(f"{file} is missing: download the model again") from exc
    except OSError as exc:
        raise ModelLoadError(f"{file} cannot be read: {exc.strerror}") from exc


class _Parser:
    def __init__(self, content: mmap.mmap, size: int, *, file: Path) -> None:
        self._content = content
        self._size = size
        self._file = file
        self._at = 0

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise ModelLoadError(f"{self._file} is not a GGUF file ({self._size} bytes)")
        if (version := self._number("<I")) not in VERSIONS:
            raise self._broken(f"its version is {version}; {', '.join(map(str, VERSIONS))} can be read")
        num_tensors, num_metadata = self._count(MAX_TENSORS, "tensors"), self._count(MAX_METADATA, "metadata")
        metadata: dict[str, Value] = {}
        for _ in range(num_metadata):
            key = self._text(MAX_KEY_BYTES)
            if key in metadata:
                raise self._broken(f"{key} is in it twice")
            metadata[key] = self._value(int(self._number("<I")))
        places = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment % 8:
            raise self._broken(f"general.alignment is {alignment}")
        begin = -(-self._at // alignment) * alignment
        return GgufHeader(metadata, self._checked(places, begin, alignment=alignment), begin)

    def _checked(self, places: list[tuple[str, TensorEntry]], data_begin: int, *, alignment: int) -> Header:
        """Returns the tensors by name. Raises ModelLoadError if two have the same name or overlap, or if the file is
        shorter than its header states."""
        tensors: Header = {}
        end = 0
        for name, entry in sorted(places, key=lambda place: place[1].data_offsets):
            begin = entry.data_offsets[0]
            if name in tensors:
                raise self._broken(f"tensor {cut(name, MAX_NAME_CHARS)} is in it twice")
            if begin < end or begin % alignment:
                raise self._broken(f"tensor {cut(name, MAX_NAME_CHARS)} starts at {begin}, within another tensor")
            tensors[name], end = entry, entry.data_offsets[1]
        if data_begin + end > self._size:
            raise ModelLoadError(
                f"{self._file} has {self._size} bytes, but its header states {data_begin + end}: download it again"
            )
        return tensors

    def _tensor(self) -> tuple[str, TensorEntry]:
        name = self._text(MAX_KEY_BYTES)
        shown = f"tensor {cut(name, MAX_NAME_CHARS)}"
        dimensions = int(self._number("<I"))
        if dimensions > MAX_DIMENSIONS:
            raise self._broken(f"{shown} has {dimensions} dimensions")
        shape = tuple(int(self._number("<Q")) for _ in range(dimensions))[::-1]
        kind, begin = int(self._number("<I")), int(self._number("<Q"))
        if kind not in BLOCKS:
            known = ", ".join(each for each, _, _ in BLOCKS.values())
            raise ModelLoadError(f"{shown} in {self._file}: its type has the number {kind}; {known} can be loaded")
        type_name, weights, num_bytes = BLOCKS[kind]
        if not shape or shape[-1] % weights:
            raise self._broken(f"{shown} has the shape {list(shape)}, and blocks of {weights}")
        length = math.prod(shape) // weights * num_bytes
        if begin + length > self._size:
            raise ModelLoadError(f"{self._file} has {self._size} bytes, and {shown} would end at {begin + length}")
        return name, TensorEntry(type_name, shape, (begin, begin + length))

    def _value(self, kind: int) -> Value:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind == TEXT:
            return self._text(MAX_TEXT_BYTES)
        if kind != ARRAY:
            raise self._broken(f"a value has the type {kind}")
        item, count = int(self._number("<I")), int(self._number("<Q"))
        if item in NUMBERS:
            self._skip(count * struct.calcsize(NUMBERS[item]))
        elif item == TEXT:
            if count * 8 > self._size - self._at:
                raise self._broken(f"an array has {count} texts")
            for _ in range(count):
                self._skip(int(self._number("<Q")))
        else:
            raise self._broken(f"an array has values of the type {item}")
        return count

    def _text(self, max_bytes: int) -> str:
        length = int(self._number("<Q"))
        if length > max_bytes:
            raise self._broken(f"a text has {length} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as exc:
            raise self._broken("a text is not UTF-8") from exc

    def _count(self, maximum: int, things: str) -> int:
        if (count := int(self._number("<Q"))) > maximum:
            raise self._broken(f"it has {count} {things}; the maximum is {maximum}")
        return count

    def _number(self, form: str) -> int | float | bool:
        number: int | float | bool = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return number

    def _take(self, count: int) -> bytes:
        begin = self._at
        self._skip(count)
        return self._content[begin : self._at]

    def _skip(self, count: int) -> None:
        if count > self._size - self._at:
            raise self._broken("it ends too early")
        self._at += count

    def _broken(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file} has a broken header: {why}")
