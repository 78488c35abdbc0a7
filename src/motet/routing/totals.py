"""The figures of several workers as one."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from motet.types import EngineInfo, EngineStats

MIXED = "mixed"
"""The fingerprint of workers that differ: nothing is promised of what two of them write."""

SUMMED = tuple(field.name for field in msgspec.structs.fields(EngineStats) if field.type is int or field.type is float)
"""All but those below, which are no plain numbers."""


def total_stats(stats: Sequence[EngineStats]) -> EngineStats:
    """Sums; of ages the greatest."""
    failures: Counter[str] = Counter()
    for one in stats:
        failures.update(one.transfer_failures)
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in SUMMED},
        oldest_lease_s=max((s.oldest_lease_s for s in stats if s.oldest_lease_s is not None), default=None),
        transfer_seconds=tuple(map(sum, zip_longest(*(s.transfer_seconds for s in stats), fillvalue=0))),
        transfer_failures=dict(failures),
    )


def common_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What holds for any group on any of these workers. A group lives on one of them: the smallest room counts, and
    what some do not tell is as the others say."""
    first = infos[0]
    if len(infos) == 1:
        return first
    smallest = min(infos, key=lambda info: info.num_blocks * info.block_size)
    return msgspec.structs.replace(
        first,
        max_model_len=min(info.max_model_len for info in infos),
        block_size=smallest.block_size,
        num_blocks=smallest.num_blocks,
        bytes_per_block=smallest.bytes_per_block,
        vocab_size=min(info.vocab_size for info in infos),
        eos_token_ids=next((info.eos_token_ids for info in infos if info.eos_token_ids), ()),
        max_num_seqs=min(info.max_num_seqs for info in infos),
        fingerprint=first.fingerprint if len({info.fingerprint for info in infos}) == 1 else MIXED,
        pid=None,
        transfer=None,
    )
