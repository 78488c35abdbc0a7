"""A tiny model, the answers of one server, and clusters that tests share: one for each ingress.

Modules that take long to import, such as torch, are imported where they are used: the first process of pytest-xdist
reads this file too but runs no test, and the others start only when it is through.
"""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]

from motet.types import Ingress

if TYPE_CHECKING:
    from tests.fault.oracle import Undisturbed
    from tests.ray.engines import Engines
    from tests.ray.running_ray import RunningRay
    from tests.ray.their_cluster import TheirCluster

ENGINES = pytest.StashKey["Engines"]()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """All tests run in one loop, so that several can use one cluster."""
    return "asyncio"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """The first process of pytest-xdist forks engines for all others: it imports while they look for their tests."""
    from tests.ray.engines import running_engines

    if ENGINES not in node.config.stash:
        stack = ExitStack()
        node.config.stash[ENGINES] = stack.enter_context(running_engines())
        node.config.add_cleanup(stack.close)
    node.workerinput["engines"] = node.config.stash[ENGINES].at


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> "Iterator[Engines]":
    from tests.ray.engines import Engines, running_engines

    told: dict[str, str] | None = getattr(request.config, "workerinput", None)
    with nullcontext(Engines(told["engines"])) if told else running_engines() as engines:
        yield engines


@pytest.fixture(scope="session")
def folder(engines: "Engines") -> Path:
    return engines.folder()


@pytest.fixture(scope="session")
async def undisturbed(folder: Path, engines: "Engines") -> "AsyncIterator[Undisturbed]":
    from tests.fault.oracle import Undisturbed

    async with AsyncExitStack() as stack:
        one = Undisturbed(folder, engines.spawn, stack)
        await one.start("float32")
        yield one


@pytest.fixture(scope="session")
def taken() -> Iterator[int]:
    """Yields a port at which somebody else listens."""
    with socket.socket() as stranger:
        stranger.bind(("", 0))
        stranger.listen()
        yield stranger.getsockname()[1]


@pytest.fixture(scope="session")
async def theirs(engines: "Engines", undisturbed: "Undisturbed") -> "AsyncIterator[TheirCluster]":
    """Cells join this cluster one after the other: one of their own would cost each 15 s of a core. It ends before
    `undisturbed`, which takes any later process for its own."""
    from tests.ray.their_cluster import TheirCluster

    cluster = TheirCluster(engines)
    yield cluster
    await cluster.end()


@pytest.fixture(scope="session", params=list(Ingress))
async def shared(
    request: pytest.FixtureRequest,
    folder: Path,
    engines: "Engines",
    undisturbed: "Undisturbed",
    taken: int,
    theirs: "TheirCluster",
) -> "AsyncIterator[RunningRay]":
    """Tests are ordered so that each ingress has one cell, one at a time: behind a gateway on a cluster of its own,
    else on one that was there. Two replicas decode, so one is left when the other is lost. Behind a gateway answers may
    take long; elsewhere they are ended soon."""
    from tests.ray.joined import NEAR
    from tests.ray.running_ray import RunningRay

    ingress: Ingress = request.param
    gateway = ingress is Ingress.GATEWAY
    running = RunningRay(
        folder,
        *(("--rl",) if gateway else (f"--resources-of=decode={NEAR}:1",)),
        joined=None if gateway else await theirs.joined(),
        engines=engines,
        prefill=1,
        decode=2,
        ingress=ingress,
        max_body_bytes=100_000,
        decode_port=taken if gateway else 0,
        drain_timeout=100 if gateway else 1,
    )
    async with running as ray:
        yield ray


@pytest.fixture
async def ray(shared: "RunningRay") -> "RunningRay":
    """The shared cell, whole and idle. Whatever a test leaves in it disturbs the next one."""
    await shared.until_whole()
    return shared


HERE = Path(__file__).parent
JOINED = ("direct", "test_ends", "test_autoscaling")
"""Groups whose cells join somebody else's cluster, one after the other."""
GROUPS = ("gateway", *JOINED, "test_nodes", "test_prefix_router")
"""Groups of tests that have a cell each, in an order in which two processes end at the same time."""
LAST = "test_a_cell_that_is_ended"
"""Tests whose names begin so end the shared cell."""


class OneClusterEach(LoadScopeScheduling):  # type: ignore[misc]
    """Makes pytest-xdist run the tests of one cluster in one process. Its own groups (`--dist loadgroup`) fail with
    this version of pytest, which gives tests new names."""

    def _split_scope(self, nodeid: str) -> str:
        group = group_of(nodeid)
        return "joined" if group in JOINED else group


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneClusterEach:
    return OneClusterEach(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    others = [item for item in items if not item.path.is_relative_to(HERE)]
    ours.sort(key=place)
    items[:] = [*ours, *others]


def place(item: pytest.Item) -> tuple[int, bool, bool, bool]:
    """A process gets its next tests when it has two left, so the longest ones must come before those."""
    is_long = "under_load" in item.name or "without_controller" in item.name
    return GROUPS.index(group_of(item.nodeid)), item.name.startswith(LAST), "faults" in item.path.stem, not is_long


def group_of(nodeid: str) -> str:
    """Returns the ingress of the shared cell, or the module."""
    path, _, name = nodeid.partition("::")
    parameter = name.partition("[")[2].partition("]")[0].partition("-")[0]
    return parameter if parameter in list(Ingress) else Path(path).stem
