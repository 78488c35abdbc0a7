"""Randomness without state: the uniform of a draw is a pure function of (choice seed, position).

Philox4x32-10 (Salmon, Moraes, Dror and Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) is a block cipher
cut down to ten rounds: key in, counter in, four random words out. With the choice's seed as the key and the position
of the token as the counter there is nothing to carry along, so a choice draws the same tokens alone, in a group, after
a preemption or on another worker.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""32-bit words, kept in 64 bits so that products do not overflow."""

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], np.uint64)  # [rounds, 2]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), with 53 random bits; both arrays have the same shape."""
    counter = np.zeros((4, *positions.shape), np.uint64)
    counter[0], counter[1] = positions & _LOW, positions >> _HALF
    words = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _HALF]))
    bits: Words = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    return np.ldexp(bits.astype(np.float64), -53)


def philox4x32(counter: Words, key: Words) -> Words:
    """Philox4x32-10. `counter` [4, ...] and `key` [2, ...] hold 32-bit words; so does the result [4, ...].

    Words 0 and 2 go through a round side by side, and so do 1 and 3: numpy's calls cost more than its arithmetic.
    """
    beside = (1,) * (counter.ndim - 1)
    multipliers = _MULTIPLIERS.reshape(2, *beside)
    even, odd = counter[::2], counter[1::2]
    for round_key in (key + _KEY_STEPS.reshape(_ROUNDS, 2, *beside)) & _LOW:
        crossed = (even * multipliers)[::-1]
        even, odd = (crossed >> _HALF) ^ odd ^ round_key, crossed & _LOW
    words = np.empty_like(counter)
    words[::2], words[1::2] = even, odd
    return words
