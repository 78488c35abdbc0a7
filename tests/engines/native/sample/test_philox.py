"""Known answers from Random123's `kat_vectors`, and the statistics of the uniforms made from Philox's words.
`test_sampler.py` proves that a sampler selects the token that its uniform selects."""

import numpy as np
import pytest

from motet.engines.native.sample.philox import Words, philox4x32, uniforms

KNOWN_ANSWERS = [
    # counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> Words:
    return np.array([int(word, 16) for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, output: str) -> None:
    assert np.array_equal(philox4x32(words(counter), words(key)), words(output))


def test_philox_computes_each_element_of_arrays_alone() -> None:
    counters = np.stack([words(counter) for counter, _, _ in KNOWN_ANSWERS], axis=1)
    keys = np.stack([words(key) for _, key, _ in KNOWN_ANSWERS], axis=1)
    outputs = np.stack([words(output) for _, _, output in KNOWN_ANSWERS], axis=1)
    assert np.array_equal(philox4x32(counters, keys), outputs)


def test_uniforms_are_53_bits_of_philox_for_any_seed_and_position() -> None:
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 2**32 - 1, 2**32, 2**40 + 17, 5, 1340]
    expected = []
    for seed, position in zip(seeds, positions, strict=True):
        counter, key = [position % 2**32, position >> 32, 0, 0], [seed % 2**32, seed >> 32]
        high, low = philox4x32(np.array(counter, np.uint64), np.array(key, np.uint64)).tolist()[:2]
        expected.append(((high << 32 | low) >> 11) / 2**53)
    assert uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64)).tolist() == expected


COUNT = 200_000
ALL_ALIKE, ONE_BY_ONE = np.full(COUNT, 7, np.uint64), np.arange(COUNT, dtype=np.uint64)


@pytest.mark.parametrize(("seeds", "positions"), [(ALL_ALIKE, ONE_BY_ONE), (ONE_BY_ONE, ALL_ALIKE)])
def test_uniforms_are_below_one_and_fill_the_interval_evenly(seeds: Words, positions: Words) -> None:
    sampled = uniforms(seeds, positions)
    assert sampled.min() >= 0.0
    assert sampled.max() < 1.0
    cells = np.bincount((sampled * 100).astype(int), minlength=100)
    chi_square = float(((cells - COUNT / 100) ** 2 / (COUNT / 100)).sum())
    assert chi_square < 160.0  # 99 degrees of freedom: 1 in 10,000 lies above


def test_uniforms_of_neighbouring_seeds_and_positions_are_not_correlated() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    sampled = uniforms(seeds, positions)
    assert len(np.unique(sampled)) == sampled.size
    assert abs(float(np.corrcoef(sampled[:-1].ravel(), sampled[1:].ravel())[0, 1])) < 0.015
    assert abs(float(np.corrcoef(sampled[:, :-1].ravel(), sampled[:, 1:].ravel())[0, 1])) < 0.015


def test_no_seeds_give_no_uniforms() -> None:
    assert uniforms(np.array([], np.uint64), np.array([], np.uint64)).shape == (0,)
