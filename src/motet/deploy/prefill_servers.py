"""Prefill servers that a decode server asks (`--prefill-url`): workers elsewhere that only prefill."""

import httpx

from motet.config import CellConfig
from motet.deploy.meet import Connecting
from motet.engines.base import Worker, WorkerState
from motet.engines.remote import RemotePrefill
from motet.routing.fleet import Fleet
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import Role


class PrefillServers:
    """Members of the fleet from the start: that one is down is found out by asking it."""

    def __init__(self, config: CellConfig, fleet: Fleet, client: httpx.AsyncClient) -> None:
        self._config = config
        self._fleet = fleet
        self._client = client
        self._servers: dict[str, RemotePrefill] = {}

    def join(self, decode: Worker) -> None:
        """`decode`: the engine here that fetches what they compute."""
        for number, url in enumerate(self._config.prefill_urls):
            id = f"{Role.PREFILL}-{number}"
            self._servers[id] = RemotePrefill(
                url,
                info=decode.engine.info,
                client=self._client,
                release_through=self._release,
                api_key=self._config.prefill_api_key,
            )
            self._fleet.put(Worker(id, self._servers[id], url, local=False))

    async def watch(self, id: str) -> None:
        """Looks after one of them until it is cancelled."""

        def tell(up: bool) -> None:
            self._fleet.mark(id, WorkerState.READY if up else WorkerState.DEAD)

        await self._servers[id].watch(self._meet, tell=tell)

    @property
    def ids(self) -> list[str]:
        return list(self._servers)

    def _here(self) -> list[Worker]:
        return [member.worker for member in self._fleet.members if member.worker is not None and member.worker.local]

    async def _meet(self, address: TransferAddress) -> None:
        for worker in self._here():
            if isinstance(worker.engine, Connecting):
                await worker.engine.connect(address)

    async def _release(self, ticket: Ticket) -> None:
        """Through the side channel of the engine here."""
        for worker in self._here():
            await worker.engine.release(ticket)
