"""What servers report: a worker in `/status`, and sums over `/metrics`."""

import msgspec
from prometheus_client.parser import text_string_to_metric_families


def metric_sum(text: str, name: str, **labels: str) -> float:
    """Returns the sum over all samples in a page of metrics that have these labels, maybe among others."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Figures that are missing, as those of a silent worker, count as held."""

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
        """Returns True if the worker holds nothing for anybody."""
        held = self.groups_running, self.choices_waiting, self.blocks_used
        return not any((*held, self.leases, self.pulls_open, self.blocks_pulling))
