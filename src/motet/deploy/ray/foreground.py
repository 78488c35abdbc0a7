"""`motet ray`: runs the application until a signal ends it, and leaves nothing behind.

1. the cluster is joined or started, then Serve; at the end, everything that was started here is taken down:

       found                   started            taken down
       no cluster              all of it          all of it
       a cluster, no Serve     Serve, the app     the app, Serve
       a cluster with Serve    the app            the app

2. the application is run; a signal meanwhile ends that
3. ready: it is watched. The first signal takes it down after answers under way had their time; the second one does not
   wait for them
"""

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from importlib.metadata import version
from itertools import count

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client  # noqa: PLC2701  of `serve.run`, which waits with it too
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from motet.deploy.listen import KEEP_ALIVE_S, listen, url_at
from motet.deploy.ray.app import application
from motet.deploy.ray.options import check_hook, deployment_options, most_replicas
from motet.deploy.server import Outcome
from motet.deploy.server_plan import cores
from motet.deploy.shutdown import StopSignals, first_of
from motet.errors import ConfigError, StartupError
from motet.settings.record import Settings
from motet.settings.server_config import environment

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Time between two looks at the application."""
STEP_S = 0.5
"""Seconds between two checks while it starts or ends."""
LOOKS = 10
"""Number of such checks between two log lines about what delays the start, and without an answer before the end."""
LOCAL, FOUND = "local", "auto"
CONTROLLER, NAMESPACE = "SERVE_CONTROLLER_ACTOR", "serve"

OnReady = Callable[[str, Mapping[str, int]], None]
"""Called with the URL, and the number of replicas of each deployment."""


async def run_application(
    settings: Settings,
    arguments: Mapping[str, object],
    *,
    on_ready: OnReady,
    signals: StopSignals,
    make: Callable[[Mapping[str, object]], Application] = application,
) -> Outcome:
    """Runs the application of these settings; `make` makes it of `arguments`. Raises StartupError or ConfigError.

    Ray and Serve are asked in the thread of the loop, in which nothing else runs; slow calls have a thread."""
    ray, server = settings.ray, settings.server()
    check_hook(settings, environment(), ray_version=version("ray"))
    cpus = sum(
        most_replicas(options) * options["ray_actor_options"]["num_cpus"]
        for options in deployment_options(settings).values()
    )
    with connected(ray.ray_address, host=server.host, port=server.port, cpus=cpus) as served:
        signals.take()  # again, since Ray has replaced the handlers by its own
        if served:
            logger.warning("Serve runs on this cluster already, at its own address: --host and --port have no effect")
        if ray.app_name in serve.status().applications:
            raise ConfigError(
                f"--app-name {ray.app_name}: an application with this name runs on this cluster. Choose another name, "
                "or, if that one is a cell too, another cluster (--ray-address): both want the route /"
            )
        try:
            ready = partial(on_ready, url_at(server.host, server.port))
            return await _run(ray.app_name, lambda: make(arguments), on_ready=ready, signals=signals)
        finally:
            await _take_down(ray.app_name, signals)


async def _run(
    name: str, make: Callable[[], Application], *, on_ready: Callable[[Mapping[str, int]], None], signals: StopSignals
) -> Outcome:
    try:
        if not await _until_started(name, make, signals=signals):
            return Outcome.STOPPED_BEFORE_READY
    except (RuntimeError, TimeoutError, RayError, RayServeException) as error:
        raise StartupError(_why(name, error)) from error
    deployments = started.deployments if (started := _overview(name)) else {}
    on_ready({deployment: sum(one.replica_states.values()) for deployment, one in deployments.items()})
    while not signals.drain.is_set():
        if _is_gone(name):
            logger.error("the application %s is gone: somebody else took it down", name)
            return Outcome.ENGINE_DIED
        await first_of(signals.drain.wait(), timeout_s=LOOK_S)
    return Outcome.STOPPED


async def _until_started(name: str, make: Callable[[], Application], *, signals: StopSignals) -> bool:
    """Returns True once it has started, False if it should end. Logs Serve's reasons for a delay.

    `serve.run` would wait for that too, but cannot be told to stop: if it asks Ray after Ray's end, the process dies. A
    signal waits while the application is on its way to Serve, since it could arrive after the take-down, and stay."""
    deploy = partial(serve.run_many, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    if not await _done(lambda: deploy([serve.RunTarget(make(), name, "/")]), signals):
        return False
    told = ""
    for look in count(1):
        one = _overview(name)
        if one is not None and one.status is ApplicationStatus.RUNNING:
            break
        if one is not None and one.status is ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError(one.message)
        await first_of(signals.drain.wait(), timeout_s=STEP_S)
        if signals.drain.is_set():
            return False
        if look % LOOKS == 0 and (said := _complaints(one)) and said != told:
            logger.warning("the application %s is not ready yet:%s", name, said)
            told = said
    return await _done(lambda: _get_global_client().wait_for_proxies_serving(), signals)  # type: ignore[union-attr]


async def _done(work: Callable[[], object], signals: StopSignals) -> bool:
    """Does the work in a thread. Returns False if a signal came. Neither the second signal nor the end of the program
    waits for the thread: for those of a pool it would."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done = asyncio.wrap_future(future)
    await first_of(asyncio.wait([done]), signals.at_once.wait())
    if not signals.drain.is_set():
        done.result()
    return not signals.drain.is_set()


def _why(name: str, error: Exception) -> str:
    why = f"the application {name} cannot be run: {said_by(error)}{_complaints(_overview(name))}"
    if not isinstance(error, RayServeException):
        return why
    return f"{why} A cell has the route / to itself: take down what has it, or use another cluster (--ray-address)"


def _applications() -> Mapping[str, ApplicationStatusOverview] | None:
    """Returns the applications by name, none if there is no Serve any more; None if Serve does not answer now."""
    try:
        return serve.status().applications
    except RayError as error:  # the controller is being started again
        logger.warning("Serve does not answer: %s", said_by(error))
        return None


def _overview(name: str) -> ApplicationStatusOverview | None:
    return (_applications() or {}).get(name)


def _complaints(application: ApplicationStatusOverview | None) -> str:
    """Returns Serve's messages about its deployments, which are the only place for the reason of a failed start."""
    deployments = application.deployments if application else {}
    return "".join(f"\n{deployment}: {one.message}" for deployment, one in deployments.items() if one.message)


def _is_gone(name: str) -> bool:
    """Returns True if the application is gone; False while Serve does not answer."""
    applications = _applications()
    if applications is None:
        return False
    return name not in applications or applications[name].status is ApplicationStatus.DELETING


async def _take_down(name: str, signals: StopSignals) -> None:
    """Ends the application, and waits for answers under way unless a second signal comes: then Serve ends it alone."""
    unanswered = 0
    while unanswered < LOOKS:
        applications = _applications()
        unanswered = unanswered + 1 if applications is None else 0
        if applications is not None and name not in applications:
            return
        if applications is not None and applications[name].status is not ApplicationStatus.DELETING:
            with contextlib.suppress(RayError, RayServeException):  # it is gone, or is asked again
                serve.delete(name, _blocking=False)
        elif signals.at_once.is_set():
            return
        await first_of(signals.at_once.wait(), timeout_s=STEP_S)
    logger.error("the application %s could not be taken down: Serve does not answer", name)


@contextlib.contextmanager
def connected(address: str | None, *, host: str, port: int, cpus: float) -> Iterator[bool]:
    """Yields True if Serve was there before. `cpus`: the least CPUs of a cluster made here. Raises StartupError."""
    with contextlib.ExitStack() as stack:
        if not _joined(address):
            listen(host, port).close()  # Serve will listen there: a taken port is found at once
            ray.init(
                address=LOCAL,
                num_cpus=max(cores(), math.ceil(cpus)),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        stack.callback(ray.shutdown)
        served = _serve_is_there()
        if not served:
            stack.callback(serve.shutdown)
            _start_serve(host, port)
        yield served


def said_by(error: Exception) -> str:
    """Returns the error's text without the traceback of the process it comes from."""
    return str(error.cause if isinstance(error, RayTaskError) else error)


def _joined(address: str | None) -> bool:
    """Joins a cluster; returns False if one must be started here."""
    if address == LOCAL:
        return False
    try:
        ray.init(address=address or FOUND, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        if address is not None:
            raise StartupError(f"--ray-address {address}: no cluster can be reached there: {error}") from error
        logger.info("no cluster that can be joined, so one is started here: %s", str(error).partition("\n")[0])
        return False
    except RuntimeError as error:  # such as another version of Ray or Python
        raise StartupError(f"the cluster at {address or FOUND} cannot be joined: {error}") from error
    return True


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
