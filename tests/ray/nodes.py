"""A cluster on this machine that belongs to somebody else: Serve runs on it.

python -m tests.ray.nodes PORT [far]    Serve listens there; prints the cluster's address, and ends with standard input

With `far` it has a second node, and an application of their own.
"""

import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster
from starlette.responses import PlainTextResponse

from tests.ray.joined import ANSWER, FAR, NEAR, STRANGER

WITHOUT = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
"""Nobody looks there, and nodes come when they are told."""


class Stranger:
    async def __call__(self) -> PlainTextResponse:
        return PlainTextResponse(ANSWER)


def main(port: int, *, far: bool) -> None:
    head = {"num_cpus": 4, "resources": {NEAR: 10, "decoder": 1}}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **WITHOUT})
    if far:
        cluster.add_node(num_cpus=4, resources={FAR: 10, "decoder": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    if far:
        stranger = serve.deployment(ray_actor_options={"num_cpus": 0, "resources": {NEAR: 0.1}})(Stranger)
        serve.run(stranger.bind(), name="stranger", route_prefix=STRANGER)
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(int(sys.argv[1]), far=FAR in sys.argv)
