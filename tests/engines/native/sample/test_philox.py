"""Known answers from Random123's `kat_vectors`, and numpy's 64-bit Philox by way of one reference for both widths."""

import numpy as np
import numpy.typing as npt
import pytest

from motet.engines.native.sample.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    # counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> npt.NDArray[np.uint64]:
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, output: str) -> None:
    assert np.array_equal(philox4x32(words(counter), words(key)), words(output))


def test_philox_is_vectorised_element_by_element() -> None:
    counters = np.stack([words(counter) for counter, _, _ in KNOWN_ANSWERS], axis=1)
    keys = np.stack([words(key) for _, key, _ in KNOWN_ANSWERS], axis=1)
    outputs = np.stack([words(output) for _, _, output in KNOWN_ANSWERS], axis=1)
    assert np.array_equal(philox4x32(counters, keys), outputs)


def reference(counter: list[int], key: list[int], bits: int) -> list[int]:
    """Philox4xW-10 in plain integers, W = 32 or 64."""
    multipliers, steps = {
        32: ((0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)),
        64: ((0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)),
    }[bits]
    c, k, mask = list(counter), list(key), 2**bits - 1
    for _ in range(10):
        even, odd = c[0] * multipliers[0], c[2] * multipliers[1]
        c = [(odd >> bits) ^ c[1] ^ k[0], odd & mask, (even >> bits) ^ c[3] ^ k[1], even & mask]
        k = [(word + step) & mask for word, step in zip(k, steps, strict=True)]
    return c


def test_the_reference_of_64_bit_words_is_numpys_philox() -> None:
    key = [0x0123456789ABCDEF, 0xFEDCBA9876543210]
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([41, 0, 7, 0], np.uint64))
    # numpy raises the counter before it makes a block.
    assert generator.random_raw(4).tolist() == reference([42, 0, 7, 0], key, 64)


def test_uniforms_are_53_bits_of_the_reference_for_any_seed_and_position() -> None:
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 2**32 - 1, 2**32, 2**40 + 17, 5, 1340]
    expected = []
    for seed, position in zip(seeds, positions, strict=True):
        key, counter = [seed % 2**32, seed >> 32], [position % 2**32, position >> 32, 0, 0]
        high, low = reference(counter, key, 32)[:2]
        expected.append(((high << 32 | low) >> 11) / 2**53)
    assert uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64)).tolist() == expected


def test_uniforms_lie_below_one_and_fill_the_interval_evenly() -> None:
    count = 200_000
    drawn = uniforms(np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint64))
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    cells = np.bincount((drawn * 100).astype(int), minlength=100)
    chi_square = float(((cells - count / 100) ** 2 / (count / 100)).sum())
    assert chi_square < 160.0  # 99 degrees of freedom: 1 in 10,000 lies above


def test_neighbouring_seeds_and_positions_share_nothing() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    drawn = uniforms(seeds, positions)
    assert len(np.unique(drawn)) == drawn.size
    assert abs(float(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1])) < 0.015
    assert abs(float(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1])) < 0.015


def test_no_seeds_no_uniforms() -> None:
    assert uniforms(np.array([], np.uint64), np.array([], np.uint64)).shape == (0,)
