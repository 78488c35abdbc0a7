"""The router that Serve's proxies use for decode replicas that serve clients directly.

Serve pickles this module by value to every process that routes requests. The modules that it imports must be installed
there, as Motet is on every node of a cluster."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from motet.deploy.ray.balance import ReplicaBalance, report_in, session_in
from motet.routing.workers.affinity import SESSION_TTL_S
from motet.session_ids import SessionHeaders, headers_on_ray
from motet.settings.server_config import environment


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
        """Returns the session in the request's headers. Serve itself reads only one header."""
        in_headers = session_in(pending_request.args, self._session_headers)
        return in_headers or pending_request.metadata.session_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._balance.finish(internal_request_id)
