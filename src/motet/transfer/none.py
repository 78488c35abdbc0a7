"""The transfers of an engine that keeps its KV to itself."""

from typing import NoReturn

from motet.errors import RequestError
from motet.transfer.base import News, PullOrder
from motet.transfer.ticket import Ticket, TransferAddress


class NoTransfers:
    """`Transfers` that refuses what would need one."""

    @property
    def address(self) -> TransferAddress:
        self._refuse()

    def expect(self, ticket: Ticket) -> None:
        self._refuse()

    def pull(self, order: PullOrder) -> None:
        self._refuse()

    def meet(self, number: int, address: TransferAddress) -> None:
        self._refuse()

    def abandon(self, number: int) -> None: ...

    def release(self, ticket: Ticket) -> None: ...

    def holding(self, leases: int) -> None: ...

    def fileno(self) -> int | None:
        return None

    def news(self) -> list[News]:
        return []

    def close(self) -> None: ...

    def _refuse(self) -> NoReturn:
        raise RequestError(
            "this engine keeps its KV cache to itself: only servers started with --role prefill or decode hand it over",
            param="kv_transfer_params",
        )
