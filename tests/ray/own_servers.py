"""Servers of decode replicas that serve clients themselves: each knows its own engine, and prefill."""

from collections import Counter
from collections.abc import Mapping, Sequence

import httpx
import psutil

from tests.patience import PATIENCE_S
from tests.ray.processes import tcp_addresses

FINISHED = "motet:request_success_total"
"""Choices."""


class OwnServers:
    """By replica; from the first look at it to `close`."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._known: dict[psutil.Process, httpx.AsyncClient] = {}

    async def of(self, replica: psutil.Process) -> httpx.AsyncClient:
        """It listens on several ports; on one of them, at the address of its node, it speaks our HTTP. Raises
        httpx.ConnectError if it does not yet."""
        if replica not in self._known:
            self._known[replica] = await self._found(replica)
        return self._known[replica]

    async def finished(self, replicas: Sequence[psutil.Process]) -> Counter[psutil.Process]:
        """Choices that each replica has written."""
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
                    client.timeout = httpx.Timeout(PATIENCE_S)  # not before: a port of Ray's may never answer
                    return client
            except httpx.HTTPError:
                pass
            await client.aclose()
        raise httpx.ConnectError(f"{replica} has no server of its own")


def count_of(metric: str, text: str) -> int:
    return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(metric))
