"""The cluster and Serve as `motet ray` finds them, starts what is missing, and takes down what it started.

found                   started            taken down
no cluster              all of it          all of it
a cluster, no Serve     Serve, the app     the app, Serve
a cluster with Serve    the app            the app
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import HTTPOptions

from motet.deploy.listen import listen
from motet.errors import StartupError

logger = logging.getLogger(__name__)

LOCAL, FOUND = "local", "auto"
KEEP_ALIVE_S = 75
CONTROLLER, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"


@contextlib.contextmanager
def connected(address: str | None, *, host: str, port: int, cpus: float) -> Iterator[bool]:
    """Tells whether Serve was there before, and listens where it was told then; else it is started here, and listens at
    `host` and `port`. `cpus`: that all replicas want together; a local cluster has at least so many. Raises
    StartupError."""
    _connect(address, cpus, lambda: listen(host, port).close())
    try:
        served = _serve_is_there()
        try:
            if not served:
                _start_serve(host, port)
            yield served
        finally:
            if not served:
                serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def said_by(error: Exception) -> str:
    """Without the traceback of the process it comes from."""
    return str(error.cause if isinstance(error, RayTaskError) else error)


def _connect(address: str | None, cpus: float, check_port: Callable[[], None]) -> None:
    """`check_port`: on a cluster of this machine alone Serve listens here, and a taken port is known at once."""
    if address != LOCAL:
        try:
            ray.init(address=address or FOUND, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            if address is not None:
                raise StartupError(f"--ray-address {address}: no cluster can be reached there: {error}") from error
            logger.info("no cluster that can be joined, so one is started here: %s", str(error).partition("\n")[0])
        except RuntimeError as error:  # such as another version of Ray or Python
            raise StartupError(f"the cluster at {address or FOUND} cannot be joined: {error}") from error
        else:
            return
    check_port()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ray.init(
        address=LOCAL,
        num_cpus=max(cores, -int(-cpus // 1)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def _start_serve(host: str, port: int) -> None:
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=KEEP_ALIVE_S))
    except (RuntimeError, TimeoutError, RayError) as error:
        raise StartupError(f"Serve cannot be started to listen at {host}:{port}: {said_by(error)}") from error


def _serve_is_there() -> bool:
    try:
        ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return False
    return True
