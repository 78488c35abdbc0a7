"""Turns a good message into hostile ones: wrong types, lengths and encodings, drawn with a seed."""

import random
from collections.abc import Iterator

import msgspec

ODD: tuple[object, ...] = (
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


def hostile(good: object, *, seed: int, count: int) -> Iterator[bytes]:
    """Yields `count` messages in msgpack: one or two values of each are odd, or its bytes are cut or changed."""
    dice = random.Random(seed)
    for _ in range(count):
        message: object = msgspec.to_builtins(good, builtin_types=(bytes,))
        for _ in range(dice.choice((1, 1, 2))):
            message = _changed(message, dice)
        encoded = bytearray(msgspec.msgpack.encode(message))
        match dice.randrange(6):
            case 0:
                del encoded[dice.randrange(len(encoded)) :]
            case 1:
                encoded[dice.randrange(len(encoded))] = dice.randrange(256)
            case _:
                pass
        yield bytes(encoded)


def _changed(value: object, dice: random.Random) -> object:
    if isinstance(value, dict) and value and dice.random() < 0.9:
        name = dice.choice(list(value))
        if dice.random() < 0.1:
            return {other: one for other, one in value.items() if other != name}
        return {**value, name: _changed(value[name], dice)}
    if isinstance(value, list | tuple) and value and dice.random() < 0.7:
        place = dice.randrange(len(value))
        return [*value[:place], _changed(value[place], dice), *value[place + 1 :]]
    return dice.choice(ODD)
