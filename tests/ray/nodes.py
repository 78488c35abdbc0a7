"""A cluster on this machine on which Serve runs.

python -m tests.ray.nodes PORT [second]    Serve listens at the port; prints the cluster's address, and ends when
                                           standard input is closed

With `second` it has a second node, and another application.
"""

import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster
from starlette.responses import PlainTextResponse

from tests.ray.joined_cluster import FIRST, OTHER_ANSWER, OTHER_ROUTE, SECOND

SMALL = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Without processes that tests do not need: nothing reads the dashboard or the logs, and nodes are added explicitly."""


class OtherApplication:
    async def __call__(self) -> PlainTextResponse:
        return PlainTextResponse(OTHER_ANSWER)


def main(port: int, *, second_node: bool) -> None:
    head = {"num_cpus": 4, "resources": {FIRST: 10, "decoder": 1}}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **SMALL})
    if second_node:
        cluster.add_node(num_cpus=4, resources={SECOND: 10, "decoder": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    if second_node:
        other = serve.deployment(ray_actor_options={"num_cpus": 0, "resources": {FIRST: 0.1}})(OtherApplication)
        serve.run(other.bind(), name="other", route_prefix=OTHER_ROUTE)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(int(sys.argv[1]), second_node=SECOND in sys.argv)
