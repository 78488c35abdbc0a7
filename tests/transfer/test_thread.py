"""Two transfer threads in one process: real sockets between them, a scripted transport beneath."""

from motet.transfer.base import Landed, ReaderDone, ReaderWaits
from tests.transfer.scripted import Wires
from tests.transfer.worker import LEASE_ID, order, worker


def test_a_pull_reads_long_runs_checks_the_proof_and_tells_the_lease() -> None:
    wires = Wires()
    with worker("p", wires) as p, worker("d", wires) as d:
        p.thread.holding(1)
        d.thread.pull(order(p.ticket((3, 4, 7))))
        landed = d.news()
        assert isinstance(landed, Landed)
        assert (landed.number, landed.num_bytes, landed.num_descriptors) == (1, 3 * 64, 2)
        assert p.news() == ReaderWaits(LEASE_ID)
        assert p.news() == ReaderDone(LEASE_ID, "d:1")
