"""Clients of trainers, with a real server that has the default model and `--rl`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL
from tests.clients.installed import TRL
from tests.clients.recorder import Recorder
from tests.clients.running import run, save_requests

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


@pytest.fixture
def trained() -> Iterator[Recorder]:
    arguments = [DEFAULT_MODEL, "--rl", "--max-logprobs", "100", "--logprobs-mode", "processed_logprobs"]
    with ChildServer([*arguments, "--kv-cache-gb", "0.5"]) as server, Recorder(server.url) as recorder:
        yield recorder


def test_trl_s_client_works(trained: Recorder, clean: dict[str, str], tmp_path: Path, recordings: Path | None) -> None:
    run([*TRL.command(), trained.url], clean, tmp_path)
    save_requests(trained, TRL, home=tmp_path, recordings=recordings)
