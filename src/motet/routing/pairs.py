"""Which workers exchange KV: a prefill and a decode worker pair if their keys are equal.

Blocks of another size, of other numbers or of another engine mean nothing to a reader, even where the model is the
same. Of an adapter the key is its base model's, for that is what the blocks are laid out for.
"""

from typing import NamedTuple

from motet.ids import ModelName
from motet.types import EngineInfo, EngineKind, Role

INT8 = "-int8_"
"""What a fingerprint has in it when the weights are rounded."""


class PairKey(NamedTuple):
    """What two workers that exchange KV have in common."""

    kind: EngineKind
    model: ModelName
    numbers: str
    block_size: int
    bytes_per_block: int


def pair_key(info: EngineInfo) -> PairKey:
    return PairKey(info.kind, info.model, numbers_of(info), info.block_size, info.bytes_per_block)


def fetches(info: EngineInfo) -> bool:
    """Whether it writes choices, and can fetch KV that another has computed."""
    return info.role is Role.DECODE or (info.role is Role.BOTH and info.transfer is not None)


def numbers_of(info: EngineInfo) -> str:
    """What weights are kept in. Workers that differ in it are two models; machines may differ."""
    return f"{info.dtype} with int8 weights" if INT8 in info.fingerprint else info.dtype
