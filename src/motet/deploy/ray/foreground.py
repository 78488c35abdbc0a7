"""`motet ray`: runs the application until a signal ends it, and leaves nothing behind.

1. the cluster is joined or started, then Serve (`cluster`)
2. the application is run; a signal meanwhile ends that
3. ready: it is watched. The first signal takes it down, and answers under way have their time; the second one does not
   wait for them
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib.metadata import version
from types import FrameType

from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from motet.config import environment
from motet.deploy.listen import url_at
from motet.deploy.ray.app import application
from motet.deploy.ray.cluster import connected, said_by
from motet.deploy.ray.direct_ingress import check_hook
from motet.deploy.ray.options import deployment_options, most_replicas
from motet.deploy.server import Outcome
from motet.deploy.stop import SIGNALS
from motet.errors import ConfigError, StartupError
from motet.settings import Settings

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Between two looks at the application."""
STEP_S = 0.1


OnReady = Callable[[str, Mapping[str, int]], None]
"""Gets the URL, and how many replicas of each deployment run."""


class Stopping:
    """Signals, counted: one asks to stop, two to stop at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.at_once = threading.Event()

    def ask(self, number: int = 0, frame: FrameType | None = None) -> None:
        (self.at_once if self.asked.is_set() else self.asked).set()

    def watch_stdin(self) -> None:
        """Stops at once when the program at the other end of standard input has ended, however it did."""

        def watch() -> None:
            while os.read(sys.stdin.fileno(), 4096):
                pass
            self.asked.set()
            self.at_once.set()

        threading.Thread(target=watch, daemon=True).start()

    def take_signals(self) -> None:
        """From the main thread, and once Ray is there: it takes them too, and its own way to end is not ours."""
        for number in SIGNALS:
            signal.signal(number, self.ask)


def run_application(
    settings: Settings,
    arguments: Mapping[str, object],
    *,
    on_ready: OnReady,
    stopping: Stopping,
    make: Callable[[Mapping[str, object]], Application] = application,
) -> Outcome:
    """Raises StartupError or ConfigError."""
    ray, server = settings.ray, settings.server(served_model_name="")
    check_hook(settings, environment(), ray_version=version("ray"))
    cpus = sum(
        most_replicas(options) * options["ray_actor_options"]["num_cpus"]
        for options in deployment_options(settings).values()
    )
    with connected(ray.ray_address, host=server.host, port=server.port, cpus=cpus) as served:
        stopping.take_signals()
        if served:
            logger.warning("Serve runs on this cluster already: it listens where it does, not at --host and --port")
        _check_name(ray.app_name)
        try:
            return _run(ray.app_name, lambda: make(arguments), on_ready, url_at(server.host, server.port), stopping)
        finally:
            _take_down(ray.app_name, stopping)


def _check_name(name: str) -> None:
    if name in serve.status().applications:
        raise ConfigError(
            f"--app-name {name}: an application of that name runs on this cluster. Choose another name, or, if that "
            "one is a cell too, another cluster (--ray-address): both want the route /"
        )


def _run(name: str, make: Callable[[], Application], on_ready: OnReady, url: str, stopping: Stopping) -> Outcome:
    started = _in_a_thread(lambda: serve.run(make(), name=name, route_prefix="/"))
    if not _until_started(name, started, stopping):
        return Outcome.STOPPED_BEFORE_READY
    try:
        started.result()
    except (RuntimeError, TimeoutError, RayError, RayServeException) as error:
        raise StartupError(_why(name, error)) from error
    on_ready(url, _replicas(name))
    while not stopping.asked.wait(LOOK_S):
        if not _is_there(name):
            logger.error("the application %s is gone: somebody else took it down", name)
            return Outcome.ENGINE_DIED
    return Outcome.STOPPED


def _until_started(name: str, started: "Future[object]", stopping: Stopping) -> bool:
    """False: it is not wanted any more. What holds it up is logged: no room on the cluster, say, or a replica that did
    not start and is tried again."""
    told = ""
    look_s = time.monotonic() + LOOK_S
    while not started.done():
        if stopping.asked.wait(STEP_S):
            _until_sent(name, started, stopping)
            return False
        if time.monotonic() >= look_s:
            look_s += LOOK_S
            said = _complaints(name)
            if said and said != told:
                logger.warning("the application %s is not ready yet:%s", name, said)
                told = said
    return True


def _until_sent(name: str, started: "Future[object]", stopping: Stopping) -> None:
    """What is still on its way to Serve would come when there is nothing to take down yet, and stay."""
    while not (started.done() or name in (_applications() or {}) or stopping.at_once.wait(STEP_S)):
        pass


def _why(name: str, error: Exception) -> str:
    why = f"the application {name} cannot be run: {said_by(error)}{_complaints(name)}"
    if not isinstance(error, RayServeException):
        return why
    return f"{why} A cell has the route / to itself: take down what has it, or use another cluster (--ray-address)"


def _applications() -> Mapping[str, ApplicationStatusOverview] | None:
    """By name; None: Serve does not answer now."""
    try:
        return serve.status().applications
    except RayError as error:  # the controller is being started again
        logger.warning("Serve does not answer: %s", said_by(error))
        return None


def _deployments(name: str) -> Mapping[str, DeploymentStatusOverview]:
    status = (_applications() or {}).get(name)
    return {} if status is None else status.deployments


def _complaints(name: str) -> str:
    """What Serve says of its deployments: why a replica did not start stands there alone."""
    return "".join(f"\n{deployment}: {one.message}" for deployment, one in _deployments(name).items() if one.message)


def _replicas(name: str) -> Mapping[str, int]:
    return {deployment: sum(one.replica_states.values()) for deployment, one in _deployments(name).items()}


def _is_there(name: str) -> bool:
    """Or nobody knows."""
    applications = _applications()
    if applications is None:
        return True
    return name in applications and applications[name].status is not ApplicationStatus.DELETING


def _take_down(name: str, stopping: Stopping) -> None:
    """Waits for answers under way, unless a second signal comes."""
    taken = _in_a_thread(lambda: _delete(name))
    while not taken.done():
        if stopping.at_once.wait(STEP_S):
            return
    if error := taken.exception():
        logger.error("the application %s could not be taken down: %s", name, error)


def _delete(name: str) -> None:
    while True:
        try:
            serve.delete(name)
        except TimeoutError:  # Serve waits for a minute, and answers may have longer
            logger.info("the application %s still has answers under way", name)
            continue
        except RayServeException:  # there is no Serve any more: somebody took down all of it
            pass
        return


def _in_a_thread(work: Callable[[], object]) -> "Future[object]":
    """Not of a pool: its threads are waited for at the end of the program."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
