"""The router that Serve's proxies use for decode replicas which serve clients themselves: a `Balance` in Serve's frame.

The hook of `--prefix-router` names the replica itself; it is then taken if it is there. Serve pickles this module by
value to wherever a request is routed; what it imports must be there, as Motet is on every node of a cluster anyway.
"""

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from motet.deploy.ray.asked import Asked, asked_of, named_in
from motet.deploy.ray.balance import SESSION_TTL_S, Balance, record_of


class ChoicesRouter(RequestRouter):
    """A `Balance` in Serve's frame."""

    def initialize_state(self, **kwargs: float) -> None:
        """Serve brings what the deployment's `request_router_kwargs` say."""
        self._balance = Balance(session_ttl_s=kwargs.get("session_ttl_s", SESSION_TTL_S))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Each a rank of its own: who comes next is taken if one cannot be reached."""
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        told = {id: record_of(replica.routing_stats) for id, replica in replicas.items()}
        if pending_request is None:
            return [[replicas[id]] for id in self._balance.ranked(Asked(), told)]
        pending_request.routing_context.should_backoff = True  # or, with nobody reachable, Serve asks without pause
        asked, named = _asked(pending_request), named_in(pending_request.args)
        order = self._balance.ranked(asked, told)
        if named in replicas:
            order.sort(key=lambda id: id != named)
        if named is None and order:  # else it goes past Serve, and nobody tells when it is over
            self._balance.book(pending_request.metadata.internal_request_id, order[0], asked)
        return [[replicas[id]] for id in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        id, replica = pending_request.metadata.internal_request_id, replica_id.unique_id
        if self._balance.replica_of(id) != replica:
            self._balance.book(id, replica, _asked(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._balance.done(internal_request_id)


def _asked(request: PendingRequest) -> Asked:
    return asked_of(request.args, request.metadata.session_id)
