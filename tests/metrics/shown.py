"""What a step shows of a choice, as little as a record needs."""

from dataclasses import dataclass

from motet.types import FinishReason


@dataclass(frozen=True)
class ShownChoice:
    index: int
    finish: FinishReason | None
