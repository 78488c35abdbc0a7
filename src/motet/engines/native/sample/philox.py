"""Random numbers without state: the uniform of a sampled token is a pure function of (choice seed, position).

Philox4x32-10 (Salmon, Moraes, Dror and Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a block cipher
reduced to ten rounds: it turns a key and a counter into four random words. The key is the choice's seed and the counter
is the position of the token. No generator state has to be kept, so a choice samples the same tokens alone, in a group,
after a preemption or on another worker.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words in 64-bit integers, so that products do not overflow."""

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)  # [rounds, 2]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns one number in [0, 1) with 53 random bits for each pair of seed and position. Both arrays have the same
    shape, which is the shape of the result."""
    counter = np.zeros((4, *positions.shape), np.uint64)
    counter[0], counter[1] = positions & _LOW, positions >> _HALF
    words = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _HALF]))
    bits: Words = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    return np.ldexp(bits.astype(np.float64), -53)


def philox4x32(counter: Words, key: Words) -> Words:
    """Computes Philox4x32-10 of `counter` [4, ...] and `key` [2, ...]. Returns words [4, ...]. Each round processes
    words 0 and 2 together, and words 1 and 3, because numpy's calls take longer than its arithmetic."""
    ones = (1,) * (counter.ndim - 1)
    multipliers = _MULTIPLIERS.reshape(2, *ones)
    even, odd = counter[::2], counter[1::2]
    for round_key in (key + _KEY_STEPS.reshape(_ROUNDS, 2, *ones)) & _LOW:
        crossed = (even * multipliers)[::-1]
        even, odd = (crossed >> _HALF) ^ odd ^ round_key, crossed & _LOW
    words = np.empty_like(counter)
    words[::2], words[1::2] = even, odd
    return words
