"""Every client works unchanged: its own package, in an environment of its own, with a real server.

`make clients` runs this before a release. With `--record-clients FOLDER` it also saves the requests of each client,
which `tests/api/test_recorded_clients.py` sends again.
"""

from pathlib import Path

import pytest

from tests.clients.installed import CLIENTS, Client
from tests.clients.recorder import Recorder
from tests.clients.running import run, save_requests

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.key)
def test_a_client_works(
    client: Client, recorded: Recorder, clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    run([*client.command(), recorded.url], clean, tmp_path)
    save_requests(recorded, client, home=tmp_path, recordings=recordings)
