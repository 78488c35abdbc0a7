"""What KV memory looks like from outside, and how lists of blocks become few long reads."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

MOST = 2**63 - 1
Unsigned = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class KVFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What two workers must have in common for the KV of one to mean anything to the other."""

    model_digest: str
    """Of the weights, as they were saved."""
    quantization: str = "none"
    """Rounded weights are another model: a choice would depend on which worker had computed its prompt."""
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    version: int = 1
    """Of this layout."""

    def differences(self, other: "KVFacts") -> list[str]:
        """Such as `dtype is bfloat16 here and float32 there`; empty when they match."""
        ours, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [f"{name} is {ours[name]} here and {theirs[name]} there" for name in ours if ours[name] != theirs[name]]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The registered memory of a worker: block b of region r lies at `regions[r] + b * region_block_bytes`.

    Another worker's comes from outside; numbers that no memory can have must end where it is decoded."""

    regions: tuple[Unsigned, ...]
    """Address of block 0: of the keys of every layer, then of the values."""
    region_block_bytes: Unsigned
    num_blocks: Unsigned
    device: Annotated[int, msgspec.Meta(ge=-1, le=MOST)] = -1
    """-1: main memory; k: CUDA device k."""
    proof: Unsigned
    """Address of the proof (see `proof`), in main memory, 8 bytes an entry."""
    proof_entries: Unsigned

    @property
    def block_bytes(self) -> int:
        """Of one block in all regions."""
        return len(self.regions) * self.region_block_bytes


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Blocks `remote`.. of the peer go to blocks `local`.. of ours, `count` of them."""

    remote: int
    local: int
    count: int


def merged(pairs: Iterable[tuple[int, int]]) -> list[Run]:
    """(remote, local) blocks as few runs: neighbours on both sides become one."""
    runs: list[Run] = []
    for remote, local in sorted(pairs):
        if runs and remote == runs[-1].remote + runs[-1].count and local == runs[-1].local + runs[-1].count:
            runs[-1] = Run(runs[-1].remote, runs[-1].local, runs[-1].count + 1)
        else:
            runs.append(Run(remote, local, 1))
    return runs
