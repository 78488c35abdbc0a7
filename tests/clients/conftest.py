"""A real server with the default model, a recorder in front of it, and a clean home folder for each client."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.server_config import environment
from tests.clients.recorder import Recorder

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "TELEMETRY_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
"""Settings with which clients send requests only to the server."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-clients", metavar="FOLDER", help="write what each client sends to FOLDER/NAME.json")


@pytest.fixture(scope="session")
def recorder() -> Iterator[Recorder]:
    """A recorder that forwards requests to the default model. Both start with the first test that runs a client."""
    with ExitStack() as stack:
        server = stack.enter_context(ChildServer([DEFAULT_MODEL, "--kv-cache-gb", "0.5"]))
        yield stack.enter_context(Recorder(server.url))


@pytest.fixture
def recorded(recorder: Recorder) -> Recorder:
    """The recorder without the requests of earlier clients."""
    recorder.clear()
    return recorder


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """The environment of a client: a home folder of its own, and none of Motet's packages."""
    kept = {name: value for name, value in environment().items() if name not in ("PYTHONPATH", "NODE_PATH")}
    return {**kept, **QUIET, "HOME": str(tmp_path)}


@pytest.fixture
def recordings(request: pytest.FixtureRequest) -> Path | None:
    """The folder for recordings; None if the run makes none."""
    folder: str | None = request.config.getoption("--record-clients", None)
    return None if folder is None else Path(folder)
