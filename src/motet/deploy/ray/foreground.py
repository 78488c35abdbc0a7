"""`motet ray`: runs the application until a signal ends it, and removes everything that it started.

1. it joins or starts a cluster, then Serve; at the end, it takes down what it has started:

       found                   started                   taken down
       no cluster              cluster, Serve, app       all three
       a cluster, no Serve     Serve, app                app, Serve
       a cluster with Serve    app                       app

2. it starts the application; a signal during the start ends it
3. ready: it watches the application. After the first signal, the application is taken down when the running answers
   have ended or their time is over; after the second signal, at once
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ProxyStatus, ServeStatus

from motet.deploy.listen import listen, url_at
from motet.deploy.ray.app import application
from motet.deploy.ray.options import deployment_options, max_replicas_of
from motet.deploy.server import Outcome
from motet.deploy.shutdown import StopSignals, first_of
from motet.errors import ConfigError, StartupError
from motet.settings.record import Settings
from motet.settings.server_config import ServerConfig
from motet.system.machine import cores
from motet.system.threads import in_daemon_thread

logger = logging.getLogger(__name__)

CHECK_S = 5.0
"""Time between two checks of the running application."""
POLL_S = 0.5
"""Time between two checks while the application starts or ends."""
POLLS = 10
"""Number of these checks between two log lines about the reasons for a slow start. The take-down is also given up after
this number of checks that Serve did not answer."""
CONTROLLER = {"name": "SERVE_CONTROLLER_ACTOR", "namespace": "serve"}
"""Serve's controller, as `ray.get_actor` finds it."""
ENGINES_END_THEMSELVES = {"kill_child_processes_on_worker_exit": False}
"""Ray's setting with which it does not kill the engine of a replica that it ends. Engines end with their replicas, and
remove the folder of their pipes if the replica could not."""
SERVE_END_S = 30.0
"""Maximum time for the end of Serve, whose applications have ended."""
LOCAL, FOUND = "local", "auto"
"""Ray addresses: a new cluster on this machine, and the running cluster."""
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
    """Runs the application that `make` builds from `arguments`. Raises StartupError or ConfigError.

    Ray and Serve are called on the event loop, which has nothing else to do; slow calls run in a thread."""
    ray, server = settings.ray, settings.server()
    cpus = sum(
        max_replicas_of(options) * options["ray_actor_options"]["num_cpus"]
        for options in deployment_options(settings).values()
    )
    with connected(ray.ray_address, server=server, cpus=cpus) as served:
        signals.take()  # again, since Ray has replaced the handlers by its own
        if served:
            logger.warning("Serve runs on this cluster already, at its own address: --host and --port have no effect")
        if ray.app_name in serve.status().applications:
            raise ConfigError(
                f"--app-name {ray.app_name}: an application with this name runs on this cluster. Choose another name, "
                "or, if that application is a cell too, another cluster (--ray-address): both need the route /"
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
        raise StartupError(_failure(name, error)) from error
    deployments = started.deployments if (started := _overview(name)) else {}
    on_ready({name: sum(deployment.replica_states.values()) for name, deployment in deployments.items()})
    while not signals.drain.is_set():
        if (status := _status()) is not None and _is_gone(name, status):
            logger.error("the application %s is gone: another program took it down", name)
            return Outcome.ENGINE_DIED
        await first_of(signals.drain.wait(), timeout_s=CHECK_S)
    return Outcome.STOPPED


async def _until_started(name: str, make: Callable[[], Application], *, signals: StopSignals) -> bool:
    """Returns True when the application has started, False if a signal came first. Logs Serve's reasons for a delay.

    `serve.run` could wait for the start, but cannot be interrupted: if it calls Ray after Ray's end, the process dies.
    A signal waits while the application is sent to Serve, which could otherwise receive it after the take-down."""
    deploy = partial(serve.run_many, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    if not await _done(lambda: deploy([serve.RunTarget(make(), name, "/")]), signals):
        return False
    logged, checks = "", 0
    while not signals.drain.is_set():
        status = _status()
        overview = status.applications.get(name) if status else None
        if status and overview and overview.status is ApplicationStatus.RUNNING:
            if ProxyStatus.STARTING not in status.proxies.values():
                return True
        elif overview and overview.status is ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError(overview.message)
        checks += 1
        if checks % POLLS == 0 and (reasons := reasons_for_delay(overview)) not in ("", logged):
            logger.warning("the application %s is not ready yet: %s", name, reasons)
            logged = reasons
        await first_of(signals.drain.wait(), timeout_s=POLL_S)
    return False


async def _done(work: Callable[[], object], signals: StopSignals) -> bool:
    """Does the work in a thread, for which a second signal does not wait. Returns False if a signal came."""
    done = asyncio.wrap_future(in_daemon_thread(work, name="serve"))
    await first_of(asyncio.wait([done]), signals.at_once.wait())
    if not signals.drain.is_set():
        done.result()
    return not signals.drain.is_set()


def _failure(name: str, error: Exception) -> str:
    failure = f"the application {name} cannot be run: {text_of(error)}{_messages(_overview(name))}"
    if not isinstance(error, RayServeException):
        return failure
    advice = "A cell needs the route /: take down the application that has it, or use another cluster (--ray-address)"
    return f"{failure} {advice}"


def _status() -> ServeStatus | None:
    """Returns the status of Serve, without applications if Serve has ended; None if Serve does not answer now."""
    try:
        return serve.status()
    except RayError as error:  # the controller is being restarted
        logger.warning("Serve does not answer: %s", text_of(error))
        return None


def _overview(name: str) -> ApplicationStatusOverview | None:
    status = _status()
    return status.applications.get(name) if status else None


def _messages(application: ApplicationStatusOverview | None) -> str:
    """Returns Serve's messages about the deployments. Only they have the reason for a failed start."""
    deployments = application.deployments if application else {}
    return "".join(f"\n{name}: {deployment.message}" for name, deployment in deployments.items() if deployment.message)


def reasons_for_delay(application: ApplicationStatusOverview | None) -> str:
    """Returns Serve's messages about the deployments in one line, for the log."""
    return " ".join(_messages(application).split())


def _is_gone(name: str, status: ServeStatus) -> bool:
    return name not in status.applications or status.applications[name].status is ApplicationStatus.DELETING


async def _take_down(name: str, signals: StopSignals) -> None:
    """Ends the application, and waits until it has ended or a second signal comes; Serve then continues to end it."""
    unanswered = 0
    while unanswered < POLLS:
        status = _status()
        unanswered = unanswered + 1 if status is None else 0
        if status is not None and name not in status.applications:
            return
        if status is not None and not _is_gone(name, status):
            with contextlib.suppress(RayError, RayServeException):  # the application was or will be deleted
                serve.delete(name, _blocking=False)  # the parameter is not public, but without it `delete` waits
        elif signals.at_once.is_set():
            return
        await first_of(signals.at_once.wait(), timeout_s=POLL_S)
    logger.error("the application %s could not be taken down: Serve does not answer", name)


@contextlib.contextmanager
def connected(address: str | None, *, server: ServerConfig, cpus: float) -> Iterator[bool]:
    """Joins or starts a cluster with Serve. Yields True if Serve ran before. `cpus`: minimum number of CPUs of a new
    cluster. Raises StartupError."""
    with contextlib.ExitStack() as stack:
        if not _joined(address):
            listen(server.host, server.port).close()  # finds at once that the port is taken; Serve will listen there
            _start_cluster(cpus)
        stack.callback(ray.shutdown)
        status = serve.status()
        served = bool(status.proxies or status.applications)
        if not served:
            stack.callback(_end_serve)
            _start_serve(server)
        yield served


def text_of(error: Exception) -> str:
    """Returns the error's text without the traceback of the process in which it was raised."""
    return str(error.cause if isinstance(error, RayTaskError) else error)


def _joined(address: str | None) -> bool:
    """Joins a cluster. Returns False if a cluster must be started here."""
    if address == LOCAL:
        return False
    try:
        ray.init(address=address or FOUND, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        if address is not None:
            raise StartupError(f"--ray-address {address}: no cluster can be reached there: {error}") from error
        logger.info("no cluster can be joined, so one is started here: %s", str(error).partition("\n")[0])
        return False
    except RuntimeError as error:  # for example another version of Ray or Python
        raise StartupError(f"the cluster at {address or FOUND} cannot be joined: {error}") from error
    return True


def _start_cluster(cpus: float) -> None:
    try:
        ray.init(
            address=LOCAL,
            num_cpus=max(cores(), math.ceil(cpus)),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _system_config=ENGINES_END_THEMSELVES,
        )
    except Exception as error:  # Ray raises a plain Exception if its processes do not start in time
        raise StartupError(
            f"Ray cannot start a cluster on this machine: {error} Ray gives its processes 15 s to start, which can be "
            "too little on a busy machine; /tmp/ray/session_latest/logs/raylet.err has the reason"
        ) from error


def _end_serve() -> None:
    """Ends Serve. The controller ends during this call, so the call fails. `serve.shutdown` makes the same call with
    retries, and Ray prints the failure of such a call."""
    with contextlib.suppress(ValueError):  # the controller has already ended
        controller = ray.get_actor(**CONTROLLER)
        try:
            ray.get(controller.graceful_shutdown.options(max_task_retries=0).remote(), timeout=SERVE_END_S)
        except GetTimeoutError:
            logger.warning("Serve has not ended after %g s", SERVE_END_S)
        except RayError:
            pass


def _start_serve(server: ServerConfig) -> None:
    host, port = server.host, server.port
    try:
        serve.start(http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=server.keep_alive_s))
    except (RuntimeError, TimeoutError, RayError) as error:
        raise StartupError(f"Serve cannot be started to listen at {host}:{port}: {text_of(error)}") from error
