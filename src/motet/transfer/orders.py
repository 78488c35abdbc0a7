"""What the engine core leaves for the transfer thread; the methods of `base.Transfers` say what each means."""

from dataclasses import dataclass

from motet.transfer.base import PullOrder
from motet.transfer.ticket import Ticket, TransferAddress


@dataclass(frozen=True)
class Expect:
    ticket: Ticket


@dataclass(frozen=True)
class Fetch:
    """`pull`."""

    order: PullOrder
    ordered_s: float


@dataclass(frozen=True)
class Abandon:
    number: int


@dataclass(frozen=True)
class GiveBack:
    """`release`."""

    ticket: Ticket


@dataclass(frozen=True)
class Meet:
    number: int
    address: TransferAddress


@dataclass(frozen=True)
class Hold:
    leases: int


Order = Expect | Fetch | Abandon | GiveBack | Meet | Hold
