"""Reads the reports of servers: workers in `/status`, and sums over `/metrics`."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families


def metric_sum(text: str, name: str, **labels: str) -> float:
    """Returns the sum of all samples of this metric that have these labels, with or without others."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


class ReportedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker in `/status`. Figures that are missing, as for a silent worker, have the value 1: such a worker is not
    idle."""

    state: str
    address: str
    pid: int | None = None
    weight_version: str | None = None
    groups_running: int = 1
    choices_waiting: int = 1
    blocks_used: int = 1
    leases: int = 1
    pulls_open: int = 1
    blocks_pulling: int = 1

    @property
    def idle(self) -> bool:
        """True if the worker holds no groups, blocks, leases or pulls."""
        held = self.groups_running, self.choices_waiting, self.blocks_used
        return not any((*held, self.leases, self.pulls_open, self.blocks_pulling))
