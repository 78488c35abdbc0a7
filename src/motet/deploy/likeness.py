"""Whether a worker may stand beside the others: a group that goes on elsewhere must find the same model there.

Workers with other models are welcome. Those of one name must be one model, as far as they tell: engines that are not
ours tell neither vocabulary nor end tokens, and what they call their numbers only they understand.
"""

from collections.abc import Iterator
from typing import NamedTuple

from motet.engines.wire import EngineReport
from motet.ids import ModelName
from motet.routing.pairs import numbers_of
from motet.types import UNKNOWN_VOCABULARY, EngineInfo, EngineKind, Role


class Told(NamedTuple):
    """What an engine tells of its model."""

    kind: EngineKind
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    numbers: str


class Likeness:
    """What the workers of each model have in common. The first that tells it says what that is."""

    def __init__(self) -> None:
        self._told: dict[ModelName, list[Told]] = {}
        """Of workers that may stand beside each other; each differs from those before it in what it tells or omits."""

    def problem(self, report: EngineReport, role: Role | None) -> str | None:
        """Why this worker cannot be used; None: it can. `role`: what it was named as."""
        info = report.info
        if role is not None and info.role is not role:
            return f"it was named as {role}, and its role is {info.role}"
        told, others = _told(info), self._told.setdefault(info.model, [])
        for other in others:
            for what, here, there in _differences(told, other):
                return f"it {what} {here}, and other workers of {info.model} {there}"
        if told not in others:
            others.append(told)
        return None


def _told(info: EngineInfo) -> Told:
    return Told(info.kind, info.vocab_size, info.eos_token_ids, numbers_of(info))


def _differences(one: Told, other: Told) -> Iterator[tuple[str, object, object]]:
    """What they do, one of them and the other."""
    if one.vocab_size != other.vocab_size and UNKNOWN_VOCABULARY not in (one.vocab_size, other.vocab_size):
        yield "has a vocabulary of", one.vocab_size, other.vocab_size
    if one.eos_token_ids != other.eos_token_ids and one.eos_token_ids and other.eos_token_ids:
        yield "ends answers with the tokens", one.eos_token_ids, other.eos_token_ids
    if one.numbers != other.numbers and one.kind is other.kind:
        yield "computes in", one.numbers, other.numbers
