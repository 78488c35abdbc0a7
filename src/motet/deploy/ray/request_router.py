"""The router that Serve's proxies use for decode replicas that serve clients themselves.

The hook of `--prefix-router` names the replica, which is then taken if it is there. Serve pickles this module by value
to every process that routes requests; its imports must be there, as Motet is on every node of a cluster anyway.
"""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from motet.deploy.ray.balance import ReplicaBalance, RequestHeaders, asked_of, named_in, record_of
from motet.routing.workers.affinity import SESSION_TTL_S


class ChoicesRouter(RequestRouter):
    """A `ReplicaBalance` as a router of Serve."""

    def initialize_state(self, **kwargs: float) -> None:
        """Called by Serve with the deployment's `request_router_kwargs`."""
        self._balance = ReplicaBalance(session_ttl_s=kwargs.get("session_ttl_s", SESSION_TTL_S))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns all replicas, each with a rank of its own: if one cannot be reached, the next one is taken."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        told = {id: record_of(replica.routing_stats) for id, replica in replicas.items()}
        if pending_request is None:
            return [[replicas[id]] for id in self._balance.ranked(RequestHeaders(), told)]
        pending_request.routing_context.should_backoff = True  # else Serve asks without pause if all are unreachable
        asked, named = _asked(pending_request), named_in(pending_request.args)
        order = self._balance.ranked(asked, told)
        if named in replicas:
            order.sort(key=lambda id: id != named)
        if named is None and order:  # else it bypasses Serve, and its end is not reported
            self._balance.book(pending_request.metadata.internal_request_id, order[0], asked=asked)
        return [[replicas[id]] for id in order]

    def on_request_routed(  # sizes: Ray calls it by place
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        id, replica = pending_request.metadata.internal_request_id, replica_id.unique_id
        if self._balance.replica_of(id) != replica:
            self._balance.book(id, replica, asked=_asked(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._balance.done(internal_request_id)


def _asked(request: PendingRequest) -> RequestHeaders:
    return asked_of(request.args, request.metadata.session_id)
