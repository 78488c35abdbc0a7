"""The counters of a running server, read from its /metrics, for programs that tell what a request cost."""

from dataclasses import dataclass, fields

import httpx
from prometheus_client.parser import text_string_to_metric_families

from motet.errors import EngineError
from motet.metrics.names import PREFIX


@dataclass(frozen=True)
class Figures:
    """Counters of one moment; the difference of two is what happened between them."""

    prompt_tokens: int
    prefill_tokens: int
    generation_tokens: int
    forks: int
    blocks_shared: int
    bytes_saved: int
    trunk_tokens_read: int
    trunk_tokens_unshared: int

    def __sub__(self, earlier: "Figures") -> "Figures":
        return Figures(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


def read_figures(client: httpx.Client) -> Figures:
    """Asks the server that `client` is bound to."""
    response = client.get("/metrics")
    if response.status_code != httpx.codes.OK:
        raise EngineError(f"/metrics answered {response.status_code}")
    return figures_in(response.text)


def figures_in(exposition: str) -> Figures:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return Figures(**{f.name: int(values[f"{PREFIX}{f.name}_total"]) for f in fields(Figures)})
