"""A separate program that joins a cluster and deploys a config through Ray's public interface.

python -m tests.ray.driver GCS_ADDRESS CONFIG    runs the application that the config file describes
"""

import sys
from pathlib import Path

import ray
import yaml  # type: ignore[import-untyped]
from ray import serve

from motet.deploy.ray.app import application


def main(address: str, config: Path) -> None:
    ray.init(address=address, log_to_driver=False)
    (described,) = yaml.safe_load(config.read_text())["applications"]
    serve.run(application(described["args"]), name=described["name"], route_prefix=described["route_prefix"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
