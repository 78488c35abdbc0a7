"""The router that Serve's proxies use for decode replicas that serve clients directly.

Serve pickles this module by value to every process that routes requests. The modules that it imports must be installed
there, as Motet is on every node of a cluster."""

import logging
import pickle  # noqa: TID251  the proxy itself has packed the request with it
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from motet.deploy.ray.balance import ReplicaBalance, report_in, session_in
from motet.routing.workers.affinity import SESSION_TTL_S
from motet.session_ids import SessionHeaders, headers_on_ray
from motet.settings.server_config import environment

logger = logging.getLogger(__name__)


class ChoicesRouter(RequestRouter):
    """A `ReplicaBalance` as a router of Serve."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Serve with the deployment's `request_router_kwargs`."""
        self._balance = ReplicaBalance(session_ttl_s=kwargs.get("session_ttl_s", SESSION_TTL_S))
        self._session_headers = SessionHeaders(headers_on_ray(kwargs.get("session_headers", ()), environment()))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns all replicas, each with a rank of its own: if one cannot be reached, the next one is tried."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        reports = {id: report_in(replica.routing_stats) for id, replica in replicas.items()}
        session = "" if pending_request is None else self._session_of(pending_request)
        order = self._balance.ranked(session, reports)
        if pending_request is not None:
            # Without this, Serve tries again without a pause while no replica can be reached.
            pending_request.routing_context.should_backoff = True
            if order:
                self._balance.send(pending_request.metadata.internal_request_id, order[0], session=session)
        return [[replicas[id]] for id in order]

    def on_request_routed(  # sizes: Ray calls it by place
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        metadata, replica = pending_request.metadata, replica_id.unique_id
        if self._balance.replica_of(metadata.internal_request_id) != replica:
            self._balance.send(metadata.internal_request_id, replica, session=self._session_of(pending_request))

    def _session_of(self, pending_request: PendingRequest) -> str:
        """Returns the session in the header that Serve itself reads, or else in another one."""
        metadata = pending_request.metadata
        if metadata.session_id or not metadata.is_http_request:
            return metadata.session_id
        return session_in(map(_unpacked, pending_request.args), self._session_headers)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._balance.finish(internal_request_id)


def _unpacked(argument: object) -> object:
    """Returns the HTTP request that this proxy has pickled for a replica, and any other argument unchanged."""
    try:
        return pickle.loads(argument) if isinstance(argument, bytes) else argument
    except Exception:  # another version of Serve packs it in another way: then only Serve's own header counts
        logger.debug("the request of a client cannot be read", exc_info=True)
        return argument
