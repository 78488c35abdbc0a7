"""The transfers of an engine that keeps its KV to itself."""

from typing import NoReturn

from motet.errors import RequestError
from motet.transfer.base import FailureKind, Met, News, PullOrder, TransferError
from motet.transfer.ticket import Ticket, TransferAddress

WHY = "this engine keeps its KV cache to itself: only servers started with --role prefill or decode hand it over"


class NoTransfers:
    """`Transfers` that refuses what would need one."""

    def __init__(self) -> None:
        self._news: list[News] = []

    @property
    def address(self) -> TransferAddress:
        self._refuse()

    def sealed(self, ticket: Ticket) -> Ticket:
        self._refuse()

    def believes(self, ticket: Ticket) -> bool:
        return False

    def expect(self, ticket: Ticket) -> None:
        self._refuse()

    def pull(self, order: PullOrder) -> None:
        self._refuse()

    def meet(self, number: int, address: TransferAddress) -> None:
        self._news.append(Met(number, TransferError(WHY, FailureKind.REFUSED)))

    def abandon(self, number: int) -> None: ...

    def release(self, ticket: Ticket) -> None: ...

    def holding(self, leases: int) -> None: ...

    def fileno(self) -> int | None:
        return None

    def news(self) -> list[News]:
        news, self._news = self._news, []
        return news

    def close(self) -> None: ...

    def _refuse(self) -> NoReturn:
        raise RequestError(WHY, param="kv_transfer_params")
