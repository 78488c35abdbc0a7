"""Servers of decode replicas that serve clients directly. Each one knows its own engine and the prefill workers."""

from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import psutil

from tests.patience import PATIENCE_S
from tests.ray.processes import tcp_addresses

FINISHED = "motet:request_success_total"
"""The metric that counts finished choices."""


class OwnServers:
    """Clients for the servers, by replica: found when they are first used, and kept until `close`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._known: dict[psutil.Process, httpx.AsyncClient] = {}

    async def of(self, replica: psutil.Process) -> httpx.AsyncClient:
        """Returns a client for the port of the replica at which Motet's HTTP server listens. Raises httpx.ConnectError
        if there is none so far."""
        if replica not in self._known:
            self._known[replica] = await self._found(replica)
        return self._known[replica]

    async def finished(self, replicas: Sequence[psutil.Process]) -> Counter[psutil.Process]:
        """Returns the number of choices that each replica has finished."""
        texts = {replica: (await (await self.of(replica)).get("/metrics")).text for replica in replicas}
        return Counter({replica: count_of(FINISHED, text) for replica, text in texts.items()})

    async def close(self) -> None:
        for client in self._known.values():
            await client.aclose()

    async def _found(self, replica: psutil.Process) -> httpx.AsyncClient:
        for ip, port in tcp_addresses(replica):
            client = httpx.AsyncClient(base_url=f"http://{ip}:{port}", headers=self._headers)
            try:
                if (await client.get("/v1/models")).status_code == httpx.codes.OK:
                    client.timeout = httpx.Timeout(PATIENCE_S)  # only now, since one of Ray's ports can be silent
                    return client
            except httpx.HTTPError:
                pass
            await client.aclose()
        raise httpx.ConnectError(f"{replica} has no HTTP server of Motet")


def count_of(metric: str, text: str) -> int:
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(metric))
