"""A worker, as `/status` reports it."""

import msgspec


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that are missing, as those of a silent worker, count as held."""

    state: str
    address: str
    pid: int | None = None
    groups_running: int = 1
    choices_waiting: int = 1
    blocks_used: int = 1
    leases: int = 1
    pulls_open: int = 1
    blocks_pulling: int = 1

    @property
    def idle(self) -> bool:
        """Returns True if the worker holds nothing for anybody."""
        held = self.groups_running, self.choices_waiting, self.blocks_used
        return not any((*held, self.leases, self.pulls_open, self.blocks_pulling))
