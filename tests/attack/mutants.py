"""Makes hostile messages from a valid one: random wrong types, lengths and encodings, from a seed."""

import random
from collections.abc import Iterator

import msgspec

VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**53,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "é",
    "\x00\n\x1b[2J",
    "x" * 5000,
    b"\xff\xfe",
    [],
    [[]],
    [0] * 300,
    {},
    {"é": {"é": []}},
)


def mutants(valid: object, *, seed: int, count: int) -> Iterator[bytes]:
    """Yields `count` messages in msgpack. In each, one or two values are replaced, or its bytes are cut or changed."""
    rng = random.Random(seed)
    for _ in range(count):
        message: object = msgspec.to_builtins(valid, builtin_types=(bytes,))
        for _ in range(rng.choice((1, 1, 2))):
            message = _changed(message, rng)
        encoded = bytearray(msgspec.msgpack.encode(message))
        match rng.randrange(6):
            case 0:
                del encoded[rng.randrange(len(encoded)) :]
            case 1:
                encoded[rng.randrange(len(encoded))] = rng.randrange(256)
            case _:
                pass
        yield bytes(encoded)


def _changed(value: object, rng: random.Random) -> object:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.1:
            return {other: one for other, one in value.items() if other != name}
        return {**value, name: _changed(value[name], rng)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.7:
        position = rng.randrange(len(value))
        return [*value[:position], _changed(value[position], rng), *value[position + 1 :]]
    return rng.choice(VALUES)
