"""Motet's own server with the KV cache that the benchmarks need, and its counters."""

import httpx

from motet.deploy.child import ChildServer, CounterSnapshot, figures_in

KV_CACHE_GB = "3"
"""Size of the KV cache in GiB: enough for 64 separate requests of 1340 tokens, which share nothing."""


def motet_server(model: str, *flags: str) -> ChildServer:
    """Returns a server to be started by a `with` block."""
    return ChildServer([model, "--kv-cache-gb", KV_CACHE_GB, *flags])


async def counters(client: httpx.AsyncClient) -> CounterSnapshot:
    return figures_in((await client.get("/metrics")).text)
