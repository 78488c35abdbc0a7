"""The status of a cell on Ray, as the processes that know parts of it report it."""

from collections.abc import Sequence

import msgspec

from tests.status import SeenWorker


class Transfer(msgspec.Struct, frozen=True):
    """The address from which others can fetch a worker's KV."""

    engine_id: str
    port: int


class Seen(SeenWorker, frozen=True, kw_only=True):
    role: str
    transfer: Transfer | None


class Totals(msgspec.Struct, frozen=True):
    prefills: int
    transfers: int
    migrations: int
    choices_resumed: int
    bypasses: int


class Status(msgspec.Struct, frozen=True):
    workers: list[Seen]
    totals: Totals

    @property
    def addresses(self) -> set[str]:
        return {worker.address for worker in self.workers}

    def ready(self, role: str) -> list[Seen]:
        return [worker for worker in self.workers if worker.role == role and worker.state == "ready"]

    @property
    def whole(self) -> bool:
        """Nobody was too busy to answer in time: what such a worker has done is missing in the totals."""
        return all(worker.state != "silent" for worker in self.workers)

    def idle(self, **wanted: int) -> bool:
        """Returns True if there are so many of each role and no others, and nobody holds anything."""
        there = {role: len(self.ready(role)) for role in wanted}
        return there == wanted and len(self.workers) == sum(wanted.values()) and all(w.idle for w in self.workers)


def merged(told: Sequence[Status]) -> Status:
    """Merges what several processes say of one cell: the worst of each worker, and the totals of all. A prefill worker
    that some process does not know is not there yet."""
    workers: dict[str, Seen] = {}
    known_to_all = set[str].intersection(*(status.addresses for status in told)) if told else set()
    for worker in (worker for status in told for worker in status.workers):
        if worker.role == "prefill" and worker.address not in known_to_all:
            continue
        if worker.address not in workers or not (worker.idle and worker.state == "ready"):
            workers[worker.address] = worker
    totals = [status.totals for status in told]
    return Status(
        list(workers.values()),
        Totals(
            prefills=max((one.prefills for one in totals), default=0),  # one worker's, which all processes know
            transfers=sum(one.transfers for one in totals),
            migrations=sum(one.migrations for one in totals),
            choices_resumed=sum(one.choices_resumed for one in totals),
            bypasses=sum(one.bypasses for one in totals),
        ),
    )
