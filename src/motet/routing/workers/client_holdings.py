"""The open choices and the KV blocks that each client holds on a worker, as counted by the router. A block of a prompt
counts once for each client that uses it, no matter how many of the client's groups share the block."""

from collections.abc import Sequence
from dataclasses import dataclass

from motet.block_names import BlockName


class SharedBlocks:
    """Prompt blocks of groups. A block that several groups share counts once."""

    def __init__(self) -> None:
        self._holders: dict[BlockName, int] = {}

    def add(self, names: Sequence[BlockName]) -> list[BlockName]:
        """Adds the blocks of one group. Returns the blocks that no other group holds."""
        holders, added = self._holders, []
        for name in names:
            if (count := holders.get(name, 0)) == 0:
                added.append(name)
            holders[name] = count + 1
        return added

    def remove(self, names: Sequence[BlockName]) -> list[BlockName]:
        """Removes the blocks of one group. Returns the blocks that no other group holds."""
        holders, removed = self._holders, []
        for name in names:
            if (left := holders.pop(name) - 1) > 0:
                holders[name] = left
            else:
                removed.append(name)
        return removed


@dataclass(slots=True)
class ClientTotal:
    """The choices and blocks that a client with open groups holds on all workers of a fleet."""

    weight: float
    groups: int = 0
    choices: int = 0
    blocks: int = 0


class ClientHoldings:
    """The choices and blocks that a client with open groups holds on one worker. Each group adds its choices and
    blocks, and removes them again."""

    def __init__(self, client: str, totals: dict[str, ClientTotal]) -> None:
        """`totals`: what each client holds on all workers, which this object updates."""
        self.client = client
        self.weight = 1.0
        self.groups = 0
        self.choices = 0
        self.blocks = 0
        self._trunks = SharedBlocks()
        self._totals = totals
        self._total = totals.setdefault(client, ClientTotal(1.0))

    def enter(self, weight: float) -> None:
        self.weight = self._total.weight = weight
        self.groups += 1
        self._total.groups += 1

    def leave(self) -> None:
        """Removes a group that has removed its choices and blocks."""
        self.groups -= 1
        self._total.groups -= 1
        if not self._total.groups:
            del self._totals[self.client]

    def add_choices(self, choices: int) -> None:
        self.choices += choices
        self._total.choices += choices

    def add_blocks(self, blocks: int) -> None:
        self.blocks += blocks
        self._total.blocks += blocks

    def add_trunk(self, trunk: Sequence[BlockName]) -> None:
        self.add_blocks(len(self._trunks.add(trunk)))

    def remove_trunk(self, trunk: Sequence[BlockName]) -> None:
        self.add_blocks(-len(self._trunks.remove(trunk)))
