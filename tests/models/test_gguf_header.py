"""The header of a GGUF file is checked before anything is allocated or another library reads the file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.errors import ModelLoadError
from motet.models.gguf_files.gguf_header import BLOCKS, read_gguf
from tests.models.gguf_files import write_gguf
from tests.property_settings import examples

FLOATS = np.linspace(-1, 1, 1024, dtype=np.float32).reshape(4, 256)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    arrays = {"a.weight": FLOATS, "b.weight": FLOATS, "norm.weight": FLOATS[0]}
    write_gguf(file, "llama", arrays, kinds={"b.weight": "Q8_0"}, metadata={"block_count": 3, "rope.freq_base": 1e4})
    return file.read_bytes()


def test_a_header_has_the_facts_of_the_library(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    assert header.metadata["general.architecture"] == "llama" and header.metadata["llama.block_count"] == 3
    for tensor in reader.tensors:
        found = header.tensors[tensor.name]
        assert found.dtype == tensor.tensor_type.name
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert header.data_begin + found.data_offsets[0] == tensor.data_offset
        assert found.num_bytes == tensor.n_bytes


def test_blocks_have_the_sizes_of_the_library() -> None:
    for number, (name, weights, num_bytes) in BLOCKS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (weights, num_bytes))


def number_at(content: bytes, offset: int, value: int) -> bytes:
    return content[:offset] + struct.pack("<Q", value) + content[offset + 8 :]


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (8, r"it has 1152921504606846976 tensors; the maximum is 100000"),
        (16, r"it has 1152921504606846976 metadata; the maximum is 10000"),
        (24, "a text has 1152921504606846976 bytes"),
    ],
)
def test_absurd_numbers_are_refused_at_once(content: bytes, tmp_path: Path, offset: int, words: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(number_at(content, offset, 2**60))
    with pytest.raises(ModelLoadError, match=rf"model\.gguf has a broken header: {words}"):
        read_gguf(file)


def test_an_absurd_shape_is_refused_before_it_is_allocated(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    place = content.index(b"a.weight") + len("a.weight") + 4 + 8  # after the number of dimensions and the first one
    assert struct.unpack_from("<Q", content, place)[0] == 4
    file.write_bytes(number_at(content, place, 2**50))
    with pytest.raises(ModelLoadError, match=r"has \d+ bytes, and tensor a\.weight would end at"):
        read_gguf(file)


@pytest.mark.parametrize("kept", [0, 3, 20, 100, -1])
def test_a_truncated_file_is_refused(content: bytes, tmp_path: Path, kept: int) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content[:kept])
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        read_gguf(file)


@examples(60)
@given(data=st.data())
def test_any_header_is_read_or_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, 500))
    changed = bytearray(content)
    changed[offset : offset + 4] = data.draw(st.binary(min_size=4, max_size=4))
    file = tmp_path_factory.mktemp("any") / "model.gguf"
    file.write_bytes(changed)
    try:
        header = read_gguf(file)
    except ModelLoadError as error:
        assert "\n" not in error.message
    else:
        assert all(header.data_begin + entry.data_offsets[1] <= len(content) for entry in header.tensors.values())
