"""Every broken header of a safetensors file is refused with a message that names the file and what is wrong."""

import json
from pathlib import Path

import pytest

from motet.errors import ModelLoadError
from motet.models.safetensors_header import MAX_HEADER_BYTES, TensorEntry, check_safetensors

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def written(file: Path, header: object, *, data_bytes: int = 8) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))
    return file


def test_the_header_of_a_complete_file_is_returned(tmp_path: Path) -> None:
    half = {"dtype": "BF16", "shape": [], "data_offsets": [8, 10]}
    empty = {"dtype": "F8_E4M3", "shape": [0], "data_offsets": [8, 8]}
    content = {"a": GOOD, "b": half, "c": empty, "__metadata__": {"format": "pt"}}
    header, data_start = check_safetensors(written(tmp_path / "x", content, data_bytes=10))
    assert header == {
        "a": TensorEntry("F32", (2,), (0, 8)),
        "b": TensorEntry("BF16", (), (8, 10)),
        "c": TensorEntry("F8_E4M3", (0,), (8, 8)),
    }
    assert data_start == 8 + len(json.dumps(content))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"[1,2]", "Expected `object`, got `array`"),
        (b"1", "Expected `object`, got `int`"),
        (b"\xff\xfe", "broken header"),
        ({"x": {}}, "in tensor x: Object missing required field `dtype`"),
        ({"x": 5}, "in tensor x: Expected `object`, got `int`"),
        ({"x" * 500: 5}, f"in tensor {'x' * 200}... (500 characters): Expected"),
        ({"x": GOOD | {"dtype": ["F32"]}}, "Expected `str`, got `array` - at `$.dtype`"),
        ({"x": GOOD | {"shape": "2"}}, "Expected `array`, got `str` - at `$.shape`"),
        ({"x": GOOD | {"shape": [2.5]}}, "Expected `int`, got `float` - at `$.shape["),
        ({"x": GOOD | {"shape": [-2]}}, "Expected `int` >= 0 - at `$.shape["),
        ({"x": GOOD | {"data_offsets": ["0", "8"]}}, "Expected `int`, got `str` - at `$.data_offsets["),
        ({"x": GOOD | {"data_offsets": [0]}}, "Expected `array` of length 2 - at `$.data_offsets`"),
        ({"x": GOOD | {"data_offsets": [8, 0]}}, "bytes, but its header states"),
        ({"x": GOOD, "y": GOOD}, "tensor y has the bytes 0 to 8, and should start at 8"),
        (
            {"x": {**GOOD, "dtype": "U8", "data_offsets": [4, 8]}},
            "the bytes 4 to 8, and should start at 0",
        ),
        ({"x": GOOD | {"shape": [2**62, 2**62]}}, f"tensor x has 8 bytes, and its shape needs {2**126}"),
        (b'{"x": %b, "x": %b}' % (json.dumps(GOOD).encode(), json.dumps(GOOD).encode()), "header: x is in it twice"),
        ({"x": GOOD | {"more": [[]]}}, "in tensor x: Object contains unknown field `more`"),
        ({"x": GOOD, "__metadata__": [{}]}, "broken header in __metadata__: Expected `object`, got `array`"),
        (b'{"__metadata__":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "broken header"),
        (b" " * (MAX_HEADER_BYTES + 1), f"has a header of {MAX_HEADER_BYTES + 1} bytes; the maximum is 1048576"),
    ],
)
def test_a_broken_header_is_refused_by_name(tmp_path: Path, header: object, why: str) -> None:
    """The bug: some of these raised KeyError, TypeError or RecursionError, and a long header was parsed for seconds."""
    file = written(tmp_path / "a.safetensors", header)
    with pytest.raises(ModelLoadError) as caught:
        check_safetensors(file)
    message = caught.value.message
    assert message.startswith(f"{file} has ") and "\n" not in message
    assert why in message
