"""The status of a cell on Ray, merged from the reports of its processes."""

from collections.abc import Sequence

import msgspec

from tests.status import ReportedWorker


class Transfer(msgspec.Struct, frozen=True):
    """The address at which other engines can fetch a worker's KV."""

    engine_id: str
    port: int


class RayWorkerStatus(ReportedWorker, frozen=True, kw_only=True):
    role: str
    transfer: Transfer | None


class RayTotals(msgspec.Struct, frozen=True):
    prefills: int
    transfers: int
    migrations: int
    choices_resumed: int
    bypasses: int


class RayStatus(msgspec.Struct, frozen=True):
    workers: list[RayWorkerStatus]
    totals: RayTotals

    @property
    def addresses(self) -> set[str]:
        return {worker.address for worker in self.workers}

    def ready(self, role: str) -> list[RayWorkerStatus]:
        return [worker for worker in self.workers if worker.role == role and worker.state == "ready"]

    @property
    def complete(self) -> bool:
        """True if every worker answered in time. The totals lack the figures of a worker that did not."""
        return all(worker.state != "silent" for worker in self.workers)

    def idle(self, **expected: int) -> bool:
        """Returns True if these are the numbers of ready workers by role, and no worker holds blocks or groups."""
        ready = {role: len(self.ready(role)) for role in expected}
        return ready == expected and len(self.workers) == sum(expected.values()) and all(w.idle for w in self.workers)


def merged(reports: Sequence[RayStatus]) -> RayStatus:
    """Merges the reports of several processes on one cell: the worst state of each worker, and the sum of the totals. A
    prefill worker that one of the processes does not know has not joined the cell so far."""
    workers: dict[str, RayWorkerStatus] = {}
    known_to_all = set[str].intersection(*(status.addresses for status in reports)) if reports else set()
    for worker in (worker for status in reports for worker in status.workers):
        if worker.role == "prefill" and worker.address not in known_to_all:
            continue
        if worker.address not in workers or not (worker.idle and worker.state == "ready"):
            workers[worker.address] = worker
    totals = [status.totals for status in reports]
    return RayStatus(
        list(workers.values()),
        RayTotals(
            prefills=max(
                (one.prefills for one in totals), default=0
            ),  # the prefills of one worker, known to all processes
            transfers=sum(one.transfers for one in totals),
            migrations=sum(one.migrations for one in totals),
            choices_resumed=sum(one.choices_resumed for one in totals),
            bypasses=sum(one.bypasses for one in totals),
        ),
    )
