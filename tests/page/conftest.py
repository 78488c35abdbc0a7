"""A headless Chromium, and pages in it that may neither complain in the console nor ask anybody but their server; and
servers whose engine writes as far as it is let."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from motet.testing.fake_engine import Script
from tests.page.asking import GatedServer, Start, worded
from tests.patience import PATIENCE_S
from tools.screenshots import CHROMIUM_FLAGS, chromium_path

REFUSED = re.compile(r"Failed to load resource: (?:the server responded with a status of (\d+)|net::)")
"""Chromium says so of each refusal and each connection that fails, whatever the page makes of it."""

expect.set_options(timeout=1000 * PATIENCE_S)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(script: Script = worded, **settings: Any) -> GatedServer:
            server = GatedServer(folder, script, **settings)
            stack.enter_context(server)
            return server

        yield start


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for a module: Playwright's loop counts as running in this thread for as long as it lives."""
    if (path := chromium_path()) is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS) as running,
    ):
        yield running


@pytest.fixture
def refusals() -> set[int]:
    """The statuses with which the page may be refused, and 0 for a lost connection: none, unless a test adds them."""
    return set()


@pytest.fixture
def page(browser: Browser, refusals: set[int]) -> Iterator[Page]:
    complaints: list[str] = []
    hosts: set[str] = set()

    def note(request: Request) -> None:
        if not request.url.startswith("data:"):
            hosts.add(request.url.split("/")[2])

    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", note)
        yield page
        assert [one for one in complaints if _refused_with(one) not in refusals] == []
        assert len(hosts) <= 1


def _refused_with(complaint: str) -> int | None:
    """Returns None if it is about something else."""
    match = REFUSED.match(complaint)
    return None if match is None else int(match[1] or 0)
