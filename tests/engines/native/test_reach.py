"""Who may reach an engine's memory, and what is said about it at the start."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.engines.native.build import build_core
from motet.errors import ConfigError
from motet.transfer.address import is_loopback
from motet.types import Role
from tests.engines.native.drive import engine_config

Tiny = Callable[[str], Path]
ELSEWHERE = "203.0.113.9"
"""An address of documentation (RFC 5737): no machine has it."""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_what_only_this_machine_reaches(host: str) -> None:
    assert is_loopback(host)
    assert not is_loopback(ELSEWHERE)


@pytest.mark.parametrize(("cluster_key", "warnings"), [("", 1), ("ours", 0)])
def test_a_worker_that_others_reach_without_a_cluster_key_says_what_that_means(
    cluster_key: str, warnings: int, tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    config = engine_config(
        tiny("llama"), role=Role.DECODE, side_channel_host=ELSEWHERE, side_channel_port=0, cluster_key=cluster_key
    )
    with caplog.at_level(logging.WARNING, logger="motet"), pytest.raises(ConfigError, match="no interface"):
        build_core(config)
    assert [record.message.startswith("--cluster-key is not set") for record in caplog.records] == [True] * warnings
