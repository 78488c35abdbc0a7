"""A tiny model, the answers of one server, and clusters that tests share: one for each ingress.

Modules that take long to import, such as torch, are imported where they are used: the first process of pytest-xdist
reads this file too but runs no test, and the others start only when it has read all files.
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

from motet.settings.ray_config import Ingress

if TYPE_CHECKING:
    from tests.fault.oracle import Undisturbed
    from tests.ray.engines import Engines
    from tests.ray.existing_cluster import ExistingCluster
    from tests.ray.running_ray import RunningRay

ENGINES = pytest.StashKey["Engines"]()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """All tests run in one event loop, so that several can use one cluster."""
    return "asyncio"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """The first process of pytest-xdist forks engines for all others: it imports while they collect their tests."""
    from tests.ray.engines import running_engines

    if ENGINES not in node.config.stash:
        stack = ExitStack()
        node.config.stash[ENGINES] = stack.enter_context(running_engines())
        node.config.add_cleanup(stack.close)
    node.workerinput["engines"] = node.config.stash[ENGINES].at


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest) -> "Iterator[Engines]":
    from tests.ray.engines import Engines, running_engines

    input: dict[str, str] | None = getattr(request.config, "workerinput", None)
    with nullcontext(Engines(input["engines"])) if input else running_engines() as engines:
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
    """Yields a port at which another program listens."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(scope="session")
async def existing(engines: "Engines", undisturbed: "Undisturbed") -> "AsyncIterator[ExistingCluster]":
    """Cells join this cluster one after the other: a cluster of its own would cost each cell 15 s of a core. It ends
    before `undisturbed`, which expects that all later processes are its own."""
    from tests.ray.existing_cluster import ExistingCluster

    cluster = ExistingCluster(engines)
    yield cluster
    await cluster.end()


@pytest.fixture(scope="session", params=list(Ingress))
async def shared(
    request: pytest.FixtureRequest,
    folder: Path,
    engines: "Engines",
    undisturbed: "Undisturbed",
    taken: int,
    existing: "ExistingCluster",
) -> "AsyncIterator[RunningRay]":
    """Tests are ordered so that there is one cell at a time, one for each ingress: with a gateway on a cluster of its
    own, with direct ingress on an existing one. Two replicas decode, so that one is left when the other is lost. The
    drain timeout is long with a gateway, and short with direct ingress."""
    from tests.engines.native.adapter_files import save_adapter
    from tests.ray.joined_cluster import FIRST
    from tests.ray.running_ray import RunningRay

    ingress: Ingress = request.param
    gateway = ingress is Ingress.GATEWAY
    running = RunningRay(
        folder,
        *(("--rl",) if gateway else (f"--resources-of=decode={FIRST}:1",)),
        joined=None if gateway else await existing.joined(),
        engines=engines,
        prefill=1,
        decode=2,
        ingress=ingress,
        max_body_bytes=100_000,
        decode_port=taken if gateway else 0,
        adapter=f"poet={save_adapter(folder, folder.parent / 'poet')}",
        drain_timeout=100 if gateway else 1,
    )
    async with running as ray:
        yield ray


@pytest.fixture
async def ray(shared: "RunningRay") -> "RunningRay":
    """The shared cell, complete and idle. Anything that a test leaves in it disturbs the next one."""
    await shared.until_idle()
    return shared


@pytest.fixture
def ending_ray(ray: "RunningRay") -> "RunningRay":
    """The shared cell, for a test that ends it. Such a test runs after all others that use this cell."""
    return ray


HERE = Path(__file__).parent
JOINED = ("direct", "test_ends", "test_autoscaling")
"""Groups whose cells join an existing cluster, one after the other."""
GROUPS = ("gateway", *JOINED, "test_nodes")
"""Groups of tests with one cell each, in an order for which two test processes end at the same time."""


class OneClusterEach(LoadScopeScheduling):  # type: ignore[misc]
    """Makes pytest-xdist run the tests of one cluster in one process. Its own groups (`--dist loadgroup`) fail with
    this version of pytest, which gives tests new names."""

    def _split_scope(self, nodeid: str) -> str:
        group = group_of(nodeid)
        return "joined" if group in JOINED else group


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneClusterEach:
    return OneClusterEach(config, log)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    here = [item for item in items if item.path.is_relative_to(HERE)]
    others = [item for item in items if not item.path.is_relative_to(HERE)]
    here.sort(key=place)
    items[:] = [*here, *others]


def place(item: pytest.Function) -> tuple[int, bool, bool, bool]:
    """Returns the sort key of a test. A process gets its next tests when two are left, and these must not be long."""
    is_long = "under_load" in item.name or "without_controller" in item.name
    return (
        GROUPS.index(group_of(item.nodeid)),
        ending_ray.__name__ in item.fixturenames,
        "faults" in item.path.stem,
        not is_long,
    )


def group_of(nodeid: str) -> str:
    """Returns the ingress of the test's shared cell, or its module."""
    path, _, name = nodeid.partition("::")
    parameter = name.partition("[")[2].partition("]")[0].partition("-")[0]
    return parameter if parameter in list(Ingress) else Path(path).stem
