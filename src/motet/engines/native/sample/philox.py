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
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
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
    """Philox4x32-10. `counter` [4, ...] and `key` [2, ...] hold 32-bit words; so does the result [4, ...]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (odd >> _HALF) ^ c1 ^ k0, odd & _LOW, (even >> _HALF) ^ c3 ^ k1, even & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3])
