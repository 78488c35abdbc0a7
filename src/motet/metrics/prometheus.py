"""The metrics of one server, in a registry of their own, as Prometheus reads them.

engine figures      read from `Engine.stats()` of each worker at each scrape (`metrics.scraped`)
routing figures     read from whoever routes, at each scrape (`metrics.routing_exposed`)
group figures       observed when a step of a group comes in and when the group ends, by model (`metrics.groups`)
HTTP figures        counted here when a response has been sent
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from motet.metrics.groups import MODEL, GroupFamilies, GroupMetrics
from motet.metrics.names import PREFIX
from motet.metrics.scraped import Scrape, ScrapeCollector


class Metrics:
    """All metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._scraped = ScrapeCollector()
        self.registry.register(self._scraped)
        self._families = GroupFamilies(self.registry)
        self._by_model: dict[str, GroupMetrics] = {}
        """Every model that has been served; one that has gone keeps its counts."""
        self._waiting = Gauge(
            PREFIX + "groups_without_first_token",
            "Admitted groups without a first token: what overload is judged by.",
            [MODEL],
            registry=self.registry,
        )
        self._http = Counter(
            PREFIX + "http_requests", "Responses sent.", ["handler", "method", "status"], registry=self.registry
        )

    def of(self, model: str) -> GroupMetrics:
        """`model`: one that is served, and never just what a client wrote: each name costs memory for good."""
        if (found := self._by_model.get(model)) is None:
            found = self._by_model[model] = GroupMetrics(self._families, model)
        return found

    def http_request(self, *, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, str(status)).inc()

    def exposition(self, scrape: Scrape, *, models: Iterable[str], waiting: int) -> bytes:
        """The text of `/metrics`. `models`: those served now, which are told of from the first scrape on."""
        for model in models:
            self.of(model)
        self._scraped.scrape, self._scraped.model = scrape, self._shared_name
        self._waiting.clear()
        self._waiting.labels(self._shared_name).set(waiting)
        return generate_latest(self.registry)

    @property
    def _shared_name(self) -> str:
        """The model that figures of the whole server are labelled with: no name once there have been several."""
        return next(iter(self._by_model)) if len(self._by_model) == 1 else ""
