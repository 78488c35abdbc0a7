"""The bytes of a chunk, as the documentation of `ChunkTemplate` shows them."""

import doctest

from motet.api.generation import chunks


def test_the_documented_bytes_are_the_bytes() -> None:
    results = doctest.testmod(chunks)
    assert results.attempted > 0
    assert results.failed == 0
