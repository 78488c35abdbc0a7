"""Reads from a server's metrics how many prompt tokens it has computed so far."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from bench.servers.compared_server import ComparedServer
from motet.metrics.declare import PREFIX

COMPUTED = {
    (f"{PREFIX}prefill_tokens_total", None),
    ("vllm:prompt_tokens_by_source_total", "local_compute"),
    ("llamacpp:prompt_tokens_total", None),
}
"""Each server's counter of computed prompt tokens: its name, and the label `source` if it has one."""


async def computed_by(server: ComparedServer) -> int | None:
    """Returns the number of prompt tokens that a server has computed so far, after a pause without requests."""
    await asyncio.sleep(server.style.settle_s)
    return computed_in((await server.client.get("/metrics")).text)


def computed_in(exposition: str) -> int | None:
    samples = (sample for family in text_string_to_metric_families(exposition) for sample in family.samples)
    counts = [sample.value for sample in samples if (sample.name, sample.labels.get("source")) in COMPUTED]
    return int(sum(counts)) if counts else None
