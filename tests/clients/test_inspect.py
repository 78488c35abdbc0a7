"""Inspect finds Motet's provider by the entry point of the package."""

import tomllib
from pathlib import Path

import pytest

from tests.clients.installed import INSPECT, INSPECT_PROVIDER, SCRIPTS
from tests.clients.recorder import Recorder
from tests.clients.running import run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]


def test_inspect_finds_the_provider(recorded: Recorder, clean: dict[str, str], tmp_path: Path) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = tmp_path / "site" / "motet-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: motet\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in groups["inspect_ai"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[inspect_ai]", *lines]) + "\n")
    python = str(INSPECT.installed() / "bin" / "python")
    environ = {**clean, "PYTHONPATH": f"{installed.parent}:{ROOT}/src", "MOTET_BASE_URL": f"{recorded.url}/v1"}
    run([python, str(SCRIPTS / INSPECT_PROVIDER), recorded.url], environ, tmp_path)
    assert recorded.refused() == []
    policies = [exchange["body"].get("group") for exchange in recorded.exchanges if exchange["body"]]
    assert [policy and policy["stop_when"]["finished"] for policy in policies] == [2, 3, None, None]
